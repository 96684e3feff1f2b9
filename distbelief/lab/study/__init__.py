"""Studies: ways to train that are run by the same rules, and what they add up to; readers of results."""
