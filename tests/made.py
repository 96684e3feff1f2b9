"""Settings of a job for tests that need no job."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from distbelief.core.settings import Settings, SharedOptions
from distbelief.strategies import STRATEGIES


def made(strategy: str = "downpour", **options: Any) -> Settings:
    """Settings of a strategy by name, from options by name; the others have their defaults."""
    shared = {one.name: options.pop(one.name) for one in fields(SharedOptions) if one.name in options}
    return Settings(strategy=STRATEGIES[strategy](**options), **shared)
