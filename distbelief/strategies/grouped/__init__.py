"""Jobs of replicas in groups, which hold the parameters and make the same updates."""
