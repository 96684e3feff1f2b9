"""Sandblaster: batch methods on vectors that shards hold (section 4.2 of the paper); the coordinator sees scalars."""
