"""Ways to train: what each strategy's options are. Who plays which role is in `cluster`, what they do in `server` and `replica`."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.strategy.downpour import Downpour
from distbelief.strategy.single import Single

Strategy = Downpour | Single

STRATEGIES: Mapping[str, type[Downpour] | type[Single]] = {kind.name: kind for kind in (Downpour, Single)}
"""Every strategy, by name."""

__all__ = ["STRATEGIES", "Downpour", "Single", "Strategy"]
