"""The command line: arguments to calls; it decides nothing."""

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""
