"""The command line: arguments to calls; it decides nothing."""
