"""Split models that predict: a partition loads its own part of each, and computes that with the others of its
replica.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import torch

from distbelief.codecs.file import ModelFile
from distbelief.core import roles
from distbelief.core.effects import RECEIVE, Batch, Computed, Receive, Send
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.fabric.crossings import Crossings, segment_bytes
from distbelief.places.evaluate import find
from distbelief.places.prediction.dealing import IN_HAND, PORTION_BATCHES
from distbelief.places.prediction.messages import PredictionSpec
from distbelief.places.processes.peers import map_memory
from distbelief.record.restore import load_weights
from distbelief.replica.home_part import HomeSchedule, ModelPart, home_schedule
from distbelief.replica.siblings import Siblings
from distbelief.replica.split_compute import SplitCompute
from distbelief.replica.steps import Steps
from distbelief.schedules.pipeline import HomeTask, Pass
from distbelief.split.choosing import choose
from distbelief.split.options import AUTO, Split
from distbelief.split.plan import apply
from distbelief.split.play import HomeEffect, cut_minibatch, step
from distbelief.split.program import HomeProgram, build
from distbelief.split.tracing import EXAMPLES, trace
from distbelief.tasks.files.constrained import fill
from distbelief.tasks.flat import layout_of
from distbelief.tasks.on_disk import build_on_disk
from distbelief.tasks.worker import placed

WAKES = 4096
"""Most calls that are taken at once."""


class PartitionModel:
    """A partition's part of a model, which is called as the whole one is, by all partitions alike.

    Args:
        part: of the model.
        compute: how that is computed with the others.
        calls: by which they wake each other.
    """

    def __init__(self, part: AnsweringPart, compute: SplitCompute, calls: _WakePipes) -> None:
        self._part, self._compute, self._calls = part, compute, calls

    def __call__(self, inputs: object) -> object:
        """The output, at the partition that has it."""
        self._part.inputs = inputs
        for effect in self._compute.compute(Batch(0, 0), _wait):
            if isinstance(effect, Send):
                self._calls.wake(effect.to)
            elif isinstance(effect, Receive):
                self._calls.sleep()
        return self._part.output


class SplitModels(NamedTuple):
    """What a process has of the models of all runs."""

    models: list[Callable[[object], object]]
    """Each a `PartitionModel`."""
    splits: list[str]
    """How each is split."""
    outputs: bool
    """Whether their outputs are here."""


def split_models(spec: PredictionSpec, named: str | None, inputs: object) -> SplitModels:
    """A partition's part of the models of all runs.

    Args:
        spec: of its process.
        named: the task that is predicted, which builds the model of a run that has no name for its own.
        inputs: an example, of the samples that models are traced with.

    Raises:
        DistbeliefError: as `find`, and of models that cannot be split so.
    """
    held = [_load(spec, run, named, inputs) for run in spec.runs]
    for run, one in zip(spec.runs, held, strict=True):
        if one.output != held[0].output:
            raise UsageError(
                f"split by {one.split}, the model of {run} ends at partition {one.output}, that of {spec.runs[0]} by "
                f"{held[0].split} at {held[0].output}, and their outputs do not meet: name a --split by which both end "
                "alike (stages), or predict with each by itself"
            )
    parts = [AnsweringPart(one.program, one.way, spec.batch_size) for one in held]
    siblings, calls = Siblings(spec.role, 0, spec.partitions), _WakePipes(spec)
    lengths = [segment_bytes(spec.partitions, part.slots) for part in parts]
    shared, copies = _shared(spec, sum(lengths)), parts[0].copies  # all are on one device
    if copies is not None:
        copies.pin(shared)
    models: list[Callable[[object], object]] = []
    for part, memory in zip(parts, shared.split(lengths), strict=True):
        crossings = Crossings(memory, siblings.partition, spec.partitions, part.slots, copies=copies)
        models.append(PartitionModel(part, SplitCompute(siblings, part, crossings), calls))
    return SplitModels(models, [one.split for one in held], held[0].output == siblings.partition)


class _Held(NamedTuple):
    """What a partition has of a model."""

    program: HomeProgram
    way: HomeSchedule
    split: str
    output: int
    """The partition that has the output."""


def _load(spec: PredictionSpec, run: str, named: str | None, inputs: object) -> _Held:
    """Split a model, and load this partition's part of it."""
    home, device = roles.partition_of(spec.role), placed(spec.device, spec.number)
    task, seed, values = find(Path(run), None, named)
    model = build_on_disk(task, seed).model.eval()
    layout = layout_of(model)
    for parameter in model.parameters():  # frozen ones are as good as others here: a partition may have them alone
        parameter.requires_grad_(parameter.is_floating_point())
    if isinstance(values, ModelFile):
        fill(model, values)
    try:
        traced = trace(model, (inputs,))
        split = Split.parse(spec.split, spec.partitions, own=task.split)
        if split.ways == AUTO:  # batches follow each other through the partitions as microbatches do
            many = IN_HAND * PORTION_BATCHES
            split = choose(split, traced, model, None, None, EXAMPLES, many * spec.batch_size, "gpipe", many).split
        graph = apply(split, traced, None, None)
    except UsageError as error:
        raise UsageError(f"the model of {run}: {error}") from error
    program = build(graph, home, model, device)
    if isinstance(values, Path):
        program.module.load_state_dict(load_weights(values, layout, program.pieces))
    [output] = graph.outputs
    return _Held(program, home_schedule(graph, Settings(), home), split.text, output)


class AnsweringPart(ModelPart):
    """One partition's part of a model that predicts."""

    def __init__(self, program: HomeProgram, way: HomeSchedule, batch_size: int) -> None:
        super().__init__(program, way, batch_size)
        for layer in program.layers:
            layer.eval()
        self.inputs: object = None
        """Of the samples that are computed next."""
        self.output: object = None
        """Of those that were last, where it is here."""

    def play(self, _: Batch) -> Generator[HomeEffect, torch.Tensor | None, Computed]:
        """Its part of one answer."""
        microbatches = cut_minibatch((self.inputs,), None, 1)
        self.samples = [microbatches[0].given["samples"]]
        result = yield from step(self.program, microbatches, [HomeTask(Pass.FORWARD, 0)])
        [self.output] = result.outputs
        return Computed(None, self.samples[0], 0.0)


class _WakePipes:
    """Wakes partitions: each sleeps at a pipe of its own, which the asking process holds."""

    def __init__(self, spec: PredictionSpec) -> None:
        everybody = roles.partitions_of(spec.role, spec.partitions)
        self._pipes = {
            role: os.open(f"/proc/{spec.supervisor}/fd/{pipe}", os.O_RDWR)
            for role, pipe in zip(everybody, spec.pipes, strict=True)
        }
        self._own = self._pipes[spec.role]

    def wake(self, role: str) -> None:
        """Have one look again whether it can go on: now, or as soon as it sleeps."""
        os.write(self._pipes[role], b"\0")

    def sleep(self) -> None:
        """Until one of the others calls."""
        os.read(self._own, WAKES)


def _wait() -> Steps[None]:
    yield RECEIVE


def _shared(spec: PredictionSpec, length: int) -> torch.Tensor:
    """So many bytes that the partitions of this replica share; all of them ask for the same."""
    os.truncate(f"/proc/{spec.supervisor}/fd/{spec.memory}", length)
    return torch.frombuffer(map_memory(spec.supervisor, spec.memory), dtype=torch.uint8)
