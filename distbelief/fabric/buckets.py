"""Buckets: ranges of the flat vector that are reduced one by one, the last first, as a backward pass makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distbelief.sharding.layout import ITEM_SIZES, Entry, Layout

MEGABYTE = 1_000_000
FORWARD = 1 / 3
"""Share of a simulated step before the backward pass."""


class Bucket(NamedTuple):
    """Bytes [start, stop) of the flat vector, of one dtype.

    `adds` is false for buffers, which are not added up: all ranks take the first rank's.
    """

    start: int
    stop: int
    dtype: str
    adds: bool = True

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZES[self.dtype]

    @property
    def length(self) -> int:
        """Number of elements."""
        return (self.stop - self.start) // self.item


def buckets(layout: Layout, megabytes: float, partition: int = 0) -> tuple[Bucket, ...]:
    """Put a partition's trained parameters into buckets of whole tensors, each of at most `megabytes`.

    A larger tensor is a bucket by itself. Bytes count from the beginning of the partition's part of the flat vector.

    >>> from distbelief.sharding.layout import Tensor, lay_out
    >>> layout = lay_out([Tensor(name, (250,), "float32") for name in "abc"])
    >>> buckets(layout, 0.002)
    (Bucket(start=1000, stop=3000, dtype='float32', adds=True), Bucket(start=0, stop=1000, dtype='float32', adds=True))
    """
    buckets: list[Bucket] = []
    before: Entry | None = None
    base = layout.partitions[partition].all.start
    for entry in reversed([e for e in layout.trained_entries if e.elements and e.piece.partition == partition]):
        start, stop, tensor = entry.start - base, entry.stop - base, entry.tensor
        together = before is not None and (before.tensor.dtype, before.tensor.group) == (tensor.dtype, tensor.group)
        if together and buckets[-1].stop - start <= megabytes * MEGABYTE:
            buckets[-1] = buckets[-1]._replace(start=start)
        else:
            buckets.append(Bucket(start, stop, tensor.dtype))
        before = entry
    return tuple(buckets)


def of_buffers(layout: Layout, partition: int = 0) -> tuple[Bucket, ...]:
    """Return the bucket of a partition's buffers, as bytes; no bucket if it has no buffers."""
    extent = layout.partitions[partition]
    base, stop = extent.all.start, extent.moving.stop
    held = (section.start for section in layout.sections if section.kind == "buffer" and section.partition == partition)
    start = min(held, default=stop)
    return (Bucket(start - base, stop - base, "uint8", False),) if start < stop else ()


def shares(buckets: Sequence[Bucket]) -> list[float]:
    """Return for each bucket the share of a step after which its gradient exists; buffers exist at the end.

    >>> shares([Bucket(4, 8, "float32"), Bucket(0, 4, "float32")])
    [0.6666666666666667, 1.0]
    """
    whole = sum(bucket.stop - bucket.start for bucket in buckets if bucket.adds)
    done, moments = 0, []
    for bucket in buckets:
        done += (bucket.stop - bucket.start) * bucket.adds
        moments.append(FORWARD + (1 - FORWARD) * done / whole)
    return moments
