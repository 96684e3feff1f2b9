"""Ways to train: the options of each strategy, and the roles of its jobs. What those do is in `server` and `replica`."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.strategy.downpour import Downpour
from distbelief.strategy.single import Single

Strategy = Downpour | Single

STRATEGIES: Mapping[str, type[Downpour] | type[Single]] = {kind.name: kind for kind in (Downpour, Single)}
"""Every strategy, by name."""

__all__ = ["STRATEGIES", "Downpour", "Single", "Strategy"]
