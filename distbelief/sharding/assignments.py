"""Assignment of ranges of the flat vector to shards: a function of the layout, the partitions and the shards."""

from __future__ import annotations

import itertools

import msgspec

from distbelief.errors import UsageError
from distbelief.sharding.layout import ALIGNMENT, Layout, Range


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Ranges of a shard: `moving` is pushed and fetched, `frozen` is sent once."""

    moving: Range
    frozen: Range


def cut(layout: Layout, partitions: int, shards: int) -> tuple[Assignment, ...]:
    """Cut a layout into contiguous ranges, balanced by bytes, at multiples of `ALIGNMENT`; some may be empty.

    Each shard belongs to one partition, so that a partition pushes to its own shards only.

    >>> from distbelief.sharding.layout import Tensor, lay_out
    >>> [a.moving for a in cut(lay_out([Tensor("w", (1000,), "float32")]), 1, 2)]
    [Range(start=0, stop=2048), Range(start=2048, stop=4000)]
    """
    if len(layout.partitions) != partitions:
        raise UsageError(
            f"--partitions {partitions}: the model is split over {len(layout.partitions)}; name the same number"
        )
    if shards < 1:
        raise UsageError(f"--shards {shards}: at least one shard must hold the parameters")
    if shards < partitions:
        raise UsageError(
            f"--shards {shards} of a model in {partitions} partitions: each has shards of its own; use at least "
            f"{partitions}"
        )
    check_shards(shards, layout.parameters)
    counts = _shares([partition.moving.size for partition in layout.partitions], shards)
    return tuple(
        Assignment(moving, frozen)
        for held, count in zip(layout.partitions, counts, strict=True)
        for moving, frozen in zip(_cut(held.moving, count), _cut(held.frozen, count), strict=True)
    )


def check_shards(shards: int, parameters: int) -> None:
    """Refuse more shards than trained parameters."""
    if shards > parameters:
        raise UsageError(f"--shards {shards} is more than the model's {parameters} parameters; use at most that many")


def _shares(sizes: list[int], shards: int) -> list[int]:
    """Return the number of shards of each partition: one each, then every further one where shards hold most."""
    counts = [1] * len(sizes)
    for _ in range(shards - len(sizes)):
        most = max(range(len(sizes)), key=lambda partition: sizes[partition] / counts[partition])
        counts[most] += 1
    return counts


def _cut(whole: Range, parts: int) -> list[Range]:
    inner = (round((whole.start + whole.size * part / parts) / ALIGNMENT) * ALIGNMENT for part in range(1, parts))
    edges = [whole.start, *(min(max(edge, whole.start), whole.stop) for edge in inner), whole.stop]
    return [Range(a, b) for a, b in itertools.pairwise(edges)]
