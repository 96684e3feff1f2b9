"""Cost of a split model: memory, work and traffic of each partition, the predicted step, and whether splitting pays.

All partitions run in turn in this process, with each segment timed; the price of their schedule predicts the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.lab import number
from distbelief.lab.cost.options import SplitRequest
from distbelief.lab.cost.profile import StepClock, busy_notes, clock_of, measure_update
from distbelief.places.evaluate import threads
from distbelief.record import limits
from distbelief.schedules.pipeline import Crossing, Pass, Pipeline, SegmentTask, pipeline
from distbelief.schedules.pipeline_price import PipelinePrice, SegmentCost, price_pipeline
from distbelief.schedules.price import LinkModel
from distbelief.split.graph import SplitGraph, TransferKind
from distbelief.split.options import Split
from distbelief.split.plan import choose
from distbelief.split.play import Microbatch, Passes, cut_minibatch, play
from distbelief.split.program import PartitionProgram, build
from distbelief.split.tracing import examples, trace
from distbelief.tasks.on_disk import build_on_disk
from distbelief.tasks.task import Task
from distbelief.tasks.worker import build_model, load, on_device, placed, with_data

LINE = LinkModel(50e-6, 1.25e9)
"""Default link between two partitions."""
PARAMETERS, GRADIENTS, STATE, KEPT = "parameters", "gradients", "optimizer state", "kept and received"
KINDS = (PARAMETERS, GRADIENTS, STATE, KEPT)
"""Kinds of a partition's memory.

Parameters include buffers. Kept is what its backward pass needs, with the contents of slots.
"""


class ModulePlacement(msgspec.Struct, frozen=True):
    """Part of a module on one partition."""

    module: str
    partition: int
    parameters: int
    operations: int
    sends: int
    """Bytes of a sample that leave this partition in the forward pass."""
    tensors: int
    """Bytes of parameters that leave it with each microbatch, for other partitions."""


class PartitionCost(msgspec.Struct, frozen=True):
    """Seconds, messages, bytes and memory of a partition in a step."""

    partition: int
    parameters: int
    memory: dict[str, int]
    computes: float
    waits: float
    update: float
    messages: int
    sent: int


class SplitGuess(msgspec.Struct, frozen=True):
    """Way to split, with a speed estimated from its operations."""

    split: str
    speedup: float | None
    """Speed relative to one process; None if this split is impossible."""
    reason: str = ""


class WholeStep(msgspec.Struct, frozen=True):
    """Step of the whole model in one process with one thread."""

    gathers: float
    """Seconds of gathering a minibatch, which each partition repeats."""
    computes: float
    update: float
    memory: dict[str, int]

    @property
    def step(self) -> float:
        """Return the seconds of the step."""
        return self.gathers + self.computes + self.update


class SplitCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a split model's step, in seconds and bytes."""

    task: str
    split: Split
    traced: str
    batch_size: int
    schedule: str
    microbatches: int
    placements: list[ModulePlacement]
    partition_costs: list[PartitionCost]
    whole: WholeStep
    step: float
    """Predicted seconds of a step whose partitions have a core each."""
    sending: float
    """Seconds that a step would save without the time of transfers."""
    crossings: list[Json]
    ways: list[SplitGuess]
    """Considered ways, the best first; only the named one, if one was named."""
    notes: list[str] = []

    @property
    def speedup(self) -> float:
        """Return the speed relative to one process."""
        return self.whole.step / self.step

    @property
    def largest(self) -> int:
        """Return the bytes of the largest partition."""
        return max(sum(partition.memory.values()) for partition in self.partition_costs)

    @property
    def share(self) -> float:
        """Return the memory of the largest partition relative to one process."""
        return self.largest / sum(self.whole.memory.values())

    @property
    def verdict(self) -> str:
        """Say whether splitting pays, with the numbers."""
        times = (
            f"a step takes {number(1e3 * self.step)} ms by this prediction, and {number(1e3 * self.whole.step)} ms in "
            f"one process: {self.speedup:.2f} times as fast"
        )
        held = f"the largest partition holds {self.share:.0%} of what one process holds"
        if self.speedup > 1:
            return f"splitting pays: {times}; {held}"
        return f"splitting does not pay in time: {times}; {held}, which may be the reason to split"

    def as_json(self) -> Json:
        """Return the fields of `--json`."""
        fields: Json = msgspec.to_builtins(self)
        split = {"split": self.split.text, "partitions": self.split.partitions, "chunks": self.split.chunks}
        return {**fields, **split, "speedup": self.speedup, "share": self.share, "verdict": self.verdict}


