"""Integers and decisions: nothing here knows tensors, clocks, threads, sockets or chance."""
