"""Compression of a run's model: prune and train it in stages, let weights share values, and code the rest in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from distbelief.codecs.codec import Floats, Symbols, check_finite
from distbelief.codecs.file import ModelFile, decoded, read
from distbelief.codecs.stored import Stored
from distbelief.core.optimizer import optim
from distbelief.core.records import Json, Outcome
from distbelief.core.values import admit, shown
from distbelief.errors import DataError, Interrupted, JobFailed, UsageError
from distbelief.job import Job
from distbelief.lab.compress.options import Compression
from distbelief.places.evaluate import trained
from distbelief.places.processes.local import Local
from distbelief.places.simulated.simulated import Simulated
from distbelief.record.folder import RunFolder, check_output, write_atomically
from distbelief.record.restore import load_weights
from distbelief.strategies import find
from distbelief.tasks import Task, available
from distbelief.tasks.constrained import MARK, constrain, layers, trained_name
from distbelief.tasks.flat import layout_of
from distbelief.tasks.task import ACCURACY
from distbelief.tasks.worker import build_model, measure

STAGES = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0)
"""Exponents of pruning stages: after stage s, a layer whose final share is d keeps d**s."""


@dataclass(frozen=True)
class Origin:
    """Run whose model is compressed."""

    run: str
    task: Task
    seed: int
    state: Mapping[str, torch.Tensor]
    layers: tuple[str, ...]


def compress(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Compression,
    on: Local | Simulated | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Json:
    """Compress the model of a run folder into the file `out`.

    `on` is the place of further training, by default processes of this machine. A simulated place must keep its run
    folders. `tell` receives a line about each step.

    Returns:
        file, task, bytes and dense_bytes, their ratio, dense_error and test_error (percent, of the run's model and of
        the file's), layers (name, values, kept, bits, bytes), and left_alone: layers that share nothing, each with the
        reason.

    Raises:
        UsageError: there is no such run, or an option does not fit its model.
        CheckpointError: the run has no model.
        DataError: its data are missing.
        JobFailed: further training failed.
        Interrupted: Ctrl-C.
    """
    admit(options, Compression, f"compress(options={shown(options)})")
    path = Path(out)
    check_output(path)
    origin = read_run(str(run), options.data_dir)
    tensors, aliases = stored_tensors(origin.state)
    file = ModelFile(origin.task.reference, tensors, options.huffman, aliases)
    keep = shares_kept(options.keep or [1.0], origin.layers)
    with tempfile.TemporaryDirectory(prefix="distbelief-compress-") as folder:
        stages, alone = _Stages(origin, options, Path(folder), on or Local(), tell), dict[str, str]()
        if any(share < 1 for share in keep.values()):
            file = stages.prune(file, keep)
        if options.bits:
            file, alone = stages.share(file)
    if options.rest != "float32":
        coarse = {
            name: replace(tensor, precision=options.rest)
            for name, tensor in file.tensors.items()
            if tensor.ids is None and tensor.values.dtype == torch.float32
        }
        file = replace(file, tensors={**file.tensors, **coarse})
    data = file.encode()
    write_atomically(path, data)
    return _report(origin, path, decoded(data, str(path)), file, alone)


def read_run(run: str, data_dir: str | None) -> Origin:
    """Read the task and the model of a run."""
    job = RunFolder.open(run).read_job()
    reference = str(job.get("task"))
    if reference == "script":
        raise UsageError(f"{run} trained a script's model, which has no task for further training: write one for it")
    if MARK in reference:
        raise UsageError(f"{run} trained {reference}, which is compressed: compress the original run")
    task, model = trained(Path(run), data_dir)
    if why := available(reference, task.data_dir):
        raise DataError(why)
    able = tuple(name for name in layers(model) if model.get_parameter(name).dtype == torch.float32)
    if not able:
        raise UsageError(
            f"the model of {run} has no layer that can be compressed: a linear or convolutional one of float32"
        )
    return Origin(run, task, int(job.get("seed", 0)), model.state_dict(), able)


class _Stages:
    """Pruning and sharing of values, with jobs that train the rest."""

    def __init__(
        self, origin: Origin, options: Compression, folder: Path, on: Local | Simulated, tell: Callable[[str], None]
    ) -> None:
        self._origin, self._options, self._folder, self._on, self._tell = origin, options, folder, on, tell
        self._jobs = 0

    def prune(self, file: ModelFile, keep: Mapping[str, float]) -> ModelFile:
        """Keep a share of each layer's weights, with further training after each stage.

        Each stage is a new job: the last one's momentum would move pruned weights.
        """
        epochs = self._options.fine_tune
        for power in STAGES if epochs else (1.0,):
            pruned = {name: prune(file.tensors[name], share**power) for name, share in keep.items()}
            kept = sum(stored.kept for stored in pruned.values()) / sum(stored.size for stored in pruned.values())
            self._tell(f"pruned to {100 * kept:.1f} % of the weights")
            file = self._train(file, pruned, epochs if power < 1 else 2 * epochs)
        return file

    def share(self, file: ModelFile) -> tuple[ModelFile, dict[str, str]]:
        """Let the weights of each layer share values, train further, and return why any layers are left alone."""
        options = self._options
        results = {
            name: share_values(file.tensors[name], options.bits, options.start, options.seed)
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
        file = replace(file, tensors={**file.tensors, **changed})
        if not epochs:
            return file
        self._jobs += 1
        path, run = self._folder / f"stage-{self._jobs}.dbz", self._folder / f"run-{self._jobs}"
        path.write_bytes(file.encode())
        origin, options = self._origin, self._options
        kind = find(options.strategy)
        counts = {"replicas": options.replicas} if "replicas" in getattr(kind, "__dataclass_fields__", {}) else {}
        job = Job(
            f"{origin.task.reference}{MARK}{path}",
            kind(**counts, **{"optimizer": optim("adam", lr=options.lr)}),
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
            raise JobFailed(
                f"further training at stage {self._jobs} of compressing {origin.run} ended: {result['outcome']}"
            )
        model = constrain(build_model(origin.task, origin.seed, "cpu"), file)
        return with_trained_values(file, load_weights(RunFolder.open(run).model, layout_of(model)))


def _report(origin: Origin, path: Path, read: ModelFile, file: ModelFile, alone: dict[str, str]) -> Json:
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


ROUNDS = 300
"""Limit of k-means rounds; convergence nearly always comes long before."""


def stored_tensors(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return each tensor of a state dict once, and a map from each tied tensor's other names to its first.

    >>> weight = torch.ones(1, 2)
    >>> stored_tensors({"a": weight, "b": weight})[1]
    {'b': 'a'}
    """
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    tensors: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        place = tensor.data_ptr(), tuple(tensor.shape)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = Stored(tuple(tensor.shape), tensor.detach().flatten().clone())
    return tensors, aliases


def shares_kept(keep: Sequence[float], layers: Sequence[str]) -> dict[str, float]:
    """Return the share of each layer to keep.

    >>> shares_kept([0.5], ["0.weight", "2.weight"])
    {'0.weight': 0.5, '2.weight': 0.5}
    """
    if len(keep) not in (1, len(layers)):
        raise UsageError(
            f"--keep has {len(keep)} numbers, and the model has {len(layers)} layers ({', '.join(layers)}): write one "
            "for all, or one for each"
        )
    return dict(zip(layers, keep if len(keep) > 1 else [*keep] * len(layers), strict=True))


def prune(tensor: Stored, share: float) -> Stored:
    """Keep the largest values of a tensor up to a share of all, at least one; ties go to the first.

    >>> prune(Stored((4,), torch.tensor([0.1, -3.0, 0.2, 1.0])), 0.5).dense()
    tensor([ 0., -3.,  0.,  1.])
    """
    most = max(1, min(tensor.kept, round(share * tensor.size)))
    if most == tensor.size:
        return tensor
    largest = np.sort(np.argsort(-tensor.values.abs().numpy(), kind="stable")[:most])
    positions = largest if tensor.positions is None else tensor.positions[largest]
    return Stored(tensor.shape, tensor.values[torch.from_numpy(largest)], positions.astype(np.int64))


def share_values(tensor: Stored, bits: int, start: str, seed: int) -> Stored | str:
    """Make the kept values of a tensor share 2**bits values, or return why it is left alone."""
    check_finite(tensor.values.numpy())
    different = len(torch.unique(tensor.values))
    if tensor.kept <= 1 << bits:
        return f"it has {tensor.kept} values, and a codebook has {1 << bits}"
    if different < 1 << bits:
        return f"it has {different} different values, fewer than {1 << bits} clusters"
    codebook, ids = cluster(tensor.values.numpy(), 1 << bits, start, seed)
    return Stored(tensor.shape, torch.from_numpy(codebook), tensor.positions, ids, bits)


def cluster(values: Floats, clusters: int, start: str, seed: int) -> tuple[Floats, Symbols]:
    """Cluster finite numbers by Lloyd's k-means until convergence; return ascending centers and each number's nearest.

    `start` chooses the initial centers: linear (evenly from the least number to the largest), density (equally many
    numbers between neighbours), or random (some of the numbers, by the seed). There are at most as many centers as
    different numbers.

    >>> cluster(np.array([0.0, 9.0, 1.0, 8.0], dtype=np.float32), 2, "linear", 0)
    (array([0.5, 8.5], dtype=float32), array([0, 1, 0, 1], dtype=uint16))
    """
    ordered = np.sort(values).astype(np.float64)
    sums = np.concatenate([[0.0], ordered.cumsum()])
    if start == "linear":
        centers = np.linspace(ordered[0], ordered[-1], clusters)
    elif start == "density":
        centers = np.quantile(ordered, (np.arange(clusters) + 0.5) / clusters)
    else:
        centers = np.sort(np.random.default_rng(seed).choice(np.unique(ordered), clusters, replace=False))
    for _ in range(ROUNDS):
        edges = np.concatenate([[0], np.searchsorted(ordered, (centers[1:] + centers[:-1]) / 2), [len(ordered)]])
        members = np.diff(edges)
        # a center without members stays where it is
        means = np.where(members > 0, np.diff(sums[edges]) / np.maximum(members, 1), centers)
        if np.array_equal(means, centers):
            break
        centers = np.sort(means)
    codebook = centers.astype(np.float32)
    middles = (codebook[1:].astype(np.float64) + codebook[:-1]) / 2
    return codebook, np.searchsorted(middles, values).astype(np.uint16)


def with_trained_values(file: ModelFile, state: Mapping[str, torch.Tensor]) -> ModelFile:
    """Return the file with the trained values."""
    tensors = {
        name: replace(tensor, values=state[trained_name(name, tensor)].detach().flatten().clone())
        for name, tensor in file.tensors.items()
    }
    return replace(file, tensors=tensors)


def expand(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the dense state dict of a compressed file as safetensors, with copies under tied names.

    Return the path of the written file: `out`, by default beside the compressed file, with the suffix .safetensors.

    Raises:
        DataError: the file is missing, truncated, foreign or corrupt.
        UsageError: the output is the compressed file itself, or cannot be written.
    """
    source = Path(admit(path, str | os.PathLike, f"expand({shown(path)})"))
    target = Path(out) if out else source.with_suffix(".safetensors")
    if target == source:
        raise UsageError(f"--out {target}: is the compressed file itself; name another")
    check_output(target)
    state = {name: tensor.clone() for name, tensor in read(source).state().items()}
    try:
        write_atomically(target, save(state, metadata={"format": "pt"}))
    except OSError as error:
        remedy = "name a file in a folder that you may write to"
        raise UsageError(f"--out {target}: cannot be written ({error.strerror}); {remedy}") from error
    return target
