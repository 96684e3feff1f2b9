"""The live page of a run: a process of its own that reads the run, and serves what it finds to browsers."""
