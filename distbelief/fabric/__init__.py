"""Fabrics: carriers of a group's sum, and the player that takes schedules over them."""
