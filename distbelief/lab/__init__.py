"""Rooms that read results and start jobs, and are never part of one."""
