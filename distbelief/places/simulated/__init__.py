"""Virtual cluster: the roles of a job on a simulated clock."""
