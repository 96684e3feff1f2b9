"""A virtual cluster: the same roles on a simulated clock."""
