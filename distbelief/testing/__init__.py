"""Conformance suites for those who write a transport of their own. Nothing that is shipped imports this."""
