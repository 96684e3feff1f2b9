"""Fabrics: who moves the bytes of a schedule, and the one player over them."""
