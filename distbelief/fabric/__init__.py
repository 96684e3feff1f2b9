"""Fabrics: carriers of a group's sum, and the player of schedules over them."""
