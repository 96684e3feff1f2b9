"""Partition of a split model in its process, and the whole model on what all of them hold."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.records import Parted
from distbelief.core.settings import Settings
from distbelief.errors import DataError, DistbeliefError, LocalProtocolError, TrainingError
from distbelief.fabric.pinned import DeviceCopies
from distbelief.replica.home_part import HomeSchedule, ModelPart, home_schedule
from distbelief.schedules.pipeline import Pass
from distbelief.sharding.assignments import check_shards
from distbelief.split.choosing import choose
from distbelief.split.graph import SplitGraph, Transfer
from distbelief.split.options import AUTO, Split, SplitSteps
from distbelief.split.plan import apply
from distbelief.split.play import Give, HomeEffect, Passes, RunSegment, Take, cut_minibatch, step
from distbelief.split.program import HomeProgram, Received, Segment, build
from distbelief.split.tracing import examples, trace
from distbelief.tasks import Task
from distbelief.tasks.decay import groups_of
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.on_disk import build_on_disk
from distbelief.tasks.order import Order, key, seed_chance
from distbelief.tasks.task import as_data
from distbelief.tasks.worker import load, on_device, raised_at

NOTHING = torch.empty(0)

STREAM = 8
"""Batches of samples to be answered that follow each other through the partitions, as their split is priced."""
Tell = Callable[[Parted], None]
"""Is told how a model is split, and what that is worth."""


def split_graph(
    task: Task, model: nn.Module, settings: Settings, tell: Tell | None = None, inputs: object = None
) -> SplitGraph:
    """The model of a task, split as the settings say; where an example of its inputs is given, without a loss.

    Raises:
        UsageError: it cannot be split so.
    """
    loss, targets = None, None
    if inputs is None:
        data, device, loss = as_data(task.train()), next(model.parameters()).device, task.loss
        inputs, targets = (on_device(part, device) for part in data.batch(examples(len(data))))
    traced = trace(model, (inputs,))
    split = Split.parse(settings.split, settings.partitions, settings.chunks, task.split)
    if split.ways == AUTO or tell:
        steps = SplitSteps(
            batch_size=settings.batch_size, schedule=settings.pipeline, microbatches=settings.microbatches
        )
        choice = choose(split, traced, model, loss, targets, steps)
        split = choice.split
        if tell:
            tell(Parted(split.text, choice.told + traced.told))
    return apply(split, traced, loss, targets)


def check_model(task: Task, settings: Settings) -> None:
    """Refuse a split that the model of a task cannot have, and more shards than it has parameters, before anybody has
    built it.

    It is made without values, which takes no time that grows with it. Where that fails the model is built, as it may
    need its values to be built or traced; what else is wrong with it, its replicas tell.

    Raises:
        UsageError: it cannot be so: with the reason.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                model = task.model()
            _check_model(task, model, settings)
        except Exception:  # whatever a model raises that has no values
            with contextlib.suppress(DataError, TrainingError):
                model = build_on_disk(task, settings.seed).model
                layout_of(model)  # refuses what cannot be trained, split or not
                _check_model(task, model, settings)


