"""Compression of models: pruned, shared and coded, with ordinary jobs that train between these steps."""
