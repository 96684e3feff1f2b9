"""Named models and their data; `references` knows their names."""
