"""Layout of the flat vector, and which shard holds which range of it, as pure functions."""
