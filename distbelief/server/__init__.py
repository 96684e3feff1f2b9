"""The server's machines: shards and standbys. No clock, thread, socket, randomness or logging in here."""
