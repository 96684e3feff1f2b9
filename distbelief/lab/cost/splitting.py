"""Costs of a split model: memory, computing and bytes of each partition, the step that follows, and whether it pays.

All partitions are played in this process, turn by turn, and each segment is timed; the price of their schedule is the
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from torch import nn

from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.lab.cost import updates
from distbelief.lab.cost.options import SplitRequest
from distbelief.lab.cost.profile import busy_notes, clock_of
from distbelief.lab.cost.turns import Turns
from distbelief.places.evaluate import threads
from distbelief.record import limits
from distbelief.schedules.pipeline import Pipeline, pipeline
from distbelief.schedules.pipeline_price import PipelinePrice, price_pipeline
from distbelief.schedules.price import LinkModel
from distbelief.split.choosing import choose
from distbelief.split.graph import SplitGraph, TransferKind
from distbelief.split.options import Split
from distbelief.split.program import PartitionProgram, build
from distbelief.split.tracing import examples, trace
from distbelief.tasks.on_disk import build_on_disk
from distbelief.tasks.task import Task
from distbelief.tasks.worker import build_model, load, on_device, placed, with_data

LINE = LinkModel(50e-6, 1.25e9)
"""Between two partitions, where nothing is said of it."""
PARAMETERS, GRADIENTS, STATE, KEPT = "parameters", "gradients", "optimizer state", "kept and received"
KINDS = (PARAMETERS, GRADIENTS, STATE, KEPT)
"""Kinds of a partition's memory: buffers are among the parameters; kept is what its backward pass needs, with what lies
in slots.
"""


class ModulePlacement(msgspec.Struct, frozen=True):
    """Part of a module at a partition."""

    module: str
    partition: int
    parameters: int
    """Elements."""
    operations: int
    """Floating-point operations, forward, of a sample."""
    sends: int
    """Bytes of a sample that leave this partition, forward."""
    tensors: int
    """Bytes of parameters that leave it in each microbatch, because another partition needs them."""


class PartitionCost(msgspec.Struct, frozen=True):
    """Costs of a partition in a step, and its memory."""

    partition: int
    parameters: int
    memory: dict[str, int]
    """Bytes, by kind."""
    computes: float
    """Seconds, forward and back."""
    waits: float
    """Seconds of a step in which it does neither."""
    update: float
    """Seconds."""
    messages: int
    """That leave it in a step, either way."""
    sent: int
    """Their bytes."""


class SplitGuess(msgspec.Struct, frozen=True):
    """A way to split, by a guess from its operations."""

    split: str
    speedup: float | None
    """How many times as fast as in one process; None where it cannot be."""
    reason: str = ""
    """Why it cannot be."""


class WholeStep(msgspec.Struct, frozen=True):
    """The same step in one process with one thread."""

    gathers: float
    """Seconds of gathering a minibatch, which each partition does too."""
    computes: float
    update: float
    memory: dict[str, int]

    @property
    def step(self) -> float:
        """Seconds."""
        return self.gathers + self.computes + self.update


class SplitCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of a split model costs; seconds and bytes."""

    task: str
    split: Split
    traced: str
    """By what."""
    batch_size: int
    schedule: str
    microbatches: int
    placements: list[ModulePlacement]
    partition_costs: list[PartitionCost]
    whole: WholeStep
    step: float
    """Predicted, of a process with a core of its own for each partition."""
    sending: float
    """Seconds of it that it would be shorter by, if what crosses took no time."""
    crossings: list[Json]
    """Crossings of a step, forward: the two ends of each, its value, the module that gives it, bytes of a sample."""
    ways: list[SplitGuess]
    """What was chosen from, the best first; only the one that was named, where one was."""
    notes: list[str] = []

    @property
    def speedup(self) -> float:
        """How many times as fast as in one process."""
        return self.whole.step / self.step

    @property
    def largest(self) -> int:
        """Bytes that the largest partition holds."""
        return max(sum(partition.memory.values()) for partition in self.partition_costs)

    @property
    def share(self) -> float:
        """Return the memory of the largest partition, over that of one process."""
        return self.largest / sum(self.whole.memory.values())

    @property
    def verdict(self) -> str:
        """Whether it pays, with the numbers."""
        told = (
            f"a step takes {_told(self.step)} ms by this prediction, and {_told(self.whole.step)} ms in one process: "
            f"{self.speedup:.2f} times as fast"
        )
        held = f"the largest partition holds {self.share:.0%} of what one process holds"
        if self.speedup > 1:
            return f"splitting pays: {told}; {held}"
        return f"splitting does not pay in time: {told}; {held}, and that is what it may be for"

    def as_json(self) -> Json:
        """All that is shown."""
        fields: Json = msgspec.to_builtins(self)
        split = {"split": self.split.text, "partitions": self.split.partitions, "chunks": self.split.chunks}
        return {**fields, **split, "speedup": self.speedup, "share": self.share, "verdict": self.verdict}


