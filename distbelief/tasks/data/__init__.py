"""What the data of built-in tasks are read from, or made of."""
