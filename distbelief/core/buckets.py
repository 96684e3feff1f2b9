"""Buckets: the ranges of the flat vector that are reduced one by one, in the order in which a backward pass makes their gradients: from the last."""

from __future__ import annotations

from typing import NamedTuple

from distbelief.core.layout import ITEM_SIZES, Entry, Layout

MEGABYTE = 1_000_000


class Bucket(NamedTuple):
    """Bytes [start, stop) of the flat vector, of one dtype; added up, or (buffers) the first rank's taken by all."""

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
        """Elements."""
        return (self.stop - self.start) // self.item


def buckets(layout: Layout, megabytes: float) -> tuple[Bucket, ...]:
    """Every trained parameter in one bucket of at most so many megabytes, of whole tensors; a larger tensor is one by itself.

    >>> from distbelief.core.layout import Tensor, lay_out
    >>> layout = lay_out([Tensor(name, (250,), "float32") for name in "abc"])
    >>> buckets(layout, 0.002)
    (Bucket(start=1000, stop=3000, dtype='float32', adds=True), Bucket(start=0, stop=1000, dtype='float32', adds=True))
    """
    found: list[Bucket] = []
    before: Entry | None = None
    for entry in reversed([e for e in layout.entries if e.tensor.kind == "parameter" and e.tensor.elements]):
        stop, tensor = entry.start + entry.tensor.size, entry.tensor
        together = before is not None and (before.tensor.dtype, before.tensor.group) == (tensor.dtype, tensor.group)
        if together and found[-1].stop - entry.start <= megabytes * MEGABYTE:
            found[-1] = found[-1]._replace(start=entry.start)
        else:
            found.append(Bucket(entry.start, stop, tensor.dtype))
        before = entry
    return tuple(found)


def of_buffers(layout: Layout) -> tuple[Bucket, ...]:
    """What all take from the first rank: the model's buffers, as bytes; nothing where it has none."""
    start = min((section.start for section in layout.sections if section.kind == "buffer"), default=layout.moving)
    return (Bucket(start, layout.moving, "uint8", False),) if start < layout.moving else ()
