"""Coordinator and its parts: the shards, the members, the data, the checkpoints, the evaluations, the end."""