class SplitMeasurement(NamedTuple):
    """A split task."""

    cost: SplitCost
    programs: list[PartitionProgram]
    steps: Pipeline
    """In which order they do what."""
    price: PipelinePrice
    """Of that."""


def _told(seconds: float) -> str:
    """In ms.

    >>> _told(1.0234), _told(0.001234)
    ('1,023', '1.23')
    """
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def measure(
    task: Task,
    split: Split,
    asked: SplitRequest,
    optimizer: Optimizer,
    link: LinkModel = LINE,
    told: Callable[[str], None] = lambda _: None,
) -> SplitMeasurement:
    """Measure what a step of a split task costs here, and predict what it takes when each partition has a process.

    Args:
        task: what is trained.
        split: how its model is split.
        asked: steps that are measured.
        optimizer: that steps.
        link: between any two partitions.
        told: is told what is measured.

    Raises:
        UsageError: the model cannot be split so.
        DataError: the task's data cannot be had.
    """
    batch_size, parts = asked.batch_size, asked.microbatches
    if batch_size < max(1, parts):
        raise UsageError(f"--batch-size {batch_size}: {parts} microbatches need a sample each")
    task = with_data(task, load(task, "training"))
    told("tracing the model")
    model = build_model(task, 0, asked.device).train()
    data = load(task, "training")
    inputs, targets = (on_device(one, placed(asked.device)) for one in data.batch(examples(len(data))))
    traced = trace(model, (inputs,))
    choice = choose(split, traced, task.loss, targets, asked)
    programs = [build(choice.graph, partition, model) for partition in range(choice.split.partitions)]
    made = pipeline(asked.algorithm, programs[0].split.graph, asked.microbatches)
    in_memory = (build_on_disk(task, 0).told + traced.told).removeprefix("; ")
    with threads(1):
        turns = Turns(task, model, programs, made, batch_size, clock_of(asked.device))
        turns.take(asked.seconds, told)
    told("updates")
    whole = WholeStep(*turns.whole(), *_held(model, optimizer, turns.kept, asked.device))
    held = [_held(program.module, optimizer, 0, asked.device) for program in programs]
    price = price_pipeline(made, turns.costs(), link, batch_size / parts)
    alone = price_pipeline(made, turns.costs())
    partitions = [
        _partition(program, made, price, own, batch_size) for program, own in zip(programs, held, strict=True)
    ]
    cost = SplitCost(
        task=task.reference,
        split=choice.split,
        traced="a list of modules" if traced.listed else "torch.fx",
        batch_size=batch_size,
        schedule=made.algorithm,
        microbatches=parts,
        placements=placements(choice.graph),
        crossings=_crossings(choice.graph),
        partition_costs=partitions,
        whole=whole,
        step=price.seconds + whole.gathers + max(partition.update for partition in partitions),
        sending=price.seconds - alone.seconds,
        ways=[
            SplitGuess(one.split.text, None if one.reason else choice.whole / one.seconds, one.reason)
            for one in choice.candidates
        ],
        notes=_notes(len(partitions), turns.busy, in_memory),
    )
    return SplitMeasurement(cost, programs, made, price)


