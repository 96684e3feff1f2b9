"""Process of a prediction: it loads the runs' models, or its part of each, and computes its portions of the samples."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distbelief.codecs.file import ModelFile
from distbelief.core import roles
from distbelief.core.effects import RECEIVE, Batch, Receive, Send, Steps
from distbelief.core.settings import Settings
from distbelief.errors import DataError, DistbeliefError, TrainingError, UsageError, limit
from distbelief.fabric.crossings import Crossings, segment_bytes
from distbelief.places.channel import OF_PREDICTION, Channel
from distbelief.places.evaluate import find, trained
from distbelief.places.messages import Failed, Predicted, PredictionReady, PredictPortion
from distbelief.places.processes.lending import map_memory
from distbelief.places.processes.settle import enter
from distbelief.places.processes.spec import Surroundings
from distbelief.record.restore import load_weights
from distbelief.replica.siblings import Siblings
from distbelief.replica.split_compute import SplitCompute
from distbelief.sharding.layout import ITEM_SIZES
from distbelief.split.tracing import examples
from distbelief.strategies import Single
from distbelief.strategies.partition import STREAM, AnsweringPart, answering_part
from distbelief.tasks import Task, resolve
from distbelief.tasks.constrained import fill
from distbelief.tasks.flat import layout_of
from distbelief.tasks.on_disk import build_on_disk
from distbelief.tasks.task import Data, TensorData
from distbelief.tasks.worker import add_sums, load, on_device, placed

SUFFIXES = (".safetensors", ".npy")
"""Suffixes of files of inputs."""
INPUTS = "inputs"
"""Tensor of a safetensors file that holds the inputs."""
HEADER_ROOM = 1024
"""Bytes kept for the header of the output file: its content is known only after the first output."""
WAKES = 4096
"""Most wake-ups that are read at once."""
Answers = Callable[[object], object]
"""A model, or one partition's part of it; the part returns None if another partition has the output."""


class PredictionSpec(Surroundings, frozen=True, kw_only=True):
    """All values that a process of a prediction needs."""

    role: str = ""
    """Role: `replica 1`, or `replica 1.0` for a partition of it."""
    number: int = 0
    """Number of the process among all; it selects one of several devices."""
    partitions: int
    """Processes of each replica."""
    split: str
    """Way to split the models if each replica has several processes."""
    runs: list[str]
    """Run folders and compressed files."""
    source: str
    """A task by its name, or a file of inputs."""
    data_dir: str | None
    device: str
    batch_size: int
    """Samples that are computed at once."""
    out: str
    """File that the user named, for error messages."""
    rows: str
    """File to which the outputs are written, each at the place of its sample."""
    memory: int = -1
    """The supervisor's descriptor of the memory by which partitions exchange tensors."""
    bells: tuple[int, ...] = ()
    """The supervisor's descriptors of pipes, one for each partition: it sleeps until a byte comes."""


def is_file(source: str) -> bool:
    """Return whether a source is a file of inputs, and not a task.

    >>> is_file("new.npy"), is_file("mnist")
    (True, False)
    """
    return source.endswith(SUFFIXES)


def main(packed: bytes, connection: Connection) -> None:
    """Compute portions of samples until the channel is closed; report a `DistbeliefError`, and exit with status 1."""
    spec = msgspec.msgpack.decode(packed, type=PredictionSpec)
    enter(multiprocessing.current_process().name, spec)
    channel = Channel(connection, decode=OF_PREDICTION)
    try:
        predictor = _Predictor(spec)
        if predictor.outputs:
            channel.say(PredictionReady(len(predictor.data), predictor.splits))
        while isinstance(portion := channel.hear(), PredictPortion):
            answer = predictor.predict(portion.start, portion.stop)
            if answer is not None:
                channel.say(answer)
    except DistbeliefError as error:
        channel.say(Failed(type(error).__name__, str(error)))
        sys.exit(1)


