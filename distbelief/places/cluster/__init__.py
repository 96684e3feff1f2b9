"""Several hosts as one place: the placement of roles, the agents that start them, and the engines that start agents."""
