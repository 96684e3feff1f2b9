"""Sharding: which range of the flat vector each server shard holds."""

from __future__ import annotations

import itertools

import msgspec

from distbelief.errors import UsageError
from distbelief.sharding.layout import ALIGNMENT, Layout, Range


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """What one shard holds: a range that is pushed and fetched, and a range that was sent once."""

    moving: Range
    frozen: Range


def cut(layout: Layout, shards: int) -> tuple[Assignment, ...]:
    """Contiguous ranges, balanced by bytes, cut at multiples of `ALIGNMENT`; a small model leaves some empty.

    Raises:
        UsageError: fewer than one shard, or more shards than parameters.

    >>> from distbelief.sharding.layout import Tensor, lay_out
    >>> [a.moving for a in cut(lay_out([Tensor("w", (1000,), "float32")]), 2)]
    [Range(start=0, stop=2048), Range(start=2048, stop=4000)]
    """
    if shards < 1:
        raise UsageError(f"--shards {shards}: at least one shard must hold the parameters")
    if shards > layout.parameters:
        raise UsageError(
            f"--shards {shards} is more than the model's {layout.parameters} parameters; use at most that many"
        )
    moving, frozen = _cut(0, layout.moving, shards), _cut(layout.moving, layout.total, shards)
    return tuple(Assignment(m, f) for m, f in zip(moving, frozen, strict=True))


def _cut(start: int, stop: int, parts: int) -> list[Range]:
    inner = (round((start + (stop - start) * part / parts) / ALIGNMENT) * ALIGNMENT for part in range(1, parts))
    edges = [start, *(min(max(edge, start), stop) for edge in inner), stop]
    return [Range(a, b) for a, b in itertools.pairwise(edges)]
