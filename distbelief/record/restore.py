"""Reading checkpoints back: a shard's part, cut anew where the number of shards differs, and the weights alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from distbelief.core.records import Json
from distbelief.core.settings import Plan
from distbelief.errors import CheckpointError, LayoutError
from distbelief.record.checkpoints import (
    MANIFEST,
    MODEL,
    CheckpointFile,
    Checkpoints,
    Manifest,
    checksum,
    corrupt,
    read_manifest,
)
from distbelief.record.model_file import stored
from distbelief.sharding.layout import ITEM_SIZES, Layout, Piece, Range, check_same


def load_part(path: str | Path, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
    """The arrays that shard number `shard` of `plan` holds, out of a checkpoint that may have been cut into another
    number of shards.

    A per-element array that some shards had not made yet (an optimizer makes state at its first step) is zero there.

    Args:
        path: the folder of the checkpoint.
        plan: of the job that goes on; its layout and the name of its optimizer must be the checkpoint's.
        shard: index of the shard in `plan`.

    Returns:
        The arrays as `Checkpoints.save_part` describes them, own copies, and the facts: the shard's own where the cut
        is the same, else those of the shard that had applied most.

    Raises:
        CheckpointError: the checkpoint is missing, corrupt, or of another model or optimizer.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_fits(folder, manifest, plan)
    own = plan.assignments[shard]
    saved = manifest.plan.assignments
    with contextlib.ExitStack() as stack:
        files = {
            index: _open(stack, folder, part)
            for index, (part, theirs) in enumerate(zip(manifest.parts, saved, strict=True))
            if (saved == plan.assignments and index == shard)
            or _common(own.moving, theirs.moving).size
            or _common(own.frozen, theirs.frozen).size
        }
        try:
            arrays = {
                "vector.moving": _cut(
                    files, "vector.moving", own.moving, [one.moving for one in saved], 1, torch.uint8
                ),
                "vector.frozen": _cut(
                    files, "vector.frozen", own.frozen, [one.frozen for one in saved], 1, torch.uint8
                ),
            }
            for number, section in enumerate(plan.layout.sections):
                part = _common(own.moving, Range(section.start, section.stop))
                if section.kind == "parameter" and part.size:
                    held = [_common(one.moving, Range(section.start, section.stop)) for one in saved]
                    arrays |= _states(files, number, part, held, ITEM_SIZES[section.dtype])
        except (SafetensorError, OSError, RuntimeError, KeyError) as error:
            raise corrupt(folder / MANIFEST, f"its shards do not hold what it says ({error})") from error
    if saved == plan.assignments:
        return arrays, manifest.parts[shard].facts
    return arrays, max(
        (part.facts for part in manifest.parts), key=lambda facts: (facts.get("updates", 0), facts.get("samples", 0))
    )


