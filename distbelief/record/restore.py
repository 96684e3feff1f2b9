"""Reading checkpoints back: a shard's part, cut anew where the shards or the split differ, and the weights alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

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
from distbelief.record.parts import SavedParts
from distbelief.sharding.layout import Layout, Piece, check_same

HEADER = 1 << 16
"""Most bytes of a safetensors file beside its arrays, where these are few."""


def load_part(path: str | Path, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
    """The arrays that shard number `shard` of `plan` holds, out of a checkpoint that may have been cut into another
    number of shards, and of a model that may have been split otherwise, or not.

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
    """Read what a script keeps from a checkpoint; empty where none kept anything.

    Raises:
        CheckpointError: the checkpoint is missing or corrupt.
    """
    folder = Path(path)
    part = read_manifest(folder).script
    if part is None:
        return {}
    if part.size > SCRIPT_LIMIT + HEADER:
        raise corrupt(folder / part.file, f"it has {part.size} bytes, of which a script keeps {SCRIPT_LIMIT} at most")
    file = _verified(folder, part)
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise corrupt(file, str(error)) from error


class CheckpointStore(Checkpoints):
    """The checkpoints of one run, written and read back: what a driver asks of a store."""

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
        ", ".join(side.optimizer(model).name for model in range(side.models)) for side in (manifest.plan, plan)
    )
    if theirs != ours:
        raise CheckpointError(
            f"checkpoint {folder} was made by optimizer {theirs}, this job's is {ours}: use {theirs}, or start anew "
            f"with --init-from {folder}"
        )
    for what, was, now in (
        ("training samples", manifest.plan.samples, plan.samples),
        ("order of the samples", manifest.plan.settings.order, plan.settings.order),
        ("samples in a minibatch", manifest.plan.settings.batch_size, plan.settings.batch_size),
        ("replicas, each with a part of the data", _parts(manifest.plan), _parts(plan)),
    ):
        if was != now:
            raise CheckpointError(
                f"checkpoint {folder} was made with {was} {what}, this job has {now}: the order of the data would "
                f"change; use {was}"
            )
    saved, layout = manifest.plan.layout, plan.layout
    if saved.tensors != layout.tensors:
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
        raise unreadable(file, error) from error
    return file


def _open(stack: contextlib.ExitStack, folder: Path, part: CheckpointFile) -> Any:
    file = _verified(folder, part)
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise corrupt(file, str(error)) from error
