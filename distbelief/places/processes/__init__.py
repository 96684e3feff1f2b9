"""Processes of this machine: their start, watch and end."""
