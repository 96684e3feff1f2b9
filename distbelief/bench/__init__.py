"""The benchmarks that the command `bench` runs."""
