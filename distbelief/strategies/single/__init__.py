"""Single: the plain PyTorch loop in one process, the baseline of every comparison."""
