"""Settings of a job for tests that need no job."""

from __future__ import annotations

from typing import Any

from distbelief.core.settings import Settings, from_options
from distbelief.strategies import STRATEGIES


def made(strategy: str = "downpour", **options: Any) -> Settings:
    """Settings of a strategy by name, from options by name; the others have their defaults."""
    return from_options({"name": strategy, **options}, STRATEGIES[strategy].own)