class _Predictor:
    """Models of the runs, and the mean of their outputs."""

    def __init__(self, spec: PredictionSpec) -> None:
        self._spec, self._device = spec, placed(spec.device, spec.number)
        self._task = None if is_file(spec.source) else resolve(spec.source, spec.data_dir)
        named = None if self._task is None else self._task.reference
        self.data = _data(spec.source, self._task)
        self.splits: list[str] = []
        self.outputs = True
        """True if this process has the outputs of the models; false at a partition that only computes part of them."""
        if spec.partitions == 1:
            models = [trained(Path(run), None, spec.device, named, spec.number)[1].eval() for run in spec.runs]
            self._models: list[tuple[str, Answers]] = [*zip(spec.runs, models, strict=True)]
        else:
            inputs, _ = self.data.batch(examples(len(self.data)))
            parts = [_part(spec, run, named, inputs) for run in spec.runs]
            self.splits = [part.text for part in parts]
            self.outputs = _last(spec, parts) == roles.partition_of(spec.role)
            self._models = [*zip(spec.runs, _joined(spec, parts), strict=True)]
        self._rows = open(spec.rows, "r+b")  # noqa: SIM115  # open until the process ends

    def predict(self, start: int, stop: int) -> Predicted | None:
        """Compute the outputs of a range of samples, and write them; return None if another partition has them."""
        sums: dict[str, float] = defaultdict(float)
        for numbers in torch.arange(start, stop).split(self._spec.batch_size):
            inputs, targets = self.data.batch(numbers)
            output = self._mean(on_device(inputs, self._device), numbers)
            if output is None:
                continue
            if self._task is not None:
                add_sums(sums, self._task, output, on_device(targets, self._device), len(numbers))
            self._write(output, int(numbers[0]))
        return None if output is None else Predicted(_dtype(output), list(output.shape[1:]), sums)

    def _write(self, output: Tensor, first: int) -> None:
        values = output.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        try:
            self._rows.seek(HEADER_ROOM + first * (values.nbytes // len(output)))
            self._rows.write(values.data)
            self._rows.flush()
        except OSError as error:
            raise UsageError(f"--out {self._spec.out}: cannot be written: {limit(error) or error.strerror}") from error

    def _mean(self, inputs: object, numbers: Tensor) -> Tensor | None:
        """Return the mean of the models' outputs, or the only model's output; None if another partition has them."""
        total: Tensor | None = None
        for run, model in self._models:
            where = f"the model of {run}, of samples {int(numbers[0])} to {int(numbers[-1])},"
            try:
                with torch.no_grad():
                    answer = model(inputs)
            except (Exception, SystemExit) as error:
                raise TrainingError(f"{where} raised {type(error).__name__}: {error}") from error
            if not self.outputs:
                continue
            output = self._checked(where, answer, len(numbers))
            if total is not None and (total.shape, total.dtype) != (output.shape, output.dtype):
                raise UsageError(
                    f"the model of {run} answers {_described(output)} to {len(numbers)} samples, that of "
                    f"{self._models[0][0]} {_described(total)}: they have no mean; predict with each by itself"
                )
            total = output if total is None else total + output
        return total if total is None or len(self._models) == 1 else total / len(self._models)

    def _checked(self, where: str, output: object, samples: int) -> Tensor:
        """Return an output; refuse one that cannot be written, or that has no mean with others."""
        if not isinstance(output, Tensor) or not output.ndim or len(output) != samples:
            kind = _described(output) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise UsageError(f"{where} answers {kind}: it must be one tensor, with the samples in its first dimension")
        if _dtype(output) not in ITEM_SIZES:
            raise UsageError(f"{where} answers {_described(output)}, which cannot be written: answer real numbers")
        if len(self._models) > 1 and not output.is_floating_point():
            raise UsageError(f"{where} answers {_described(output)}, which has no mean: predict with one run")
        return output


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {_dtype(tensor)}"


def _data(source: str, task: Task | None) -> Data:
    """Return the test set of a task, or the inputs of a file with zeros as unused targets."""
    if task is not None:
        if task.test is None:
            raise UsageError(f"task {task.reference!r} has no test set: give it one, or name a file of inputs")
        return load(task, "test")
    path = Path(source)
    if not path.is_file():
        raise DataError(f"there is no file {source}: name one of inputs ({' or '.join(SUFFIXES)}), or a task")
    kind, remedy = "an array of numbers", "write it with numpy.save"
    try:
        if path.suffix == ".npy":
            inputs = torch.from_numpy(numpy.load(path, allow_pickle=False))
        else:
            kind, remedy = "safetensors", "write it anew"
            with safe_open(path, framework="pt") as file:
                if INPUTS not in (names := sorted(file.keys())):
                    held = ", ".join(names) or "nothing"
                    raise DataError(f"{path} holds {held}: name the tensor of inputs {INPUTS!r}")
                inputs = file.get_tensor(INPUTS)
    except (SafetensorError, ValueError, TypeError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}; {remedy}") from error
    if not inputs.ndim or not len(inputs):
        raise DataError(f"{source} holds inputs of shape {list(inputs.shape)}: its first dimension counts the samples")
    return TensorData(inputs, torch.zeros(len(inputs)))


def _part(spec: PredictionSpec, run: str, named: str | None, inputs: object) -> AnsweringPart:
    """Return this partition's part of a run's model; of its values only those of the part are read."""
    task, seed, values = find(Path(run), None, named)
    model = build_on_disk(task, seed).model
    layout = layout_of(model)
    if isinstance(values, ModelFile):
        fill(model, values)
    parts = Single(partitions=spec.partitions, split=spec.split, microbatches=STREAM, schedule="gpipe")
    settings = Settings(batch_size=STREAM * spec.batch_size, strategy=parts)
    try:
        part = answering_part(task, model, settings, spec.role, inputs, placed(spec.device, spec.number))
    except UsageError as error:
        raise UsageError(f"the model of {run}: {error}") from error
    if isinstance(values, Path):
        part.program.module.load_state_dict(load_weights(values, layout, part.program.pieces))
    return part


def _last(spec: PredictionSpec, parts: list[AnsweringPart]) -> int:
    """Return the partition that has the outputs of all models; refuse models that end at different ones."""
    first = parts[0]
    for run, part in zip(spec.runs, parts, strict=True):
        if part.last != first.last:
            raise UsageError(
                f"split by {part.text}, the model of {run} ends at partition {part.last}, that of {spec.runs[0]} by "
                f"{first.text} at {first.last}, and their outputs do not meet: name a --split by which both end "
                "alike (stages), or predict with each by itself"
            )
    return first.last


def _joined(spec: PredictionSpec, parts: list[AnsweringPart]) -> list[Answers]:
    """Return the parts as models, which exchange tensors in shared memory; all partitions call them in one order."""
    siblings, folder = Siblings(spec.role, 0, spec.partitions), f"/proc/{spec.supervisor}/fd"
    bells = [os.open(f"{folder}/{bell}", os.O_RDWR) for bell in spec.bells]
    lengths = [segment_bytes(spec.partitions, part.slots) for part in parts]
    os.truncate(f"{folder}/{spec.memory}", sum(lengths))  # all partitions set the same size
    shared = torch.frombuffer(map_memory(spec.supervisor, spec.memory), dtype=torch.uint8)
    if (copies := parts[0].copies) is not None:  # all parts are on one device
        copies.pin(shared)

    def joined(part: AnsweringPart, memory: Tensor) -> Answers:
        crossings = Crossings(memory, siblings.partition, spec.partitions, part.slots, copies=copies)
        compute = SplitCompute(siblings, part, crossings)

        def answer(inputs: object) -> object:
            part.inputs = inputs
            for effect in compute.compute(Batch(0, 0), _wait):
                if isinstance(effect, Send):
                    os.write(bells[roles.partition_of(effect.to)], b"\0")
                elif isinstance(effect, Receive):
                    os.read(bells[siblings.partition], WAKES)
            return part.output

        return answer

    return [joined(part, memory) for part, memory in zip(parts, shared.split(lengths), strict=True)]


def _wait() -> Steps[None]:
    yield RECEIVE
