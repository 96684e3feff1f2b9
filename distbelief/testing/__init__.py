"""Conformance suites for those who write a transport of their own. Nothing that is shipped imports this."""

from __future__ import annotations

from distbelief.testing.transports import Pair, check_transport

__all__ = ["Pair", "check_transport"]
