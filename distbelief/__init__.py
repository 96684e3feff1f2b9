"""Train deep networks on many machines: DistBelief on today's PyTorch."""