class SplitMeasurement(NamedTuple):
    """Measured split of a task."""

    cost: SplitCost
    programs: list[PartitionProgram]
    steps: Pipeline
    price: PipelinePrice


def measure(
    task: Task,
    split: Split,
    request: SplitRequest,
    optimizer: Optimizer,
    link: LinkModel = LINE,
    tell: Callable[[str], None] = lambda _: None,
) -> SplitMeasurement:
    """Measure the step of a split task here, and predict it with a process for each partition."""
    batch_size, parts = request.batch_size, request.microbatches
    if batch_size < max(1, parts):
        raise UsageError(f"--batch-size {batch_size}: {parts} microbatches need a sample each")
    task = with_data(task, load(task, "training"))
    tell("tracing the model")
    model = build_model(task, 0, request.device).train()
    data = load(task, "training")
    inputs, targets = (on_device(part, placed(request.device)) for part in data.batch(examples(len(data))))
    traced = trace(model, (inputs,))
    choice = choose(split, traced, task.loss, targets, request)
    programs = [build(choice.graph, partition, model) for partition in range(choice.split.partitions)]
    steps = pipeline(request.algorithm, programs[0].split.graph, request.microbatches)
    in_memory = (build_on_disk(task, 0).told + traced.told).removeprefix("; ")
    with threads(1):
        turns = Turns(task, model, programs, steps, batch_size, clock_of(request.device))
        turns.take(request.seconds, tell)
    tell("updates")
    whole = WholeStep(*turns.whole(), *_held(model, optimizer, turns.kept, request.device))
    held = [_held(program.module, optimizer, 0, request.device) for program in programs]
    price = price_pipeline(steps, turns.costs(), link, batch_size / parts)
    alone = price_pipeline(steps, turns.costs())
    partitions = [
        _partition(program, steps, price, memory, batch_size) for program, memory in zip(programs, held, strict=True)
    ]
    cost = SplitCost(
        task=task.reference,
        split=choice.split,
        traced="a list of modules" if traced.listed else "torch.fx",
        batch_size=batch_size,
        schedule=steps.algorithm,
        microbatches=parts,
        placements=placements(choice.graph),
        crossings=_crossings(choice.graph),
        partition_costs=partitions,
        whole=whole,
        step=price.seconds + whole.gathers + max(partition.update for partition in partitions),
        sending=price.seconds - alone.seconds,
        ways=[
            SplitGuess(way.split.text, None if way.reason else choice.whole / way.seconds, way.reason)
            for way in choice.candidates
        ],
        notes=_notes(len(partitions), turns.busy, in_memory),
    )
    return SplitMeasurement(cost, programs, steps, price)


def _notes(partitions: int, busy: float, in_memory: str) -> list[str]:
    notes, cores = [in_memory] if in_memory else [], limits.cores()
    if cores < partitions:
        notes.append(f"this machine has {cores} cores: with {partitions} partitions on it, each gets less than one")
    return notes + busy_notes(busy)


def _held(module: nn.Module, optimizer: Optimizer, kept: int, device: str) -> tuple[float, dict[str, int]]:
    """Return the seconds of a module's update, and the bytes that it holds by kind."""
    trained = [tensor for tensor in module.parameters() if tensor.requires_grad]
    update = measure_update(optimizer, max(1, sum(tensor.numel() for tensor in trained)), device)
    held = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return update.seconds, dict(
        zip(KINDS, (held, sum(tensor.nbytes for tensor in trained), update.state, kept), strict=True)
    )


