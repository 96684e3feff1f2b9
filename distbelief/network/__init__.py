"""Networks as graphs: switches and cables, how messages go over them, and what each cable carries. Pure."""
