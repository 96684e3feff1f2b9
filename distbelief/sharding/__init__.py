"""Layout of the flat vector, and who holds which range of it: pure functions."""
