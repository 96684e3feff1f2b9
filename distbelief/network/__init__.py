"""Networks as graphs: switches and cables, routes of messages, and the load of each cable, as pure functions."""