class CheckpointStore(Checkpoints):
    """The checkpoints of one run, written and read back: what a driver asks of a store."""

    def load_part(self, checkpoint: str, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
        """As the function `load_part`."""
        return load_part(checkpoint, plan, shard)


def load_weights(
    path: str | Path, layout: Layout, pieces: Mapping[str, Piece] | None = None
) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint or any safetensors file, checked against a layout; the optimizer's state is left
    alone.

    Args:
        path: a run folder (its newest checkpoint), the folder of a checkpoint, or a `.safetensors` file of a state
            dict.
        layout: of the model that is to take them; a tied tensor may stand under any of its names.
        pieces: by the first names of their tensors, those that are read; None for all tensors, whole.

    Returns:
        All names of the layout, tied ones included, with own memory except between tied names: what
        `load_state_dict(strict=True)` wants; or the pieces, by their names.

    Raises:
        CheckpointError: nothing is there, it is corrupt, or a tensor differs by name, shape or dtype.
    """
    source = _weights_file(Path(path))
    named: dict[str, torch.Tensor] = {}
    known = {entry.tensor.name for entry in layout.entries} | set(layout.aliases)
    try:
        with safe_open(source, framework="np"):  # which checks it; for torch, it maps it as memory of the process's own
            held = stored(source)
        present = set(held)
        with source.open("rb") as file:
            for tensor in {entry.tensor.name: entry.tensor for entry in layout.entries}.values():
                names = [tensor.name, *(alias for alias, name in layout.aliases.items() if name == tensor.name)]
                found = next((name for name in names if name in present), None)
                if found is None:
                    foreign = "".join(f", but {name!r}, which it lacks" for name in sorted(present - known)[:1])
                    raise CheckpointError(
                        f"{source} has no tensor {tensor.name!r}, which the model has{foreign}; name a checkpoint of "
                        "the same model"
                    )
                one = held[found]
                if (one.shape, one.dtype) != (tensor.shape, tensor.dtype):
                    theirs, ours = f"{list(one.shape)} {one.dtype}", f"{list(tensor.shape)} {tensor.dtype}"
                    raise CheckpointError(
                        f"{tensor.name!r} is {theirs} in {source}, the model's is {ours}; name a checkpoint of the "
                        "same model"
                    )
                if pieces is not None and tensor.name not in pieces:
                    continue
                values = torch.empty(one.shape, dtype=getattr(torch, one.dtype))
                file.seek(one.data_offsets[0])
                memory = values.view(-1).view(torch.uint8).numpy().data
                if (read := file.readinto(memory)) != len(memory):
                    raise CheckpointError(f"{source} ends {len(memory) - read} bytes too early, in {found!r}")
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
                "it is damaged: name another checkpoint, or go on by --resume with the run that it is of, which "
                "writes it anew"
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
        ", ".join(one.optimizer(model).name for model in range(one.models)) for one in (manifest.plan, plan)
    )
    if theirs != ours:
        raise CheckpointError(
            f"checkpoint {folder} was made by optimizer {theirs}, this job's is {ours}: use {theirs}, or start anew "
            f"with --init-from {folder}"
        )
    for what, was, now in (
        ("training samples", manifest.plan.samples, plan.samples),
        ("order of the samples", manifest.plan.settings.data.order, plan.settings.data.order),
        ("samples in a minibatch", manifest.plan.settings.data.batch_size, plan.settings.data.batch_size),
        ("replicas, each with a part of the data", _parts(manifest.plan), _parts(plan)),
    ):
        if was != now:
            raise CheckpointError(
                f"checkpoint {folder} was made with {was} {what}, this job has {now}: the order of the data would "
                f"change; use {was}"
            )
    saved, layout = manifest.plan.layout, plan.layout
    if (saved.entries, saved.sections) != (layout.entries, layout.sections):
        try:
            check_same(saved, layout, f"checkpoint {folder}: this job's model")
        except LayoutError as error:
            raise CheckpointError(f"{error}, or start anew") from error


def _parts(plan: Plan) -> int:
    """Into how many parts the data are cut, one for each replica; 0 where they are not."""
    return plan.settings.replicas if plan.allotted else 0


def _verified(folder: Path, part: CheckpointFile) -> Path:
    """The file of a part, once its length and checksum are seen to be right."""
    file = folder / part.file
    try:
        size = file.stat().st_size
        if size != part.size:
            raise corrupt(file, f"it has {size} bytes, {part.size} were written")
        if checksum(file) != part.crc32:
            raise corrupt(file, "its checksum does not match")
    except OSError as error:
        raise corrupt(file, str(error.strerror)) from error
    return file


def _open(stack: contextlib.ExitStack, folder: Path, part: CheckpointFile) -> Any:
    file = _verified(folder, part)
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise corrupt(file, str(error)) from error


def _common(one: Range, other: Range) -> Range:
    start = max(one.start, other.start)
    return Range(start, max(start, min(one.stop, other.stop)))


def _states(
    files: dict[int, Any], number: int, part: Range, held: Sequence[Range], item: int
) -> dict[str, torch.Tensor]:
    """The masters and optimizer states of section `number` for the bytes `part`; saved shard i holds `held[i]` of the
    section.
    """
    sources = [(file, held[index]) for index, file in files.items() if _common(part, held[index]).size]
    names = {name for file, _ in sources for name in file.keys() if name.split(".")[1:2] == [str(number)]}  # noqa: SIM118
    arrays: dict[str, torch.Tensor] = {}
    for name in sorted(names - {"vector.moving", "vector.frozen"}):
        having = [(file.get_slice(name).get_shape(), file, theirs) for file, theirs in sources if name in file.keys()]  # noqa: SIM118
        if all(shape == [theirs.size // item] for shape, _, theirs in having):
            kept = {index: file for index, file in files.items() if name in file.keys()}  # noqa: SIM118
            if name.startswith("master.") and len(having) < len(sources):
                raise KeyError(f"{name} is missing in a shard")
            arrays[name] = _cut(kept, name, part, held, item, having[0][1].get_slice(name)[:0].dtype)
        elif all(shape in ([], [1]) for shape, _, _ in having):
            arrays[name] = having[0][1].get_tensor(name).clone()
        else:
            raise KeyError(f"{name} has shapes {[shape for shape, _, _ in having]}")
    return arrays


def _cut(
    files: dict[int, Any], name: str, part: Range, held: Sequence[Range], item: int, dtype: torch.dtype
) -> torch.Tensor:
    """Array `name` for the bytes `part`, with one element per `item` bytes: slices of what each saved shard holds,
    zeros where one has none.
    """
    array = torch.zeros(part.size // item, dtype=dtype)
    for index, file in files.items():
        common = _common(part, held[index])
        if common.size:
            values = file.get_slice(name)[
                (common.start - held[index].start) // item : (common.stop - held[index].start) // item
            ]
            array[(common.start - part.start) // item : (common.stop - part.start) // item] = values
    return array