def _check_model(task: Task, model: nn.Module, settings: Settings) -> None:
    check_shards(settings.shards, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    if settings.partitions > 1:
        home_schedule(split_graph(task, model, settings), settings, 0)


def part_of(
    graph: SplitGraph,
    model: nn.Module,
    settings: Settings,
    role: str,
    rows: bool,
    device: torch.device | None = None,
) -> tuple[FlatModule, HomeProgram]:
    """Return what a partition holds of a model, and what it computes.

    Args:
        graph: of the model, or of one like it.
        model: whole, with its initial parameters.
        settings: of the job.
        role: the partition.
        rows: whether sparse gradients may stay so.
        device: where the partition computes, to which its part alone is moved; where the model is, if None.
    """
    home = roles.partition_of(role)
    layout = layout_of(model, groups_of(model, settings.optimizer), graph.pieces)
    program = build(graph, home, model, device)
    return FlatModule(program.module, rows=rows, layout=layout, home=home), program


def programs(graph: SplitGraph, model: nn.Module, settings: Settings) -> list[tuple[HomeProgram, HomeSchedule]]:
    """Return what each partition computes of a model, and how minibatches go through it."""
    return [(build(graph, home, model), home_schedule(graph, settings, home)) for home in range(settings.partitions)]


class PhantomPartition:
    """One home's part of each step, in which nothing is computed; what crosses has its length.

    Args:
        program: of the home.
        way: how minibatches go through it.
        samples: in the training set.
        batch_size: of the job.
        clock: says how long a step takes.
    """

    slots: Sequence[int] = ()
    copies: DeviceCopies | None = None

    def __init__(
        self, program: HomeProgram, way: HomeSchedule, samples: int, batch_size: int, clock: Callable[[], float]
    ) -> None:
        self._program, self._way, self._all, self._batch_size = program, way, samples, batch_size
        self._clock = clock
        self.samples: list[int] = []
        self._passes = {Pass.FORWARD: self._forward, Pass.BACKWARD: self._backward}

    def play(self, batch: Batch) -> Generator[HomeEffect, object, Computed]:
        """Its part of a step."""
        begun = self._clock()
        samples = min(self._batch_size, self._all - batch.index * self._batch_size)
        self.samples = self._way.sizes(samples)
        for direction, number in self._way.order(len(self.samples)):
            yield from self._passes[direction](number)
        return Computed(None, samples, self._clock() - begun)

    def _forward(self, number: int) -> Iterator[HomeEffect]:
        for segment, new in self._begun:
            for one in new:
                yield Take(one, number, Pass.FORWARD)
            yield RunSegment(segment, number, Pass.FORWARD)
            for given in segment.gives:
                for one in given.transfers:
                    yield Give(one, number, Pass.FORWARD, NOTHING)

    def _backward(self, number: int) -> Iterator[HomeEffect]:
        for segment, new in reversed(self._begun):
            for given in segment.gives:
                for one in given.transfers:
                    if one.shape.differentiable:
                        yield Take(one, number, Pass.BACKWARD)
            yield RunSegment(segment, number, Pass.BACKWARD)
            for one in new:
                if one.shape.differentiable:
                    yield Give(one, number, Pass.BACKWARD, NOTHING)

    @functools.cached_property
    def _begun(self) -> list[tuple[Segment, list[Transfer]]]:
        """Each segment, with what no segment before it has taken."""
        here: set[Transfer] = set()
        begun = []
        for segment in self._program.segments:
            taken = [one.transfer for one in segment.takes if isinstance(one, Received)]
            begun.append((segment, [one for one in taken if one not in here]))
            here |= {*taken}
        return begun

    def share(self, run: RunSegment) -> float:
        """Return the share of a step's work that a segment has for its microbatch."""
        return self._way.share(run, self._program, self.samples)

    def slot(self, asked: Give | Take) -> int:
        """Return which of all things that cross in a step it is."""
        raise LocalProtocolError(f"{asked} has no bytes")

    def size(self, asked: Give | Take) -> int:
        """Return how many bytes cross."""
        return asked.transfer.shape.bytes(self.samples[asked.microbatch])

    def encode(self, given: Give) -> None:
        """Nothing is computed."""

    def shape(self, asked: Give | Take) -> tuple[int, ...]:
        """Return the shape of what would cross."""
        return asked.transfer.shape.at(self.samples[asked.microbatch])

    def decode(self, wanted: Take, data: bytearray) -> None:
        """Nothing has crossed."""


class PartitionTrainer(ModelPart):
    """Computes one home's part of the gradient of one minibatch after another.

    Args:
        task: whose training set and loss are used.
        program: of the home.
        settings: of the job.
        graph: of the model.
        clock: says how long a step takes.
    """

    def __init__(
        self,
        task: Task,
        program: HomeProgram,
        settings: Settings,
        graph: SplitGraph,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(program, home_schedule(graph, settings, program.home), settings.batch_size)
        self._task, self._clock = task, clock
        self._data = load(task, "training")
        self._seed, self._batch_size = settings.seed, settings.batch_size
        self._order = Order.of(settings, len(self._data), self._data)

    def play(self, batch: Batch) -> Generator[HomeEffect, torch.Tensor | None, Computed]:
        """Its part of a step.

        Raises:
            TrainingError: the user's model or loss raised.
        """
        begun = self._clock()
        for parameter in self.parameters:
            parameter.grad = None
        try:
            # what data draw is the same at every partition; what nodes draw has keys of its own
            seed_chance(self._seed, batch.epoch, batch.index)
            numbers = self._order.indices(batch.epoch, batch.index)
            inputs, targets = (on_device(one, self.device) for one in self._data.batch(numbers))
            self.samples = self.way.sizes(len(numbers))
            count, chance = len(self.samples), key(self._seed, batch.epoch, batch.index)
            cut = cut_minibatch((inputs,), targets, count, chance)
            result = yield from step(self.program, cut, self.way.order(count))
        except DistbeliefError:
            raise
        except (Exception, SystemExit) as error:
            raise raised_at(self._task, batch, error, f", partition {self.program.home}") from error
        return Computed(result.loss, len(numbers), self._clock() - begun)


class AnsweringPart(ModelPart):
    """One partition's part of a model that answers, and is not trained.

    Args:
        program: of the partition.
        way: how batches go through it.
        batch_size: most samples of a batch.
        split: text of the model's split.
        last: the partition that has the output.
    """

    def __init__(self, program: HomeProgram, way: HomeSchedule, batch_size: int, split: str, last: int) -> None:
        super().__init__(program, way, batch_size)
        self.split, self.last = split, last
        self.inputs: object = None
        """Inputs of the batch that is computed next."""
        self.output: object = None
        """Output of the last one, at the partition that has it."""
        for layer in program.layers:
            layer.eval()

    def play(self, _: Batch) -> Generator[HomeEffect, torch.Tensor | None, Computed]:
        """Its part of one answer."""
        [batch] = cut_minibatch((self.inputs,), None, 1)
        self.samples = [batch.given["samples"]]
        _, self.output = yield from Passes(self.program).forward(0, batch)
        return Computed(None, self.samples[0], 0.0)


def answering_part(
    task: Task, model: nn.Module, settings: Settings, role: str, inputs: object, device: torch.device
) -> AnsweringPart:
    """The part of a model that a partition answers with; its parameters have the model's values.

    Args:
        task: of the model.
        model: whole, on the host.
        settings: of the split; microbatches are the batches that follow each other, as they are priced.
        role: the partition.
        inputs: an example for the model.
        device: where the partition computes, to which its part alone is moved.

    Raises:
        UsageError: it cannot be split so.
    """
    # a partition may have frozen parameters alone, which are as good as others here
    for parameter in model.eval().parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    graph = split_graph(task, model, settings, inputs=inputs)
    program = build(graph, home := roles.partition_of(role), model, device)
    batch_size, [last] = settings.batch_size // settings.microbatches, graph.outputs
    return AnsweringPart(program, home_schedule(graph, Settings(), home), batch_size, graph.text, last)
