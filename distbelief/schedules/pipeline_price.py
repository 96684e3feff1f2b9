"""Price of a pipeline: the seconds of a step, from those of segments and links, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from distbelief.schedules.pipeline import Crossing, Pass, Pipeline, SegmentTask
from distbelief.schedules.price import LinkModel, Port, carry

BACKWARD = 2.0
"""Work of a backward pass, as a multiple of the forward pass."""


class SegmentCost(msgspec.Struct, frozen=True):
    """Cost of one segment."""

    forward: float
    """Seconds for a microbatch."""
    backward: float
    """Seconds for a microbatch."""
    kept: int = 0
    """Bytes that a microbatch keeps from forward to backward, besides the values received."""

    def seconds(self, direction: Pass) -> float:
        """Return the seconds of one task."""
        return self.forward if direction is Pass.FORWARD else self.backward


class Span(NamedTuple):
    """Time in which a partition computed a task, in seconds from the start of the step."""

    partition: int
    task: SegmentTask
    start: float
    stop: float


class PipelinePrice(msgspec.Struct, frozen=True):
    """Price of a step."""

    seconds: float
    """Seconds from the first task to the last."""
    spans: tuple[Span, ...]
    """All tasks, in the order in which they began."""
    busy: tuple[float, ...]
    """Seconds for which each partition computes."""
    held: tuple[int, ...]
    """Most bytes that each partition holds: kept values, and slots of crossing values."""

    @property
    def idle(self) -> float:
        """Return the share of all partitions' time in which they wait.

        >>> from distbelief.schedules.pipeline import chain, pipeline
        >>> round(price_pipeline(pipeline("gpipe", chain(4), 4), [SegmentCost(1, 2)] * 4).idle, 3)
        0.429
        """
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def price_pipeline(
    pipeline: Pipeline, costs: Sequence[SegmentCost], link: LinkModel | None = None, samples: float = 0.0
) -> PipelinePrice:
    """Return the price of a pipeline in which each task and crossing begins as early as possible.

    With free messages, a chain of stages that take t seconds each needs sum(t) + (M - 1) max(t) seconds for M
    microbatches.

    Args:
        pipeline: the order of tasks.
        costs: of each segment, in their order.
        link: between any two partitions, if messages cost time; a partition computes while they leave and arrive.
        samples: number of samples in a microbatch, for the bytes that cross.

    >>> from distbelief.schedules.pipeline import chain, pipeline
    >>> price_pipeline(pipeline("1f1b", chain(2), 4), [SegmentCost(1, 2), SegmentCost(2, 4)]).seconds
    27.0
    """
    run = _Timeline(pipeline, costs, link or LinkModel(0.0, float("inf")), samples)
    # the earliest partition goes first, because ports serve in that order
    while any(run.advance(partition) for partition in sorted(range(len(run.now)), key=run.now.__getitem__)):
        pass
    held = list(run.most)
    for number, boundary in enumerate(pipeline.graph.boundaries):
        held[boundary.target] += run.sizes[number] * pipeline.slots(number)
        held[boundary.source] += run.sizes[number] * pipeline.slots(number) * boundary.gradient
    spans = sorted(run.spans, key=lambda span: (span.start, span.partition))
    return PipelinePrice(max(run.now, default=0.0), tuple(spans), tuple(run.busy), tuple(held))


class _Timeline:
    """Moments until which each partition and port is busy, and the bytes that each partition holds."""

    def __init__(self, pipeline: Pipeline, costs: Sequence[SegmentCost], link: LinkModel, samples: float) -> None:
        partitions = pipeline.graph.partitions
        self.pipeline, self.costs, self.link = pipeline, costs, link
        self.sizes = [round(boundary.size * samples) for boundary in pipeline.graph.boundaries]
        self.at, self.now, self.busy = [0] * partitions, [0.0] * partitions, [0.0] * partitions
        self.ports = [Port() for _ in range(partitions)]
        self.sent: dict[tuple[int, Pass], list[Crossing]] = {}
        self.arrived: dict[Crossing, float] = {}
        self.freed: dict[Crossing, float] = {}
        self.spans: list[Span] = []
        self.held, self.most = [0] * partitions, [0] * partitions

    def advance(self, partition: int) -> bool:
        """Do a partition's next action, unless it must wait for another partition; return whether it was done."""
        actions = self.pipeline.actions[partition]
        if self.at[partition] == len(actions):
            return False
        action = actions[self.at[partition]]
        if isinstance(action, SegmentTask):
            self._compute(partition, action)
        elif not self._cross(partition, action):
            return False
        self.at[partition] += 1
        return True

    def _cross(self, partition: int, action: Crossing) -> bool:
        source, target = self.pipeline.graph.boundaries[action.boundary].ends(action.direction)
        size = self.sizes[action.boundary]
        if partition == target:
            if action not in self.arrived:
                return False
            self.now[partition] = max(self.now[partition], self.arrived[action])
            return True
        way = action.boundary, action.direction
        sent, count = self.sent.setdefault(way, []), self.pipeline.slots(action.boundary)
        if len(sent) >= count:
            if sent[-count] not in self.freed:
                return False
            self.now[partition] = max(self.now[partition], self.freed[sent[-count]])
        ports = self.ports[source], self.ports[target]
        self.arrived[action] = carry(*ports, self.now[partition], size / self.link.bandwidth, self.link.latency)
        sent.append(action)
        return True

    def _compute(self, partition: int, task: SegmentTask) -> None:
        cost, start = self.costs[task.segment], self.now[partition]
        self.now[partition] = start + cost.seconds(task.direction)
        self.busy[partition] += cost.seconds(task.direction)
        self.spans.append(Span(partition, task, start, self.now[partition]))
        self.held[partition] += cost.kept * (task.direction is Pass.FORWARD)
        self.most[partition] = max(self.most[partition], self.held[partition])
        if task.direction is Pass.BACKWARD:
            self.held[partition] -= cost.kept
        for crossing in self.pipeline.graph.uses(task):
            if self.pipeline.last_uses[crossing] == task:
                self.freed[crossing] = self.now[partition]
