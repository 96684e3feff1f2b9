"""Sources of the data of built-in tasks."""
