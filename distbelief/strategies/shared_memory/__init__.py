"""Shared memory: no server; replicas on one machine update one mapping themselves, with locks or without."""
