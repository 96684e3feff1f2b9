"""All-reduce: no server; replicas add up their gradients among themselves, and each makes the same update."""
