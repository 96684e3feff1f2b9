"""Tasks: model, data, loss and metric, by name or by a user's own function."""
