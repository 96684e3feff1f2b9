"""Shards of a checkpoint, read by pieces of tensors: for another number of shards, and another split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distbelief.core.settings import Plan
from distbelief.server.optimizers import COUNT, MISSED
from distbelief.sharding.layout import ITEM_SIZES, Entry, Layout, Range

_VECTOR = ("vector",)
"""The parameters and buffers themselves, as bytes; any other array is `master` or `state`, a key, and has numbers."""


_COUNT, _MISSED = ("state", COUNT), ("state", MISSED)


class _Wanted(NamedTuple):
    """Bytes of a piece that was saved, and the number of its section."""

    entry: Entry
    section: int
    bytes: Range


class SavedParts:
    """The arrays of a checkpoint.

    Args:
        plan: of the job that saved it.
        opened: the file of a shard, by its index, as `safe_open` gives it for torch.
    """

    def __init__(self, plan: Plan, opened: Callable[[int], Any]) -> None:
        self._layout, self._assignments, self._opened = plan.layout, plan.assignments, opened
        self._files: dict[int, tuple[Any, set[str]]] = {}
        self._late: dict[tuple[int, int], int] = {}
        """Steps that a shard has missed in a section, by (shard, section)."""
        self._pieces: dict[str, list[tuple[Entry, int]]] = {}
        for entry in sorted(plan.layout.entries, key=lambda entry: entry.piece.start):
            self._pieces.setdefault(entry.tensor.name, []).append((entry, _section(plan.layout, entry)))

    def cut(self, plan: Plan, shard: int) -> dict[str, torch.Tensor]:
        """The arrays that a shard of another plan begins with, named as `Checkpoints.save_part` says; zeros of what no
        shard had made yet (an optimizer makes state at its first step). A tensor that is split otherwise is read whole,
        one after the other.

        Raises:
            KeyError, RuntimeError, SafetensorError: an array is missing, or not as long as what its shard holds.
        """
        layout, assignment = plan.layout, plan.assignments[shard]
        arrays = {
            "vector.moving": self._array(_VECTOR, layout, assignment.moving, 1, torch.uint8),
            "vector.frozen": self._array(_VECTOR, layout, assignment.frozen, 1, torch.uint8),
        }
        for number, section in enumerate(layout.sections):
            part = assignment.moving.common(Range(section.start, section.stop))
            if section.kind == "parameter" and part.size:
                arrays |= self._states(layout, number, part)
        return arrays

    def _states(self, layout: Layout, number: int, part: Range) -> dict[str, torch.Tensor]:
        """The masters and optimizer states of section `number` for the bytes `part`."""
        item = ITEM_SIZES[layout.sections[number].dtype]
        wanted = [source for entry, within in _entries(layout, part) for source in self._wanted(entry, within)]
        sources = sorted({(i, source.section) for source in wanted for i, _ in self._holders(source)})
        keys = {
            (words[0], *words[2:])
            for shard, section in sources
            for words in (name.split(".", 2) for name in self._file(shard)[1])
            if words[1:2] == [str(section)]
        }
        arrays: dict[str, torch.Tensor] = {}
        if _COUNT in keys:
            counts = {source: self._count(*source) for source in sources}
            self._late = {source: max(counts.values()) - count for source, count in counts.items()}
            if any(self._late.values()) or _MISSED in keys:
                arrays[_name(_MISSED, number)] = self._array(_MISSED, layout, part, item, torch.int32)
        for key in sorted(keys - {_MISSED}):
            having = [(shard, of) for shard, of in sources if _name(key, of) in self._file(shard)[1]]
            if key[0] == "master" and len(having) < len(sources):
                raise KeyError(f"{_name(key, number)} is missing in a shard")
            parts = [self._file(shard)[0].get_slice(_name(key, of)) for shard, of in having]
            shapes = [source.get_shape() for source in parts]
            if shapes == [[self._held(shard, of).size // item] for shard, of in having]:
                arrays[_name(key, number)] = self._array(key, layout, part, item, parts[0][:0].dtype)
            elif all(shape in ([], [1]) for shape in shapes):  # one value of all, such as the number of steps
                shard, of = max(having, key=lambda source: self._count(*source))  # the others have missed steps
                arrays[_name(key, number)] = self._file(shard)[0].get_tensor(_name(key, of)).clone()
            else:
                raise KeyError(f"{_name(key, number)} has shapes {shapes}")
        return arrays

    def _array(self, key: tuple[str, ...], layout: Layout, part: Range, item: int, dtype: torch.dtype) -> torch.Tensor:
        """An array for the bytes `part` of another layout's vector, with one element per `item` bytes."""
        array = torch.zeros(part.size // item, dtype=dtype)
        for entry, within in _entries(layout, part):
            into = array[(within.start - part.start) // item : (within.stop - part.start) // item]
            wanted = self._wanted(entry, within)
            if _indices(wanted[0].entry) == _indices(entry):
                into.copy_(self._read(key, wanted[0], item, dtype))
            else:
                piece, along = entry.piece, wanted[0].entry.piece.dimension
                pieces = [self._read(key, saved, item, dtype).view(*saved.entry.shape, -1) for saved in wanted]
                size = piece.stop - piece.start
                values = torch.cat(pieces, along).narrow(piece.dimension, piece.start, size).reshape(-1)
                into.copy_(values[(within.start - entry.start) // item : (within.stop - entry.start) // item])
        return array

    def _wanted(self, entry: Entry, within: Range) -> list[_Wanted]:
        """Return what to read for the bytes `within` of a piece: these, or the tensor where it was split otherwise."""
        pieces = self._pieces[entry.tensor.name]
        for saved, section in pieces:
            if _indices(saved) == _indices(entry):
                ahead = saved.start - entry.start
                return [_Wanted(saved, section, Range(within.start + ahead, within.stop + ahead))]
        return [_Wanted(saved, section, Range(saved.start, saved.stop)) for saved, section in pieces]

    def _read(self, key: tuple[str, ...], wanted: _Wanted, item: int, dtype: torch.dtype) -> torch.Tensor:
        """Bytes of a piece of one array, as they lie in the files of the shards that hold them."""
        values = torch.zeros(wanted.bytes.size // item, dtype=dtype)
        for shard, held in self._holders(wanted):
            file, names = self._file(shard)
            name, start = _name(key, wanted.section), self._held(shard, wanted.section).start
            if key == _VECTOR:
                name = "vector.frozen" if wanted.entry.tensor.kind == "frozen" else "vector.moving"
                start = self._range(shard, wanted.entry).start
            into = values[(held.start - wanted.bytes.start) // item : (held.stop - wanted.bytes.start) // item]
            if key == _VECTOR or name in names:
                into.copy_(file.get_slice(name)[(held.start - start) // item : (held.stop - start) // item])
            if key == _MISSED:
                into.add_(self._late[shard, wanted.section])
        return values

    def _count(self, shard: int, section: int) -> int:
        """Return the steps of a shard on its part of a section; 0 where nobody counts."""
        file, names = self._file(shard)
        name = _name(_COUNT, section)
        return int(file.get_tensor(name)) if name in names else 0

    def _holders(self, wanted: _Wanted) -> list[tuple[int, Range]]:
        parts = ((i, self._range(i, wanted.entry).common(wanted.bytes)) for i in range(len(self._assignments)))
        return [(shard, part) for shard, part in parts if part.size]

    def _range(self, shard: int, entry: Entry) -> Range:
        """Return the range of a shard in which a piece lies, where the shard has any of it."""
        assignment = self._assignments[shard]
        return assignment.frozen if entry.tensor.kind == "frozen" else assignment.moving

    def _held(self, shard: int, section: int) -> Range:
        bounds = self._layout.sections[section]
        return self._assignments[shard].moving.common(Range(bounds.start, bounds.stop))

    def _file(self, shard: int) -> tuple[Any, set[str]]:
        if shard not in self._files:
            file = self._opened(shard)
            self._files[shard] = file, set(file.keys())
        return self._files[shard]


def _entries(layout: Layout, part: Range) -> Sequence[tuple[Entry, Range]]:
    """The pieces that have bytes in a range, and these."""
    parts = ((entry, part.common(Range(entry.start, entry.stop))) for entry in layout.entries)
    return [(entry, within) for entry, within in parts if within.size]


def _indices(entry: Entry) -> list[tuple[int, int]]:
    """Those of each dimension that a piece has."""
    whole = [(0, side) for side in entry.tensor.shape]
    if whole:
        whole[entry.piece.dimension] = entry.piece.start, entry.piece.stop
    return whole


def _section(layout: Layout, entry: Entry) -> int:
    """The number of the section that a piece lies in; -1 of a piece of no elements, which may lie in none."""
    return next((i for i, section in enumerate(layout.sections) if section.start <= entry.start < section.stop), -1)


def _name(key: tuple[str, ...], section: int) -> str:
    kind, *rest = key
    return ".".join((kind, str(section), *rest))
