"""From the model of a run to a file: prune and train on, in stages; share and train on; code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from distbelief.codecs.file import ModelFile, decoded
from distbelief.codecs.stored import Stored
from distbelief.core.optimizer import optim
from distbelief.core.outcomes import Outcome
from distbelief.core.records import Json
from distbelief.core.values import admit, shown
from distbelief.errors import CheckpointError, DataError, Interrupted, JobFailed, UsageError
from distbelief.job import Job
from distbelief.lab.compress import shrinking
from distbelief.lab.compress.options import Compression
from distbelief.places.processes.local import Local
from distbelief.places.simulated.simulated import Simulated
from distbelief.record.folder import RunFolder, write_atomically
from distbelief.record.restore import load_weights
from distbelief.strategies import Strategy, find
from distbelief.tasks import Task, available, resolve
from distbelief.tasks.constrained import MARK, constrain, layers
from distbelief.tasks.flat import layout_of
from distbelief.tasks.task import ACCURACY
from distbelief.tasks.worker import build_model, measure

STAGES = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0)
"""A layer of which a share d is to be kept has d**s of its weights after stage s."""


@dataclass(frozen=True)
class Origin:
    """The run that is compressed."""

    run: str
    task: Task
    seed: int
    state: Mapping[str, torch.Tensor]
    layers: tuple[str, ...]
    """Names of the weights that can be pruned and shared."""


def compress(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Compression,
    on: Local | Simulated | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Json:
    """Compress the model of a run into one file.

    Args:
        run: the run folder.
        out: the file to write.
        options: how.
        on: where it is trained on; processes of this machine, unless another place is given (a simulated one must keep
            its run folders).
        tell: is told each step, in a line.

    Returns:
        file, task, bytes and dense_bytes, their ratio, test_error of the run's model and of the file's (in percent),
        layers (name, values, kept, bits, bytes), and left_alone: why some layers share nothing.

    Raises:
        UsageError: no such run, or an option that does not fit its model.
        CheckpointError: the run has no model.
        DataError: the data cannot be had.
        JobFailed: training it on failed.
        Interrupted: Ctrl-C.
    """
    admit(options, Compression, f"compress(options={shown(options)})")
    path = Path(out)
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}")
    origin = read_run(str(run), options.data_dir)
    tensors, aliases = shrinking.stored(origin.state)
    file = ModelFile(origin.task.reference, tensors, options.huffman, aliases)
    keep = shrinking.shares(options.keep or [1.0], origin.layers)
    with tempfile.TemporaryDirectory(prefix="distbelief-compress-") as folder:
        stages, alone = _Stages(origin, options, Path(folder), on or Local(), tell), dict[str, str]()
        if any(share < 1 for share in keep.values()):
            file = stages.prune(file, keep)
        if options.bits:
            file, alone = stages.share(file)
    if options.rest != "float32":
        file = shrinking.coarser(file, options.rest)
    data = file.encode()
    write_atomically(path, data)
    return _report(origin, path, decoded(data, str(path)), file, alone)


def read_run(run: str, data_dir: str | None) -> Origin:
    """Read the task and the model of a run.

    Raises:
        UsageError: there is no such run, or its model is a script's.
        CheckpointError: it has no model.
        DataError: its data cannot be had.
    """
    folder = RunFolder.open(run)
    job = folder.read_job()
    reference, options = str(job.get("task")), job.get("options") or {}
    if reference == "script":
        raise UsageError(f"{run} trained the model of a script, which has no task to train it on: write one for it")
    if MARK in reference:
        raise UsageError(f"{run} trained {reference}, which is compressed: compress the run that it was made of")
    if not folder.model.is_file():
        raise CheckpointError(f"{run} has no {folder.model.name}: train it on with --out {run} --resume")
    data_dir = data_dir or options.get("data_dir")
    if why := available(reference, data_dir):
        raise DataError(why)
    task, seed = resolve(reference, data_dir), int(job.get("seed", 0))
    model = build_model(task, seed, "cpu")
    model.load_state_dict(load_weights(folder.model, layout_of(model)))
    able = tuple(name for name in layers(model) if model.get_parameter(name).dtype == torch.float32)
    if not able:
        raise UsageError(f"the model of {run} has no layer that can be compressed: linear or convolutional, of float32")
    return Origin(run, task, seed, model.state_dict(), able)


class _Stages:
    """Prunes and shares, and has jobs train on what is left.

    Args:
        origin: what is compressed.
        options: how.
        folder: for files and run folders in between.
        on: where jobs run.
        tell: is told each stage.
    """

    def __init__(
        self, origin: Origin, options: Compression, folder: Path, on: Local | Simulated, tell: Callable[[str], None]
    ) -> None:
        self._origin, self._options, self._folder, self._on, self._tell = origin, options, folder, on, tell
        self._jobs = 0

    def prune(self, file: ModelFile, keep: Mapping[str, float]) -> ModelFile:
        """Keep so much of each layer, trained on after each stage.

        Each stage is a new job: the momentum of the last would move what it pruned.
        """
        epochs = self._options.fine_tune
        for power in STAGES if epochs else (1.0,):
            pruned = {name: shrinking.pruned(file.tensors[name], share**power) for name, share in keep.items()}
            kept = sum(stored.kept for stored in pruned.values()) / sum(stored.size for stored in pruned.values())
            self._tell(f"pruned to {100 * kept:.1f} % of the weights")
            file = self._train(file, pruned, epochs if power < 1 else 2 * epochs)
        return file

    def share(self, file: ModelFile) -> tuple[ModelFile, dict[str, str]]:
        """Have layers share values, trained on; and say why some are left alone."""
        options = self._options
        results = {
            name: shrinking.shared(file.tensors[name], options.bits, options.start, options.seed)
            for name in self._origin.layers
        }
        alone = {name: why for name, why in results.items() if isinstance(why, str)}
        for name, why in alone.items():
            self._tell(f"{name} shares nothing: {why}")
        if shared := {name: stored for name, stored in results.items() if isinstance(stored, Stored)}:
            self._tell(f"{1 << options.bits} values for the weights of each layer")
            file = self._train(file, shared, options.fine_tune)
        return file, alone

    def _train(self, file: ModelFile, changed: Mapping[str, Stored], epochs: int) -> ModelFile:
        """Replace some tensors, and have a job train the model on that keeps what they constrain."""
        file = replace(file, tensors={**file.tensors, **changed})
        if not epochs:
            return file
        self._jobs += 1
        path, run = self._folder / f"stage-{self._jobs}.dbz", self._folder / f"run-{self._jobs}"
        path.write_bytes(file.encode())
        origin, options = self._origin, self._options
        job = Job(
            f"{origin.task.reference}{MARK}{path}",
            _strategy(options),
            epochs=epochs,
            batch_size=options.batch_size,
            lr_schedule="cosine",
            seed=options.seed + self._jobs,
            evaluate_every=0,
            checkpoint_every=0,
            snapshot_every="0",
            data_dir=origin.task.data_dir,
            out=run,
        )
        result = self._on.run(job)
        if result["outcome"] == Outcome.INTERRUPTED:
            raise Interrupted(f"compressing {origin.run} was interrupted; nothing was written")
        if result["outcome"] != Outcome.DONE:
            raise JobFailed(f"training on at stage {self._jobs} of compressing {origin.run} ended: {result['outcome']}")
        model = constrain(build_model(origin.task, origin.seed, "cpu"), file)
        return shrinking.trained(file, load_weights(RunFolder.open(run).model, layout_of(model)))


def _strategy(options: Compression) -> Strategy:
    kind = find(options.strategy)
    fields = getattr(kind, "__dataclass_fields__", {})
    counts = {"replicas": options.replicas} if "replicas" in fields else {}
    return kind(**counts, **{"optimizer": optim("adam", lr=options.lr)})


def _report(origin: Origin, path: Path, read: ModelFile, file: ModelFile, alone: dict[str, str]) -> Json:
    """Say what came of it, measured from the file."""
    size = path.stat().st_size
    task, errors = origin.task, dict[str, float]()
    for name, state in (("dense_error", origin.state), ("test_error", read.state())):
        if task.test and ACCURACY in task.metrics:
            model = build_model(task, origin.seed, "cpu")
            model.load_state_dict(state)
            if (accuracy := measure(task, model).accuracy) is not None:
                errors[name] = 100 - 100 * accuracy
    layers = []
    for name in origin.layers:
        stored = file.tensors[name]
        where, what = stored.encode(file.huffman)
        shape = {"name": name, "values": stored.size, "kept": stored.kept, "bits": stored.bits}
        layers.append({**shape, "gap_bytes": len(where), "value_bytes": len(what)})
    return {
        "file": str(path),
        "task": task.reference,
        "bytes": size,
        "dense_bytes": file.dense_bytes,
        "ratio": file.dense_bytes / size,
        **errors,
        "layers": layers,
        "left_alone": alone,
    }
