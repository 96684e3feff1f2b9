"""Checkers of our own sweeps, which stand outside of a simulated job."""
