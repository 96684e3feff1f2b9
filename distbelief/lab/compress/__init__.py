"""Smaller models: pruned, shared and coded, and trained on between these steps by an ordinary job."""
