"""Which way of training is best for a model on some machines: candidates, their prices, and why one is first."""
