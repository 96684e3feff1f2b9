"""What a process holds and computes of a split model, and the whole model on what all of them hold."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.settings import Settings
from distbelief.errors import DistbeliefError, LocalProtocolError
from distbelief.schedules.pipeline import Pass
from distbelief.split.choosing import choose
from distbelief.split.graph import SplitGraph, Transfer
from distbelief.split.options import AUTO, Split
from distbelief.split.plan import apply
from distbelief.split.play import Give, HomeEffect, RunSegment, Take, cut_minibatch, step
from distbelief.split.program import HomeProgram, Received, build
from distbelief.split.tracing import trace
from distbelief.tasks import Task
from distbelief.tasks.decay import groups_of
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.order import Order, key, seed_chance
from distbelief.tasks.task import as_data
from distbelief.tasks.worker import load, on_device, raised_at

EXAMPLES = 2
"""Samples that a model is traced with."""
WAYS = (Pass.FORWARD, Pass.BACKWARD)
NOTHING = torch.empty(0)
BACKWARD = 2.0
"""Of the work of a forward pass, that of the backward pass."""


def split_graph(task: Task, model: nn.Module, settings: Settings) -> SplitGraph:
    """The model of a task, split as the settings say.

    Raises:
        UsageError: it cannot be split so.
    """
    inputs, targets = as_data(task.train()).batch(torch.arange(EXAMPLES))
    device = next(model.parameters()).device
    traced = trace(model, (on_device(inputs, device),))
    split, targets = Split.parse(settings.split, settings.partitions), on_device(targets, device)
    if split.ways == AUTO:
        split = choose(split, traced, model, task.loss, targets, EXAMPLES, settings.data.batch_size).split
    return apply(split, traced, task.loss, targets)


def partition(
    task: Task, model: nn.Module, settings: Settings, role: str, rows: bool
) -> tuple[FlatModule, PartitionTrainer]:
    """What a partition holds of a model, and how it computes with that.

    Args:
        task: with its training set.
        model: whole, with its initial parameters.
        settings: of the job.
        role: the partition.
        rows: whether sparse gradients may stay so.
    """
    home, graph = roles.partition_of(role), split_graph(task, model, settings)
    layout = layout_of(model, groups_of(model, settings.optimizer), graph.pieces)
    program = build(graph, home, model)
    flat = FlatModule(program.module, rows=rows, layout=layout, home=home)
    return flat, PartitionTrainer(task, program, settings, crossing(graph))


def crossing(graph: SplitGraph) -> list[Transfer]:
    """What crosses between the homes of a split model, in an order that all of them know."""
    return sorted(graph.transfers.values(), key=lambda one: one.number)


def programs(task: Task, model: nn.Module, settings: Settings) -> list[HomeProgram]:
    """What each partition computes of a model."""
    graph = split_graph(task, model, settings)
    return [build(graph, home, model) for home in range(settings.partitions)]


def whole_of_split(task: Task, model: nn.Module, settings: Settings, rows: bool) -> FlatModule:
    """The whole model, on vectors of the layout that the partitions of a job have; of its own, where none is split."""
    groups = groups_of(model, settings.optimizer)
    if settings.partitions == 1:
        return FlatModule(model, groups, rows)
    return FlatModule(model, rows=rows, layout=layout_of(model, groups, split_graph(task, model, settings).pieces))


def share_of(run: RunSegment, program: HomeProgram) -> float:
    """Of the work of a step of the whole replica, that of a segment."""
    way = BACKWARD if run.direction is Pass.BACKWARD else 1.0
    return way * run.segment.flops / (max(program.work, 1) * (1 + BACKWARD))


class PhantomPartition:
    """One home's part of each step, in which nothing is computed; what crosses has its length.

    Args:
        program: of the home.
        samples: in the training set.
        batch_size: of the job.
    """

    slots: Sequence[int] = ()

    def __init__(self, program: HomeProgram, samples: int, batch_size: int) -> None:
        self._program, self._all, self._batch_size = program, samples, batch_size
        self._samples = 0

    def play(self, batch: Batch) -> Generator[HomeEffect, object, Computed]:
        """Its part of a step."""
        self._samples = min(self._batch_size, self._all - batch.index * self._batch_size)
        here: set[Transfer] = set()
        begins: dict[int, list[Transfer]] = {}
        for segment in self._program.segments:
            taken = [one.transfer for one in segment.takes if isinstance(one, Received)]
            new = begins[segment.number] = [one for one in taken if one not in here]
            here |= {*new}
            for one in new:
                yield Take(one, 0, Pass.FORWARD)
            yield RunSegment(segment, 0, Pass.FORWARD)
            for given in segment.gives:
                for one in given.transfers:
                    yield Give(one, 0, Pass.FORWARD, NOTHING)
        for segment in reversed(self._program.segments):
            for given in segment.gives:
                for one in given.transfers:
                    if one.shape.differentiable:
                        yield Take(one, 0, Pass.BACKWARD)
            yield RunSegment(segment, 0, Pass.BACKWARD)
            for one in begins[segment.number]:
                if one.shape.differentiable:
                    yield Give(one, 0, Pass.BACKWARD, NOTHING)
        return Computed(None, self._samples, 0.0)

    def share(self, run: RunSegment) -> float:
        """Of the work of a step, that of a segment."""
        return share_of(run, self._program)

    def slot(self, asked: Give | Take) -> int:
        """Which of all things that cross in a step it is."""
        raise LocalProtocolError(f"{asked} has no bytes")

    def size(self, asked: Give | Take) -> int:
        """How many bytes cross."""
        return asked.transfer.shape.bytes(self._samples)

    def encode(self, given: Give) -> None:
        """Nothing is computed."""

    def shape(self, asked: Give | Take) -> tuple[int, ...]:
        """Of what would cross."""
        return asked.transfer.shape.at(self._samples)

    def decode(self, wanted: Take, data: bytearray) -> None:
        """Nothing has crossed."""

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where it is."""
        return tensor


