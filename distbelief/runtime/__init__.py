"""The driver (the only loop), its clocks, and the channel between a process and its supervisor."""
