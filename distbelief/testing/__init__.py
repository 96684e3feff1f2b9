"""Conformance suites, checkers and observed simulations, for authors of a transport, codec, place or strategy.

Nothing else in the package imports this.
"""

from __future__ import annotations

from distbelief.testing.codecs import check_codec
from distbelief.testing.fabrics import Side, check_fabric
from distbelief.testing.places import Site, check_place
from distbelief.testing.simulations import Checker, Observed, attach
from distbelief.testing.strategies import Knob, check_strategy
from distbelief.testing.transports import Pair, check_transport

__all__ = [
    "Checker",
    "Knob",
    "Observed",
    "Pair",
    "Side",
    "Site",
    "attach",
    "check_codec",
    "check_fabric",
    "check_place",
    "check_strategy",
    "check_transport",
]
