"""Ways to split a model."""
