"""Reading of checkpoints: a shard's part, even for another cut, and the weights alone; and a store in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from distbelief.core.portions import Position
from distbelief.core.records import Json
from distbelief.core.settings import Plan
from distbelief.errors import CheckpointError, LayoutError
from distbelief.record.checkpoints import (
    MANIFEST,
    MODEL,
    SCRIPT_LIMIT,
    CheckpointFile,
    Checkpoints,
    Manifest,
    checksum,
    corrupt,
    read_manifest,
    unreadable,
)
from distbelief.record.model_file import stored
from distbelief.server.optimizers import COUNT, MISSED
from distbelief.sharding.layout import ITEM_SIZES, Entry, Layout, Piece, Range, check_same

HEADER = 1 << 16
"""Most bytes of the header of a script's file."""


def load_part(path: str | Path, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
    """Read the arrays of a shard from a checkpoint, which may have other shards or another split.

    An array that some shards had not made yet is zero for them: an optimizer makes its state at its first step.

    Args:
        path: folder of the checkpoint.
        plan: plan of the resumed job, with the model and optimizer of the checkpoint.
        shard: index of the shard in `plan`.

    Returns:
        Copies of the arrays that `Checkpoints.save_part` describes, and the facts of the shard; if the cut differs,
        the facts of the shard with the most updates.

    Raises:
        CheckpointError: the checkpoint is missing, corrupt, or of another model or optimizer.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_fits(folder, manifest, plan)
    with contextlib.ExitStack() as stack:
        saved = SavedParts(manifest.plan, lambda index: _open(stack, folder, manifest.parts[index]))
        try:
            arrays = saved.cut(plan, shard)
        except (SafetensorError, OSError, RuntimeError, KeyError) as error:
            raise corrupt(folder / MANIFEST, f"its shards do not hold what it says ({error})") from error
    facts = [part.facts for part in manifest.parts]
    if (manifest.plan.assignments, manifest.plan.layout.entries) == (plan.assignments, plan.layout.entries):
        return arrays, facts[shard]
    return arrays, max(facts, key=lambda facts_: (facts_.get("updates", 0), facts_.get("samples", 0)))


def load_script(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a script from a checkpoint, or raise a `CheckpointError`."""
    folder = Path(path)
    part = read_manifest(folder).script
    if part is None:
        return {}
    if part.size > SCRIPT_LIMIT + HEADER:
        raise corrupt(folder / part.file, f"it has {part.size} bytes, but a script keeps at most {SCRIPT_LIMIT}")
    file = _verified(folder, part)
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise corrupt(file, str(error)) from error


class CheckpointStore(Checkpoints):
    """Store of a driver on disk: the checkpoints of one run, written and read back."""

    def load_part(self, checkpoint: str, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
        """Call the function `load_part`."""
        return load_part(checkpoint, plan, shard)


def load_weights(
    path: str | Path, layout: Layout, pieces: Mapping[str, Piece] | None = None
) -> dict[str, torch.Tensor]:
    """Load weights from a checkpoint or a safetensors file, checked against a layout; without the optimizer's state.

    Args:
        path: a run folder (its newest checkpoint), the folder of a checkpoint, or a `.safetensors` file of a state
            dict.
        layout: layout of the model; a tied tensor may have any of its names.
        pieces: the pieces to read, by the first names of their tensors; None reads all tensors.

    Returns:
        A state dict for `load_state_dict(strict=True)` in which tied names share memory, or the pieces by name.

    Raises:
        CheckpointError: the file is missing or corrupt, or a tensor differs by name, shape or dtype.
    """
    source = _weights_file(Path(path))
    named: dict[str, torch.Tensor] = {}
    known = {entry.tensor.name for entry in layout.entries} | set(layout.aliases)
    try:
        with safe_open(source, framework="np"):  # with torch it would map the file as private memory
            held = stored(source)
        present = set(held)
        with source.open("rb") as file:
            for tensor in {entry.tensor.name: entry.tensor for entry in layout.entries}.values():
                names = [tensor.name, *(alias for alias, name in layout.aliases.items() if name == tensor.name)]
                stored_name = next((name for name in names if name in present), None)
                if stored_name is None:
                    foreign = "".join(f", but {name!r}, which it lacks" for name in sorted(present - known)[:1])
                    raise CheckpointError(
                        f"{source} has no tensor {tensor.name!r}, which the model has{foreign}; name a checkpoint of "
                        "the same model"
                    )
                saved = held[stored_name]
                if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
                    theirs, ours = f"{list(saved.shape)} {saved.dtype}", f"{list(tensor.shape)} {tensor.dtype}"
                    raise CheckpointError(
                        f"{tensor.name!r} is {theirs} in {source}, the model's is {ours}; name a checkpoint of the "
                        "same model"
                    )
                if pieces is not None and tensor.name not in pieces:
                    continue
                values = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
                file.seek(saved.data_offsets[0])
                memory = values.view(-1).view(torch.uint8).numpy().data
                if (read := file.readinto(memory)) != len(memory):
                    raise CheckpointError(f"{source} ends {len(memory) - read} bytes too early, in {stored_name!r}")
                if pieces is None:
                    named |= dict.fromkeys(names, values)
                else:
                    named[tensor.name] = _part(values, pieces[tensor.name]).clone()
    except (SafetensorError, OSError) as error:
        remedy = (
            "name a run folder, a checkpoint or a .safetensors file (a .pt file is never unpickled: save its state "
            "dict with safetensors)"
        )
        if source.suffix == ".safetensors" and isinstance(error, SafetensorError):
            remedy = (
                "it is damaged: name another checkpoint, or continue its run with --resume, which writes the file anew"
            )
        raise CheckpointError(f"{source} cannot be read as safetensors: {error}; {remedy}") from error
    if extra := sorted(present - known):
        raise CheckpointError(
            f"{source} has a tensor {extra[0]!r}, which the model lacks; name a checkpoint of the same model"
        )
    return named


def _part(values: torch.Tensor, piece: Piece) -> torch.Tensor:
    return values.narrow(piece.dimension, piece.start, piece.stop - piece.start) if values.ndim else values


def _weights_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    checkpoint = path if (path / MANIFEST).exists() else Checkpoints(path).latest()
    if checkpoint is not None:
        return _verified(checkpoint, read_manifest(checkpoint).model)
    if (path / MODEL).exists():
        return path / MODEL
    raise CheckpointError(
        f"{path} holds no checkpoint and no {MODEL}; name a run folder that got as far as a checkpoint"
    )


def _check_fits(folder: Path, manifest: Manifest, plan: Plan) -> None:
    theirs, ours = (
        ", ".join(side.optimizer(model).name for model in range(side.models)) for side in (manifest.plan, plan)
    )
    if theirs != ours:
        raise CheckpointError(
            f"checkpoint {folder} was made by optimizer {theirs}, but this job's is {ours}: use {theirs}, or start "
            f"anew with --init-from {folder}"
        )
    for what, was, now in (
        ("training samples", manifest.plan.samples, plan.samples),
        ("order of the samples", manifest.plan.settings.order, plan.settings.order),
        ("samples in a minibatch", manifest.plan.settings.batch_size, plan.settings.batch_size),
        ("replicas, each with a part of the data", _parts(manifest.plan), _parts(plan)),
    ):
        if was != now:
            raise CheckpointError(
                f"checkpoint {folder} was made with {was} {what}, but this job has {now}: the order of the data would "
                f"change; use {was}"
            )
    saved, layout = manifest.plan.layout, plan.layout
    if saved.tensors != layout.tensors:
        try:
            check_same(saved, layout, f"checkpoint {folder}: this job's model")
        except LayoutError as error:
            raise CheckpointError(f"{error}, or start anew") from error


def _parts(plan: Plan) -> int:
    """Return the number of parts of the data, one for each replica; 0 if replicas share them."""
    return plan.settings.replicas if plan.allotted else 0


def _verified(folder: Path, part: CheckpointFile) -> Path:
    """Return the file of a part after a check of its length and checksum."""
    file = folder / part.file
    try:
        size = file.stat().st_size
        if size != part.size:
            raise corrupt(file, f"it has {size} bytes, {part.size} were written")
        if checksum(file) != part.crc32:
            raise corrupt(file, "its checksum does not match")
    except OSError as error:
        raise unreadable(file, error) from error
    return file


def _open(stack: contextlib.ExitStack, folder: Path, part: CheckpointFile) -> Any:
    file = _verified(folder, part)
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise corrupt(file, str(error)) from error


_VECTOR = ("vector",)
"""Key of the parameters and buffers, which are bytes. All other keys are `master`, or `state` with a name, and hold
numbers."""
_COUNT, _MISSED = ("state", COUNT), ("state", MISSED)


class _Wanted(NamedTuple):
    """Bytes of a saved piece, and the number of its section."""

    entry: Entry
    section: int
    bytes: Range


class SavedParts:
    """Arrays of a checkpoint, read by pieces of tensors.

    Args:
        plan: plan of the job that saved it.
        opened: opens the file of a shard by its index, as `safe_open` does.
    """

    def __init__(self, plan: Plan, opened: Callable[[int], Any]) -> None:
        self._layout, self._assignments, self._opened = plan.layout, plan.assignments, opened
        self._files: dict[int, tuple[Any, set[str]]] = {}
        self._late: dict[tuple[int, int], int] = {}
        """Missed steps, by (shard, section)."""
        self._pieces: dict[str, list[tuple[Entry, int]]] = {}
        for entry in sorted(plan.layout.entries, key=lambda entry: entry.piece.start):
            self._pieces.setdefault(entry.tensor.name, []).append((entry, _section(plan.layout, entry)))

    def cut(self, plan: Plan, shard: int) -> dict[str, torch.Tensor]:
        """Make the arrays of a shard of another plan, named as in `Checkpoints.save_part`; missing ones are zero.

        Tensors whose split differs are read whole, one at a time.

        Raises:
            KeyError, RuntimeError, SafetensorError: an array is missing, or has a wrong length.
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
        """Make the masters and optimizer states of section `number` for the bytes `part`."""
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
            elif all(shape in ([], [1]) for shape in shapes):  # one value, such as the number of steps
                shard, of = max(having, key=lambda source: self._count(*source))  # other shards may have missed steps
                arrays[_name(key, number)] = self._file(shard)[0].get_tensor(_name(key, of)).clone()
            else:
                raise KeyError(f"{_name(key, number)} has shapes {shapes}")
        return arrays

    def _array(self, key: tuple[str, ...], layout: Layout, part: Range, item: int, dtype: torch.dtype) -> torch.Tensor:
        """Make an array for the bytes `part` of another layout's vector, with one element per `item` bytes."""
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
        """Return what to read for the bytes `within` of a piece: the whole tensor if its split differs."""
        pieces = self._pieces[entry.tensor.name]
        for saved, section in pieces:
            if _indices(saved) == _indices(entry):
                ahead = saved.start - entry.start
                return [_Wanted(saved, section, Range(within.start + ahead, within.stop + ahead))]
        return [_Wanted(saved, section, Range(saved.start, saved.stop)) for saved, section in pieces]

    def _read(self, key: tuple[str, ...], wanted: _Wanted, item: int, dtype: torch.dtype) -> torch.Tensor:
        """Read the part of an array for a saved piece from the files of its shards."""
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
        """Return the number of steps of a shard on its part of a section; 0 without a count."""
        file, names = self._file(shard)
        name = _name(_COUNT, section)
        return int(file.get_tensor(name)) if name in names else 0

    def _holders(self, wanted: _Wanted) -> list[tuple[int, Range]]:
        parts = ((i, self._range(i, wanted.entry).common(wanted.bytes)) for i in range(len(self._assignments)))
        return [(shard, part) for shard, part in parts if part.size]

    def _range(self, shard: int, entry: Entry) -> Range:
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
    """Return the pieces with bytes in a range, and these bytes."""
    parts = ((entry, part.common(Range(entry.start, entry.stop))) for entry in layout.entries)
    return [(entry, within) for entry, within in parts if within.size]


def _indices(entry: Entry) -> list[tuple[int, int]]:
    """Return the start and the stop of a piece in each dimension."""
    whole = [(0, side) for side in entry.tensor.shape]
    if whole:
        whole[entry.piece.dimension] = entry.piece.start, entry.piece.stop
    return whole


def _section(layout: Layout, entry: Entry) -> int:
    """Return the number of the section of a piece; -1 for an empty piece outside of all."""
    return next((i for i, section in enumerate(layout.sections) if section.start <= entry.start < section.stop), -1)


def _name(key: tuple[str, ...], section: int) -> str:
    kind, *rest = key
    return ".".join((kind, str(section), *rest))


class MemoryStore:
    """Store of the newest checkpoint in memory, for simulations without a run folder; the shards stay the same."""

    def __init__(self) -> None:
        self._making: dict[tuple[int, str], tuple[dict[str, torch.Tensor], Json]] = {}
        self._newest: dict[str, tuple[dict[str, torch.Tensor], Json]] = {}
        self._number = ""

    def save_part(self, number: int, part: str, arrays: dict[str, torch.Tensor], facts: Json) -> None:
        """Copy one shard's part."""
        self._making[number, part] = (
            {name: array.detach().clone() for name, array in arrays.items()},
            dict(facts),
        )

    def commit(self, number: int, plan: Plan, position: Position, samples: int, script: bool = False) -> str:
        """Make a checkpoint the newest, and return its name."""
        if str(number) == self._number:
            return self._number
        self._newest = {part: held for (checkpoint, part), held in self._making.items() if checkpoint == number}
        self._number = str(number)
        self.discard(number)
        return self._number

    def discard(self, number: int) -> None:
        """Delete the parts of a checkpoint and of earlier ones."""
        self._making = {key: held for key, held in self._making.items() if key[0] > number}

    def load_part(self, checkpoint: str, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
        """Read one shard's part of the newest checkpoint; refuse any other."""
        if checkpoint != self._number:
            raise CheckpointError(
                f"checkpoint {checkpoint!r} is not in memory, which keeps the newest only ({self._number or 'none'})"
            )
        arrays, facts = self._newest[f"shard-{shard}"]
        return {name: array.clone() for name, array in arrays.items()}, facts