def _partition(
    program: PartitionProgram,
    steps: Pipeline,
    price: PipelinePrice,
    held: tuple[float, dict[str, int]],
    batch_size: int,
) -> PartitionCost:
    update, memory = held[0], {**held[1], KEPT: price.held[program.partition]}
    transfers = program.split.transfers
    sent = [transfer for transfer in transfers if transfer.source == program.partition]
    sent += [
        transfer for transfer in transfers if transfer.target == program.partition and transfer.shape.differentiable
    ]
    samples = batch_size / steps.microbatches
    parameters, busy = sum(transfer.numel() for transfer in program.module.parameters()), price.busy[program.partition]
    # microbatches may differ by a sample
    size = round(
        steps.microbatches * sum(transfer.shape.bytes(0) + samples * transfer.shape.bytes_more for transfer in sent)
    )
    messages = steps.microbatches * len(sent)
    return PartitionCost(program.partition, parameters, memory, busy, price.seconds - busy, update, messages, size)


def placements(graph: SplitGraph) -> list[ModulePlacement]:
    """Return a row for each module that has parameters, computes or sends, at each of its partitions."""
    amounts: dict[tuple[str, int], list[int]] = {}

    def add(module: str, partition: int, column: int, amount: int) -> None:
        amounts.setdefault((module, partition), [0, 0, 0, 0])[column] += amount

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
    for transfer in graph.transfers.values():
        whole = transfer.kind is TransferKind.TENSOR
        add(transfer.path, transfer.source, 3 if whole else 2, transfer.shape.bytes_each)
    paths = dict.fromkeys(node.meta["path"] for node in graph.traced.graph.nodes if "path" in node.meta)
    order = {path: number for number, path in enumerate(paths)}
    rows = sorted(amounts.items(), key=lambda row: (order.get(row[0][0], len(order)), row[0]))
    return [ModulePlacement(module, partition, *amounts) for (module, partition), amounts in rows if any(amounts)]


def _crossings(graph: SplitGraph) -> list[Json]:
    return [
        {
            "source": transfer.source,
            "target": transfer.target,
            "kind": transfer.kind.value,
            "module": transfer.path,
            "size": transfer.shape.bytes_each,
            "back": transfer.shape.differentiable,
        }
        for transfer in graph.transfers.values()
    ]


LEAST_ROUNDS, MOST_ROUNDS = 3, 60
"""Least and most rounds, after an untimed first one."""


class Ran(NamedTuple):
    """Segment in one direction."""

    partition: int
    segment: int
    direction: Pass


