"""In which precision gradients are computed."""