class PartitionTrainer:
    """Computes one home's part of the gradient of one minibatch after another.

    Args:
        task: whose training set and loss are used.
        program: of the home.
        settings: of the job.
        transfers: all that crosses between the homes.
    """

    def __init__(self, task: Task, program: HomeProgram, settings: Settings, transfers: Sequence[Transfer]) -> None:
        self._task, self._program = task, program
        self._numbers = {one: number for number, one in enumerate(transfers)}
        self.slots = [one.shape.bytes(settings.data.batch_size) for one in transfers for _ in WAYS]
        """Bytes of each thing that crosses, at most."""
        self._data = load(task, "training")
        self._seed, self._batch_size = settings.seed, settings.data.batch_size
        self._order = Order(len(self._data), self._batch_size, settings.seed)
        self._parameters = [one for one in program.module.parameters() if one.requires_grad]
        self._device = next((one.device for one in self._parameters), torch.device("cpu"))
        self._samples: list[int] = []
        """Of each microbatch of the step."""
        for layer in program.layers:
            layer.train()

    def play(self, batch: Batch) -> Generator[HomeEffect, torch.Tensor | None, Computed]:
        """Its part of a step.

        Raises:
            TrainingError: the user's model or loss raised.
        """
        begun = time.perf_counter()
        for parameter in self._parameters:
            parameter.grad = None
        try:
            # what data draw is the same at every partition; what nodes draw has keys of its own
            seed_chance(self._seed, batch.epoch, batch.index)
            numbers = self._order.indices(batch.epoch, batch.index)
            inputs, targets = (on_device(one, self._device) for one in self._data.batch(numbers))
            cut = cut_minibatch((inputs,), targets, 1, key(self._seed, batch.epoch, batch.index))
            self._samples = [one.given["samples"] for one in cut]
            result = yield from step(self._program, cut)
        except DistbeliefError:
            raise
        except (Exception, SystemExit) as error:
            raise raised_at(self._task, batch, error, f", partition {self._program.home}") from error
        return Computed(result.loss, len(numbers), time.perf_counter() - begun)

    def share(self, run: RunSegment) -> float:
        """Of the work of a step, that of a segment."""
        return share_of(run, self._program)

    def slot(self, asked: Give | Take) -> int:
        """Which of all things that cross in a step it is."""
        return len(WAYS) * self._numbers[asked.transfer] + WAYS.index(asked.direction)

    def size(self, asked: Give | Take) -> int:
        """How many bytes cross."""
        return asked.transfer.shape.bytes(self._samples[asked.microbatch])

    def encode(self, given: Give) -> torch.Tensor:
        """What crosses, in host memory."""
        return given.tensor.cpu()

    def shape(self, asked: Give | Take) -> tuple[int, ...]:
        """Of what crosses."""
        return asked.transfer.shape.at(self._samples[asked.microbatch])

    def decode(self, wanted: Take, data: bytearray) -> torch.Tensor:
        """The tensor that has crossed, of its bytes."""
        dtype = wanted.transfer.shape.dtype
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self.placed(flat.reshape(self.shape(wanted)))

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """What has crossed, where this partition computes."""
        return tensor.to(self._device)
