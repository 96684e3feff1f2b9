"""The machines: those who answer. No clock, thread, socket, randomness or logging in here."""
