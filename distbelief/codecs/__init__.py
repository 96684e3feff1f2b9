"""Encodings of values in files, and of few bits in training."""

PRECISIONS = ("bf16", "fp16", "int8")
MOST_BITS = 12
"""Bits of a symbol, at most."""
