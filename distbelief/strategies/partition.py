"""Partitions of split models: how a model is split, and what one partition computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.records import Parted
from distbelief.core.settings import Settings
from distbelief.errors import DataError, DistbeliefError, TrainingError
from distbelief.replica.split_compute import ModelPart, Part
from distbelief.schedules.pipeline import Action, Pass, SegmentTask
from distbelief.sharding.assignments import check_shards
from distbelief.split.graph import SplitGraph
from distbelief.split.options import Split, SplitSteps
from distbelief.split.plan import choose
from distbelief.split.play import cut_minibatch
from distbelief.split.program import PartitionProgram, SplitProgram, build
from distbelief.split.tracing import examples, trace
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.on_disk import build_on_disk
from distbelief.tasks.order import Order, key, seed_chance
from distbelief.tasks.sparse import groups_of
from distbelief.tasks.task import as_data
from distbelief.tasks.worker import load, on_device, raised_at

STREAM = 8
"""Batches in flight through the partitions when a split model answers; its split is priced for so many."""
Tell = Callable[[Parted], None]
"""Takes the record of how a model is split, and what that gains."""


def split_graph(
    task: Task, model: nn.Module, settings: Settings, tell: Tell | None = None, inputs: object = None
) -> SplitGraph:
    """Return the graph of a task's model, split as the settings say.

    An example of the model's `inputs` replaces the task's data and loss. A model that cannot be split so raises a
    `UsageError`.
    """
    loss, targets = None, None
    if inputs is None:
        data, device, loss = as_data(task.train()), next(model.parameters()).device, task.loss
        inputs, targets = (on_device(part, device) for part in data.batch(examples(len(data))))
    traced = trace(model, (inputs,))
    split = Split.parse(settings.split, settings.partitions, settings.chunks, task.split)
    steps = SplitSteps(batch_size=settings.batch_size, schedule=settings.pipeline, microbatches=settings.microbatches)
    choice = choose(split, traced, loss, targets, steps)
    if tell:
        tell(Parted(choice.split.text, choice.told + traced.told))
    return choice.graph


def check_model(task: Task, settings: Settings) -> None:
    """Refuse, before any process builds the model, a split that it cannot have, or more shards than parameters."""
    # A model on the meta device takes no time that grows with its size. Where building or tracing needs values, that
    # fails, and the model is built with them. Other faults of the model are left to its replicas to report.
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                model = task.model()
            _check_model(task, model, settings)
        except Exception:  # a model without values may raise any error
            with contextlib.suppress(DataError, TrainingError):
                model = build_on_disk(task, settings.seed).model
                layout_of(model)  # this refuses a model that cannot be trained at all
                _check_model(task, model, settings)


def _check_model(task: Task, model: nn.Module, settings: Settings) -> None:
    check_shards(settings.shards, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    if settings.partitions > 1:
        split_graph(task, model, settings)


def part_of(
    graph: SplitGraph,
    model: nn.Module,
    settings: Settings,
    role: str,
    rows: bool,
    device: torch.device | None = None,
) -> tuple[FlatModule, PartitionProgram]:
    """Return a partition's parameters and its program.

    `model` is the whole model, with its initial parameters. `graph` is of this model, or of an equal one. With `rows`,
    sparse gradients may stay sparse. Only the partition's part moves to `device`; None leaves it on the model's device.
    """
    partition = roles.partition_of(role)
    layout = layout_of(model, groups_of(model, settings.gradient_optimizer), graph.pieces)
    program = build(graph, partition, model, device)
    return FlatModule(program.module, rows=rows, layout=layout, partition=partition), program


class PhantomPart(Part):
    """One partition's part of each step, where nothing is computed.

    Args:
        samples: number of samples in the training set.
        clock: measures the length of a step.
    """

    def __init__(
        self, split: SplitProgram, partition: int, settings: Settings, samples: int, clock: Callable[[], float]
    ) -> None:
        super().__init__(split, partition, settings, settings.batch_size)
        self._all, self._clock, self._begun = samples, clock, 0.0

    def begin(self, batch: Batch) -> None:
        self._begun = self._clock()
        self.cut(min(self.batch_size, self._all - batch.index * self.batch_size))

    def end(self) -> Computed:
        return Computed(None, sum(self.samples), self._clock() - self._begun)


class PartitionTrainer(ModelPart):
    """One partition's part of each minibatch's gradient."""

    def __init__(
        self,
        task: Task,
        program: PartitionProgram,
        settings: Settings,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(program, settings, settings.batch_size)
        self._task, self._clock = task, clock
        self._data = load(task, "training")
        self._seed = settings.seed
        self._order = Order.of(settings, len(self._data), self._data)
        self._batch, self._begun = Batch(0, 0), 0.0

    def begin(self, batch: Batch) -> None:
        self._batch, self._begun = batch, self._clock()
        for parameter in self.parameters:
            parameter.grad = None
        with self._blamed():
            # all partitions draw the same data; nodes that draw have their own keys
            seed_chance(self._seed, batch.epoch, batch.index)
            numbers = self._order.indices(batch.epoch, batch.index)
            inputs, targets = (on_device(tensor, self.device) for tensor in self._data.batch(numbers))
            count = len(self.cut(len(numbers)))
            self.compute(cut_minibatch((inputs,), targets, count, key(self._seed, batch.epoch, batch.index)))

    def run(self, task: SegmentTask) -> None:
        with self._blamed():
            super().run(task)

    def end(self) -> Computed:
        return Computed(self.passes.loss, sum(self.samples), self._clock() - self._begun)

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except DistbeliefError:
            raise
        except (Exception, SystemExit) as error:
            raise raised_at(self._task, self._batch, error, f", partition {self.partition}") from error


class AnsweringPart(ModelPart):
    """One partition's part of a model that answers and is not trained.

    Args:
        split: how the model is split, as text.
        last: the partition that has the output.
    """

    def __init__(self, program: PartitionProgram, batch_size: int, split: str, last: int) -> None:
        super().__init__(program, Settings(), batch_size)
        self.text, self.last = split, last
        self.inputs: object = None
        """Inputs of the next batch."""
        for layer in program.layers:
            layer.eval()

    @property
    def output(self) -> object:
        """Output of the last batch, at the partition that has it."""
        return self.passes.outputs[0]

    def actions(self, direction: Pass | None = None) -> Sequence[Action]:
        return super().actions(Pass.FORWARD)

    def begin(self, _: Batch) -> None:
        [batch] = self.compute(cut_minibatch((self.inputs,), None, 1)).batches
        self.cut(batch.supplied["samples"])

    def end(self) -> Computed:
        return Computed(None, sum(self.samples), 0.0)


def answering_part(
    task: Task, model: nn.Module, settings: Settings, role: str, inputs: object, device: torch.device
) -> AnsweringPart:
    """Return one partition of a model that answers.

    `model` is the whole model on the host, with the values to answer with. Only the partition's part moves to `device`.
    `inputs` are an example of the model's. The split is priced for as many batches in flight as there are microbatches.
    """
    # a partition may have only frozen parameters: here these need gradients too
    for parameter in model.eval().parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    graph = split_graph(task, model, settings, inputs=inputs)
    program = build(graph, roles.partition_of(role), model, device)
    batch_size, [last] = settings.batch_size // settings.microbatches, graph.outputs
    return AnsweringPart(program, batch_size, graph.text, last)
