"""Plans of the best way to train a model on some machines: candidates, their runs and prices, and why one is first."""