def _notes(partitions: int, busy: float, in_memory: str) -> list[str]:
    """What is to be known of a prediction."""
    notes, cores = [in_memory] if in_memory else [], limits.cores()
    if cores < partitions:
        notes.append(f"this machine has {cores} cores: with {partitions} partitions on it, each has part of one")
    return notes + busy_notes(busy)


def _held(module: nn.Module, optimizer: Optimizer, kept: int, device: str) -> tuple[float, dict[str, int]]:
    """Seconds of an update, and the bytes of each kind that are held for a module."""
    trained = [one for one in module.parameters() if one.requires_grad]
    update = updates.measure(optimizer, max(1, sum(one.numel() for one in trained)), device)
    held = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
    return update.seconds, dict(zip(KINDS, (held, sum(one.nbytes for one in trained), update.state, kept), strict=True))


def _partition(
    program: PartitionProgram, made: Pipeline, price: PipelinePrice, held: tuple[float, dict[str, int]], batch_size: int
) -> PartitionCost:
    """Return the costs of a partition."""
    update, memory = held[0], {**held[1], KEPT: price.held[program.partition]}
    transfers = program.split.transfers
    sent = [one for one in transfers if one.source == program.partition]
    sent += [one for one in transfers if one.target == program.partition and one.shape.differentiable]
    samples = batch_size / made.microbatches
    parameters, busy = sum(one.numel() for one in program.module.parameters()), price.busy[program.partition]
    # the samples of a microbatch may be a mean
    size = round(made.microbatches * sum(one.shape.bytes(0) + samples * one.shape.bytes_more for one in sent))
    messages = made.microbatches * len(sent)
    return PartitionCost(program.partition, parameters, memory, busy, price.seconds - busy, update, messages, size)


def placements(graph: SplitGraph) -> list[ModulePlacement]:
    """Each module that has parameters, computes or sends something, at each partition where it does."""
    found: dict[tuple[str, int], list[int]] = {}

    def add(module: str, partition: int, column: int, amount: int) -> None:
        found.setdefault((module, partition), [0, 0, 0, 0])[column] += amount

    paths = {str(node.target): None for node in graph.traced.layers}
    for node, partition in graph.partition.items():
        add(node.meta["path"], partition, 1, node.meta["flops"] // graph.traced.samples)
    tensors = dict(graph.traced.model.named_parameters())
    for name, pieces in graph.pieces.items():
        if name in tensors:
            module = next((path for path in paths if name.startswith(f"{path}.")), name.rpartition(".")[0])
            for piece in pieces:
                shape = tensors[name].shape
                each = tensors[name].numel() // (shape[piece.dimension] if shape else 1)
                add(module, piece.partition, 0, each * (piece.stop - piece.start))
    for one in graph.transfers.values():
        whole = one.kind is TransferKind.TENSOR
        add(one.path, one.source, 3 if whole else 2, one.shape.bytes_each)
    paths = dict.fromkeys(node.meta["path"] for node in graph.traced.graph.nodes if "path" in node.meta)
    order = {path: number for number, path in enumerate(paths)}
    rows = sorted(found.items(), key=lambda row: (order.get(row[0][0], len(order)), row[0]))
    return [ModulePlacement(module, partition, *amounts) for (module, partition), amounts in rows if any(amounts)]


def _crossings(graph: SplitGraph) -> list[Json]:
    """What crosses, in the order in which it does."""
    return [
        {
            "source": one.source,
            "target": one.target,
            "kind": one.kind.value,
            "module": one.path,
            "size": one.shape.bytes_each,
            "back": one.shape.differentiable,
        }
        for one in graph.transfers.values()
    ]
