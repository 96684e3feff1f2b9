"""Parts of coordinators: the shards, the members, the data, the checkpoints, the evaluations, the end."""
