"""The layout: where each parameter and buffer of a module lies in the flat vector.

The flat vector is one run of bytes: the trained parameters ordered by (dtype, parameter group), then the buffers by
dtype (both *move*:
they are pushed and fetched), then the frozen parameters (sent once). A *section* is a run of one kind, dtype and group,
and starts at a multiple of `ALIGNMENT` bytes; a shard's range is cut at such multiples too, so that every cut is at a
multiple of 16 elements of any dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from distbelief.errors import LayoutError, UsageError

ALIGNMENT = 128

ITEM_SIZES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of each dtype that a flat vector may hold."""

TRAINABLE = ("float64", "float32", "bfloat16", "float16")
"""The dtypes that a trained parameter may have."""

Kind = Literal["parameter", "buffer", "frozen"]
_ORDER: Mapping[Kind, int] = {"parameter": 0, "buffer": 1, "frozen": 2}


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start` up to, not including, `stop` of the flat vector."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """What the layout needs to know of one parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "parameter"
    group: int = 0

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        count = 1
        for side in self.shape:
            count *= side
        return count

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.elements * ITEM_SIZES[self.dtype]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and the byte of the flat vector at which it starts."""

    tensor: Tensor
    start: int


class Section(msgspec.Struct, frozen=True, array_like=True):
    """A run of the flat vector of one kind, dtype and parameter group."""

    kind: Kind
    dtype: str
    group: int
    start: int
    stop: int


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where everything lies; equal layouts mean models that may train together."""

    entries: tuple[Entry, ...]
    sections: tuple[Section, ...]
    groups: tuple[dict[str, float], ...]
    """What each parameter group sets for itself (`lr`, `weight_decay`), by group number, and `rows` where gradients may
    be some rows.
    """
    aliases: dict[str, str]
    """Other names of tied tensors, to the name under which they are laid out."""
    moving: int
    """Bytes that are pushed and fetched: [0, moving)."""
    total: int
    """Bytes of the whole vector: the frozen parameters lie in [moving, total)."""

    @property
    def parameters(self) -> int:
        """Number of trained elements."""
        return sum(e.tensor.elements for e in self.entries if e.tensor.kind == "parameter")

    @property
    def trained(self) -> Range:
        """The bytes of the trained parameters, without buffers."""
        return Range(0, max((s.stop for s in self.sections if s.kind == "parameter"), default=0))

    def is_sparse(self, entry: Entry) -> bool:
        """Whether a parameter's gradients may be some of its rows."""
        return "rows" in self.groups[entry.tensor.group]

    def stepped(self, group: int) -> dict[str, float]:
        """What a parameter group sets for the optimizer."""
        return {option: value for option, value in self.groups[group].items() if option != "rows"}

    def pieces(self, within: Range) -> tuple[Section, ...]:
        """The parts of sections that lie in a range, in order."""
        return tuple(
            msgspec.structs.replace(s, start=max(s.start, within.start), stop=min(s.stop, within.stop))
            for s in self.sections
            if s.start < within.stop and within.start < s.stop
        )


def lay_out(
    tensors: Sequence[Tensor], groups: Sequence[Mapping[str, float]] = ({},), aliases: Mapping[str, str] | None = None
) -> Layout:
    """The layout of a module's tensors.

    Raises:
        UsageError: no trained parameter, or a dtype that cannot be trained or held.

    >>> layout = lay_out([Tensor("weight", (3, 4), "float32"), Tensor("count", (), "int64", "buffer")])
    >>> [(e.tensor.name, e.start) for e in layout.entries], layout.moving
    ([('weight', 0), ('count', 128)], 136)
    """
    for t in tensors:
        held = TRAINABLE if t.kind == "parameter" else tuple(ITEM_SIZES)
        if t.dtype not in held:
            raise UsageError(
                f"{t.kind} {t.name!r} has dtype {t.dtype}; a {t.kind} may have {', '.join(held)}: convert it before "
                "training"
            )
    if not any(t.kind == "parameter" and t.elements for t in tensors):
        raise UsageError("the model has no parameter with requires_grad=True: there is nothing to train")
    entries: list[Entry] = []
    sections: list[Section] = []
    position = moving = 0
    for t in sorted(tensors, key=lambda t: (_ORDER[t.kind], t.dtype, t.group)):
        key = (t.kind, t.dtype, t.group)
        if not sections or (sections[-1].kind, sections[-1].dtype, sections[-1].group) != key:
            position = -(-position // ALIGNMENT) * ALIGNMENT
            sections.append(Section(*key, position, position))
        entries.append(Entry(t, position))
        position += t.size
        sections[-1] = msgspec.structs.replace(sections[-1], stop=position)
        if t.kind != "frozen":
            moving = position
    return Layout(
        tuple(entries), tuple(sections), tuple(dict(g) for g in groups), dict(aliases or {}), moving, position
    )


def check_same(server: Layout, joining: Layout, who: str) -> None:
    """Refuse a model that differs from the server's, naming the first difference.

    Raises:
        LayoutError: the layouts differ.
    """
    if server == joining:
        return
    theirs = {e.tensor.name: e.tensor for e in joining.entries}
    ours = {e.tensor.name: e.tensor for e in server.entries}
    difference = "its parameter groups, their options or the order of its parameters differ from the server's"
    for name, tensor in ours.items():
        other = theirs.get(name)
        if other is None:
            difference = f"it lacks {tensor.kind} {name!r}, which the server has with shape {tensor.shape}"
        elif other != tensor:
            difference = f"its {name!r} is {_describe(other)}, the server's is {_describe(tensor)}"
        else:
            continue
        break
    else:
        extra = [name for name in theirs if name not in ours]
        if extra:
            difference = f"its {theirs[extra[0]].kind} {extra[0]!r} is unknown to the server"
    raise LayoutError(f"{who} does not fit the server's model: {difference}; build the same model in every replica")


def _describe(t: Tensor) -> str:
    return f"{t.kind} {list(t.shape)} {t.dtype} in group {t.group}"
