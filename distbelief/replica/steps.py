"""Type of the functions that a story is cut into: they yield effects, as it does, and return something."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from distbelief.core.effects import Effect

Returned = TypeVar("Returned")
Steps = Generator[Effect, Any, Returned]
"""Generator of a story: the answer to an effect depends on the effect, which the type of a generator cannot say."""
