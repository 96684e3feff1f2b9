"""The ways to split a model, one file each."""
