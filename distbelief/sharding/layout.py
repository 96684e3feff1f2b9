"""Layout: where each parameter and buffer of a module lies in the flat vector.

The flat vector is one sequence of bytes, partition after partition; a model that is not split has one partition. Each
partition has its trained parameters, ordered by (dtype, parameter group), then its buffers by dtype, then its frozen
parameters. Trained parameters and buffers *move*: they are pushed and fetched. Frozen parameters are sent once. Several
models, each with an optimizer of its own, lie one after another. The vector holds *pieces* of tensors; with one
partition each piece is a whole tensor. A *section* is a contiguous range of one partition, kind, dtype and group, and
starts at a multiple of `ALIGNMENT` bytes. Shards' ranges are cut at such multiples too, which are multiples of 16
elements of any dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from distbelief.errors import LayoutError, UsageError

ALIGNMENT = 128

ITEM_SIZES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of each dtype that a flat vector may hold."""

TRAINABLE = ("float64", "float32", "bfloat16", "float16")
"""Dtypes that a trained parameter may have."""

Kind = Literal["parameter", "buffer", "frozen"]
_ORDER: Mapping[Kind, int] = {"parameter": 0, "buffer": 1, "frozen": 2}


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the flat vector from `start` up to, but not including, `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.stop - self.start

    def common(self, other: Range) -> Range:
        """Return the intersection with another range, which may be empty.

        >>> Range(0, 8).common(Range(4, 12)), Range(0, 4).common(Range(8, 12)).size
        (Range(start=4, stop=8), 0)
        """
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def without(self, others: Iterable[Range]) -> tuple[Range, ...]:
        """Return the parts of this range outside of others, which are in order; one empty range if nothing is left.

        >>> Range(0, 9).without([Range(2, 4), Range(4, 5)])
        (Range(start=0, stop=2), Range(start=5, stop=9))
        """
        cut = (min(max(end, self.start), self.stop) for other in others for end in (other.start, other.stop))
        ends = [self.start, *cut, self.stop]
        left = (Range(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop)
        return tuple(left) or (Range(self.start, self.start),)


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """Facts about a parameter or buffer that the layout needs."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "parameter"
    group: int = 0

    @property
    def elements(self) -> int:
        """Return the number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.elements * ITEM_SIZES[self.dtype]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Part of a tensor and its partition: indices of one dimension from `start` up to, but not including, `stop`."""

    dimension: int
    start: int
    stop: int
    partition: int


def whole(tensor: Tensor, partition: int = 0) -> Piece:
    """Return the piece that is all of a tensor; a scalar has one index in dimension 0.

    >>> whole(Tensor("weight", (3, 4), "float32"))
    Piece(dimension=0, start=0, stop=3, partition=0)
    """
    return Piece(0, 0, tensor.shape[0] if tensor.shape else 1, partition)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Piece of a tensor, and the byte of the flat vector where it starts.

    >>> entry = Entry(Tensor("weight", (3, 4), "float32"), Piece(dimension=1, start=0, stop=2, partition=0), 128)
    >>> entry.shape, entry.size, entry.stop
    ((3, 2), 24, 152)
    """

    tensor: Tensor
    piece: Piece
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        shape, at = self.tensor.shape, self.piece.dimension
        return (*shape[:at], self.piece.stop - self.piece.start, *shape[at + 1 :]) if shape else ()

    @property
    def elements(self) -> int:
        """Number of elements of the piece."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Length of the piece in bytes."""
        return self.elements * ITEM_SIZES[self.tensor.dtype]

    @property
    def stop(self) -> int:
        """Return the byte after its last one."""
        return self.start + self.size


class TrainedPart(NamedTuple):
    """Part of a trained parameter that lies in a range."""

    number: int
    """Number of the parameter, among those that are trained."""
    entry: Entry
    part: Range
    """Its bytes there."""

    @property
    def elements(self) -> slice | None:
        """Return which elements of the flattened parameter lie in this part; None for all.

        >>> weight = Tensor("weight", (3, 4), "float32")
        >>> entry = Entry(weight, whole(weight), 128)
        >>> [TrainedPart(0, entry, part).elements for part in (Range(128, 176), Range(136, 144))]
        [None, slice(2, 4, None)]
        """
        if self.part.size == self.entry.size:
            return None
        start, item = self.entry.start, ITEM_SIZES[self.entry.tensor.dtype]
        return slice((self.part.start - start) // item, (self.part.stop - start) // item)


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Contiguous range of the flat vector with one partition, kind, dtype and parameter group."""

    kind: Kind
    dtype: str
    group: int
    start: int
    stop: int
    partition: int = 0


class PartitionRanges(msgspec.Struct, frozen=True, array_like=True):
    """Ranges of a partition in the flat vector; the partition's own vectors have the same lengths."""

    trained: Range
    moving: Range
    """Range that is pushed and fetched: the trained parameters, then the buffers."""
    frozen: Range
    """Range that is sent once."""

    @property
    def all(self) -> Range:
        """Moving and frozen range together."""
        return Range(self.moving.start, self.frozen.stop)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Places of all tensors in the flat vector; equal layouts mean models that may train together."""

    entries: tuple[Entry, ...]
    sections: tuple[Section, ...]
    groups: tuple[dict[str, float], ...]
    """Options that each parameter group sets (`lr`, `weight_decay`), and `rows` if gradients may be sparse."""
    aliases: dict[str, str]
    """Map from each tied tensor's other names to its name in the layout."""
    partitions: tuple[PartitionRanges, ...]
    """Ranges of each partition, by its number."""
    models: tuple[Range, ...] = ()
    """Moving range of each model, if there are several with an optimizer each; else empty."""

    @property
    def total(self) -> int:
        """Bytes of the whole vector."""
        return self.partitions[-1].frozen.stop

    def model_of(self, entry: Entry) -> int:
        """Return the number of the model to which a trained parameter or buffer belongs; 0 if there is only one."""
        return next((number for number, part in enumerate(self.models) if entry.start < part.stop), 0)

    def partition_of(self, part: Range) -> int:
        """Return the partition that a range belongs to."""
        return next((number for number, partition in enumerate(self.partitions) if part.stop <= partition.all.stop), 0)

    def held(self, partition: int) -> Range:
        """Return the range of a partition; the whole vector for -1."""
        partitions = self.partitions if partition < 0 else self.partitions[partition : partition + 1]
        return Range(partitions[0].all.start, partitions[-1].all.stop)

    @property
    def only(self) -> PartitionRanges:
        """Ranges of the only partition; a split model is refused."""
        if len(self.partitions) != 1:
            raise UsageError(
                f"the model is split over {len(self.partitions)} partitions; this needs a model that is not split"
            )
        return self.partitions[0]

    @property
    def moving(self) -> int:
        """Return the end of the moving bytes of a model that is not split: [0, moving) is pushed and fetched."""
        return self.only.moving.stop

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the layout by name."""
        return {entry.tensor.name: entry.tensor for entry in self.entries}

    @property
    def trained_entries(self) -> list[Entry]:
        """Entries of trained parameters, in order."""
        return [entry for entry in self.entries if entry.tensor.kind == "parameter"]

    def trained_in(self, within: Range) -> list[TrainedPart]:
        """Return the parts of trained parameters in a range, in order."""
        parts = (
            TrainedPart(number, entry, Range(entry.start, entry.stop).common(within))
            for number, entry in enumerate(self.trained_entries)
        )
        return [part for part in parts if part.part.size]

    @property
    def trained(self) -> Range:
        """Return the range of the trained parameters, without buffers, of a model that is not split."""
        return self.only.trained

    @property
    def parameters(self) -> int:
        """Number of trained elements."""
        return sum(e.elements for e in self.trained_entries)

    def is_sparse(self, entry: Entry) -> bool:
        """Return whether a parameter's gradients may be sparse, with only some rows."""
        return "rows" in self.groups[entry.tensor.group]

    def stepped(self, group: int) -> dict[str, float]:
        """Return a parameter group's options for the optimizer."""
        return {option: value for option, value in self.groups[group].items() if option != "rows"}

    def sections_in(self, within: Range) -> tuple[Section, ...]:
        """Return the parts of sections in a range, in order."""
        return tuple(
            msgspec.structs.replace(s, start=max(s.start, within.start), stop=min(s.stop, within.stop))
            for s in self.sections
            if s.start < within.stop and within.start < s.stop
        )


def lay_out(
    tensors: Sequence[Tensor],
    groups: Sequence[Mapping[str, float]] = ({},),
    aliases: Mapping[str, str] | None = None,
    split: Mapping[str, Sequence[Piece]] | None = None,
    models: Mapping[str, int] | None = None,
) -> Layout:
    """Lay out a module's tensors.

    A dtype that is not supported, pieces that do not make up their tensor, and a model without a trained parameter
    raise a `UsageError`.

    Args:
        tensors: all of them, each once.
        groups: options of each parameter group.
        aliases: other names of tied tensors.
        split: pieces, by name, of each tensor that is not whole at partition 0.
        models: number of each tensor's model, by name, if there are several with an optimizer each. All are at
            partition 0, each with a group of its own and a trained parameter.

    >>> layout = lay_out([Tensor("weight", (3, 4), "float32"), Tensor("count", (), "int64", "buffer")])
    >>> [(e.tensor.name, e.start) for e in layout.entries], layout.moving
    ([('weight', 0), ('count', 128)], 136)
    >>> halves = {"weight": [Piece(0, 0, 1, partition=0), Piece(0, 1, 3, partition=1)]}
    >>> [(e.start, e.stop) for e in lay_out([Tensor("weight", (3, 4), "float32")], split=halves).entries]
    [(0, 16), (128, 160)]
    >>> two = [Tensor("0.weight", (3, 4), "float32"), Tensor("1.weight", (2,), "float32", group=1)]
    >>> lay_out(two, ({}, {}), models={"0.weight": 0, "1.weight": 1}).models
    (Range(start=0, stop=128), Range(start=128, stop=136))
    """
    _check_kinds(tensors)
    placed = [
        Entry(t, piece, 0)
        for t in tensors
        for piece in (_checked(t, split[t.name]) if split and t.name in split else (whole(t),))
    ]
    entries: list[Entry] = []
    sections: list[Section] = []
    partitions: list[PartitionRanges] = []
    begun: dict[int, int] = {}
    position = 0

    def order(entry: Entry) -> tuple[bool, int, int, str, int]:
        t = entry.tensor
        return t.kind == "frozen", models[t.name] if models else 0, _ORDER[t.kind], t.dtype, t.group

    for partition in range(1 + max(entry.piece.partition for entry in placed)):
        here = [entry for entry in placed if entry.piece.partition == partition]
        if not any(entry.tensor.kind == "parameter" and entry.elements for entry in here):
            raise UsageError(
                f"partition {partition} has no trained parameter: split the model over fewer partitions, or another way"
            )
        start = trained = moving = position = _aligned(position)
        for part in sorted(here, key=order):
            t = part.tensor
            key, last = (t.kind, t.dtype, t.group), sections[-1] if sections else None
            if last is None or (last.kind, last.dtype, last.group, last.partition) != (*key, partition):
                position = _aligned(position)
                sections.append(Section(*key, position, position, partition))
            entries.append(Entry(t, part.piece, position))
            if models and t.kind != "frozen":
                begun.setdefault(models[t.name], position)
            position += part.size
            sections[-1] = msgspec.structs.replace(sections[-1], stop=position)
            trained = position if t.kind == "parameter" else trained
            moving = position if t.kind != "frozen" else moving
        partitions.append(PartitionRanges(Range(start, trained), Range(start, moving), Range(moving, position)))
    parts = tuple(itertools.starmap(Range, itertools.pairwise([*begun.values(), partitions[0].moving.stop])))
    named = tuple(dict(g) for g in groups)
    return Layout(tuple(entries), tuple(sections), named, dict(aliases or {}), tuple(partitions), parts)


def _check_kinds(tensors: Sequence[Tensor]) -> None:
    """Refuse dtypes that are not supported, and a model without trained parameters."""
    for t in tensors:
        held = TRAINABLE if t.kind == "parameter" else tuple(ITEM_SIZES)
        if t.dtype not in held:
            raise UsageError(
                f"{t.kind} {t.name!r} has dtype {t.dtype}; a {t.kind} may have {', '.join(held)}: convert it before "
                "training"
            )
    if not any(t.kind == "parameter" and t.elements for t in tensors):
        raise UsageError("the model has no parameter with requires_grad=True: there is nothing to train")


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _checked(tensor: Tensor, pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Check that a tensor's pieces follow each other along one dimension, none empty unless the tensor is."""
    sides, edge = tensor.shape or (1,), 0
    for piece in pieces:
        along = pieces[0].dimension
        fits = piece.dimension == along and 0 <= along < len(sides) and piece.partition >= 0
        if not fits or piece.start != edge or (piece.stop <= edge and sides[along]):
            raise UsageError(
                f"{tensor.kind} {tensor.name!r} {list(tensor.shape)} is not whole in its pieces: {piece} does not "
                f"continue from index {edge} of one dimension"
            )
        edge = piece.stop
    if not pieces or edge != sides[pieces[0].dimension]:
        raise UsageError(
            f"{tensor.kind} {tensor.name!r} {list(tensor.shape)} is not whole in its pieces, which end at index {edge}"
        )
    return pieces


def check_same(server: Layout, joining: Layout, who: str) -> None:
    """Refuse a model that differs from the server's.

    The `LayoutError` names the first difference.
    """
    if server != joining:
        difference = _difference(server, joining)
        raise LayoutError(f"{who} does not fit the server's model: {difference}; build the same model in every replica")


def _difference(server: Layout, joining: Layout) -> str:
    theirs, ours = joining.tensors, server.tensors
    for name, tensor in ours.items():
        other = theirs.get(name)
        if other is None:
            return _lacks(server, joining, tensor)
        if other != tensor:
            return f"its {name!r} is {_describe(other)}, the server's is {_describe(tensor)}"
    if extra := [name for name in theirs if name not in ours]:
        return f"its {theirs[extra[0]].kind} {extra[0]!r} is unknown to the server"
    split = [{(e.tensor.name, e.piece) for e in layout.entries} for layout in (server, joining)]
    if split[0] != split[1]:
        return "its parameters are split differently from the server's"
    return "its parameter groups, their options or the order of its parameters differ from the server's"


def _lacks(server: Layout, joining: Layout, tensor: Tensor) -> str:
    """Return how a model without a tensor's name differs."""

    def nameless(layout: Layout) -> list[Entry]:
        return [msgspec.structs.replace(e, tensor=msgspec.structs.replace(e.tensor, name="")) for e in layout.entries]

    if nameless(server) != nameless(joining):
        return f"it lacks {tensor.kind} {tensor.name!r}, which the server has with shape {tensor.shape}"
    at = [entry.tensor for entry in server.entries].index(tensor)
    return f"it calls {joining.entries[at].tensor.name!r} what the server calls {tensor.name!r}"


def _describe(t: Tensor) -> str:
    return f"{t.kind} {list(t.shape)} {t.dtype} in group {t.group}"
