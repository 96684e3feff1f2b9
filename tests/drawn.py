"""How much of a sweep is drawn: a few of its cases by default, 50 of each in `make test`, all in `make test-all`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import pytest

T = TypeVar("T")
SEEDS = int(os.environ.get("DISTBELIEF_SEEDS", "6"))
FEW = 50
"""Below so many seeds, one case of each test is drawn, and of long ones none; and sweeps have no floors."""


def some(cases: Iterable[T], most: int = SEEDS) -> list[T]:
    """So many cases, at least two, evenly spread over all of them, with the first and the last."""
    every, most = list(cases), max(2, most)
    return every if most >= len(every) else [every[at * (len(every) - 1) // (most - 1)] for at in range(most)]


def in_chunks(size: int, seeds: int = SEEDS) -> pytest.MarkDecorator:
    """Gives a test its `seeds`, about so many at once; or the one of DISTBELIEF_SEED, to replay it."""
    parts = max(1, seeds // size)
    chunks = [range(first, seeds, parts) for first in range(parts)]
    if seed := os.environ.get("DISTBELIEF_SEED"):
        chunks = [range(int(seed), int(seed) + 1)]
    return pytest.mark.parametrize("seeds", chunks, ids=lambda chunk: str(chunk.start))


def sweep(seeds: Iterable[int], hold: Callable[[int], Counter[str]], told: Callable[[int], object]) -> Counter[str]:
    """Hold every seed; returns the ways in which they ended. What fails says what is `told` of its seed."""
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            found += hold(seed)
        except BaseException as error:
            error.add_note(f"DISTBELIEF_SEED={seed} replays it: {told(seed)}")
            raise
    return found


def scaled(floors: Mapping[str, int], seeds: range, chunk: int) -> dict[str, int]:
    """How often each way is to be gone by some seeds, of floors for a chunk of so many."""
    share = len(seeds) / chunk if len(seeds) >= FEW else 0.0
    return {way: int(floor * share) for way, floor in floors.items()}
