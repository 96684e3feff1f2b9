"""Named models and their data; `tasks.registry` knows their names."""
