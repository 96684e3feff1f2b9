"""Cost of training: time, memory and multiply-adds of each layer, from a profile and a trace."""