class Turns:
    """Alternating steps of a whole model and of the same model split, on one minibatch."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        programs: Sequence[PartitionProgram],
        steps: Pipeline,
        batch_size: int,
        clock: StepClock,
    ) -> None:
        self._task, self._model, self._programs, self._steps = task, model, programs, steps
        self._data, self._clock, self._device = load(task, "training"), clock, next(model.parameters()).device
        self._indices = torch.arange(batch_size) % len(self._data)
        inputs, targets = self._gathered()
        self._batches = cut_minibatch((inputs,), targets, steps.microbatches)
        self._wholes: list[tuple[float, float]] = []
        self._splits: list[dict[Ran, float]] = []
        self._kept: dict[Ran | None, int] = {}
        self.kept = 0
        """Bytes that the whole model keeps for its backward pass."""
        self.busy = 1.0
        """Ratio of wall time to thread time; 1 on a device."""
        for layer in (layer for program in programs for layer in program.layers):
            layer.train()

    def take(self, seconds: float, tell: Callable[[str], None]) -> None:
        """Compute once to measure kept memory, then until there are enough rounds or the time is up."""
        self._keep()
        begin, worked = time.perf_counter(), time.thread_time()
        end = begin + seconds
        while len(self._splits) < LEAST_ROUNDS or (len(self._splits) < MOST_ROUNDS and time.perf_counter() < end):
            self._wholes.append(self._whole_step())
            self._splits.append(self._split_step(_SegmentMeter(self._clock)).took)
            tell(f"round {len(self._splits)} of the whole model and the split one")
        if self._clock.of_thread:
            self.busy = (time.perf_counter() - begin) / (time.thread_time() - worked)

    def whole(self) -> tuple[float, float]:
        """Return the whole model's seconds of gathering a minibatch, and of its gradient."""
        gathered, computed = zip(*self._wholes, strict=True)
        return statistics.median(gathered), statistics.median(computed)

    def costs(self) -> list[SegmentCost]:
        """Return the cost of each segment for a microbatch."""
        parts, costs = self._steps.microbatches, []
        for at, segment in enumerate(self._steps.graph.segments):
            there, back = (Ran(segment.partition, at, way) for way in Pass)
            kept = self._kept.get(there, 0) // parts
            costs.append(SegmentCost(self._median(there) / parts, self._median(back) / parts, kept=kept))
        return costs

    def _median(self, ran: Ran) -> float:
        return statistics.median(times.get(ran, 0.0) for times in self._splits)

    def _whole_step(self) -> tuple[float, float]:
        self._model.zero_grad()
        begin = self._clock.mark()
        inputs, targets = self._gathered()
        gathered = self._clock.mark()
        self._task.loss(self._model(inputs), targets).backward()
        gathers, computes = self._clock.between([begin, gathered, self._clock.mark()])
        return gathers, computes

    def _gathered(self) -> tuple[object, object]:
        inputs, targets = self._data.batch(self._indices)
        return on_device(inputs, self._device), on_device(targets, self._device)

    def _split_step(self, watch: _SegmentMeter) -> _SegmentMeter:
        for program in self._programs:
            program.module.zero_grad()
        play([_Watched(program, self._batches, watch) for program in self._programs], self._steps.actions)
        watch.add_up()
        return watch

    def _keep(self) -> None:
        """Measure the bytes that autograd keeps for the whole model, and for each segment.

        The values that a segment has received do not count for it.
        """
        modules = [self._model, *(program.module for program in self._programs)]
        held = {_address(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        watch = _SegmentMeter(self._clock, held)
        with saved_tensors_hooks(watch.keep, lambda saved: saved):
            self._whole_step()
        self.kept = watch.kept.get(None, 0)
        watch = _SegmentMeter(self._clock, held)
        with saved_tensors_hooks(watch.keep, lambda saved: saved):
            self._split_step(watch)
        self._kept = watch.kept


class _SegmentMeter:
    """Meter of each segment's time, and of the memory that it keeps besides parameters and received values."""

    def __init__(self, clock: StepClock, held: Iterable[int] = ()) -> None:
        self._clock = clock
        self._ran: list[tuple[Ran, Any, Any]] = []
        """Segments with their first and last moments; computing the time between these would wait for the device."""
        self.took: dict[Ran, float] = {}
        self.running: Ran | None = None
        self.kept: dict[Ran | None, int] = {}
        self._held = {*held}
        self._here: set[tuple[int, int]] = set()
        self._alive: list[Tensor] = []  # so that no two tensors share an address

    def begin(self, ran: Ran) -> Any:
        """Return the moment at which a segment begins."""
        self.running = ran
        return self._clock.mark()

    def end(self, ran: Ran, begun: Any) -> None:
        self._ran.append((ran, begun, self._clock.mark()))

    def add_up(self) -> None:
        for ran, *moments in self._ran:
            self.took[ran] = self.took.get(ran, 0.0) + sum(self._clock.between(moments))

    def receive(self, partition: int, tensor: Tensor) -> None:
        self._here.add((partition, _address(tensor)))
        self._alive.append(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        address, partition = _address(tensor), self.running.partition if self.running else -1
        if address not in self._held and (partition, address) not in self._here:
            self._here.add((partition, address))
            self.kept[self.running] = self.kept.get(self.running, 0) + tensor.untyped_storage().nbytes()
            self._alive.append(tensor)
        return tensor


class _Watched(Passes):
    def __init__(self, program: PartitionProgram, batches: Sequence[Microbatch], watch: _SegmentMeter) -> None:
        super().__init__(program, batches)
        self._watch = watch

    def run(self, task: SegmentTask) -> None:
        ran = Ran(self.program.partition, task.segment, task.direction)
        begun = self._watch.begin(ran)
        super().run(task)
        self._watch.end(ran, begun)

    def take(self, crossing: Crossing, tensor: Tensor) -> None:
        self._watch.receive(self.program.partition, tensor)
        super().take(crossing, tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
