"""Several hosts as one place: who is where, the agents that start roles there, and the engines that start agents."""
