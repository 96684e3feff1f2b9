"""What coordinators are composed of: the shards, the members, the data, the checkpoints, the evaluations, the end."""
