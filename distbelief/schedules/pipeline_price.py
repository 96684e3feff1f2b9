"""The price of a pipeline: seconds of a step, from those of its segments and a line between partitions, and memory
held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from distbelief.schedules.pipeline import Crossing, Pass, Pipeline, SegmentTask
from distbelief.schedules.price import LinkModel, Port, carry

BACKWARD = 2.0
"""Work of a backward pass, of that of a forward pass."""


class SegmentCost(msgspec.Struct, frozen=True):
    """Cost of one segment, as the pipeline computes it."""

    forward: float
    """Seconds of one microbatch."""
    backward: float
    """Seconds of one microbatch."""
    kept: int = 0
    """Bytes that a microbatch keeps from its way forward for its way back, beside what was received."""

    def seconds(self, direction: Pass) -> float:
        """Return the time of one task."""
        return self.forward if direction is Pass.FORWARD else self.backward


class Span(NamedTuple):
    """When a partition computed something, in seconds from the beginning of the step."""

    partition: int
    task: SegmentTask
    start: float
    stop: float


class PipelinePrice(msgspec.Struct, frozen=True):
    """Price of a step."""

    seconds: float
    """From the first task to the last partition's last."""
    spans: tuple[Span, ...]
    """Every task, in the order in which they began."""
    busy: tuple[float, ...]
    """Seconds that each partition computes."""
    held: tuple[int, ...]
    """The most bytes that each partition holds for what is still to compute: what it kept, and slots of what comes."""

    @property
    def idle(self) -> float:
        """The part of all partitions' time in which they wait.

        >>> from distbelief.schedules.pipeline import chain
        >>> from distbelief.schedules.pipelines import pipeline
        >>> round(price_pipeline(pipeline("gpipe", chain(4), 4), [SegmentCost(1, 2)] * 4).idle, 3)
        0.429
        """
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def price_pipeline(
    pipeline: Pipeline, costs: Sequence[SegmentCost], link: LinkModel | None = None, samples: float = 0.0
) -> PipelinePrice:
    """The price of a pipeline, in which everything begins as soon as its partition and what it waits for let it.

    Of a chain of stages that take t seconds each with a microbatch, without a price of messages, M microbatches cost
    sum(t) + (M - 1) max(t).

    Args:
        pipeline: what is played.
        costs: of each segment, in their order.
        link: between any two partitions, where messages cost something; a partition computes on while they leave and
            arrive.
        samples: in a microbatch, for the bytes of what crosses.

    >>> from distbelief.schedules.pipeline import chain
    >>> from distbelief.schedules.pipelines import pipeline
    >>> price_pipeline(pipeline("1f1b", chain(2), 4), [SegmentCost(1, 2), SegmentCost(2, 4)]).seconds
    27.0
    """
    run = _Timeline(pipeline, costs, link or LinkModel(0.0, float("inf")), samples)
    # who is the earliest goes first, since ports serve in that order
    while any(run.advance(partition) for partition in sorted(range(len(run.now)), key=run.now.__getitem__)):
        pass
    held = list(run.most)
    for number, boundary in enumerate(pipeline.graph.boundaries):
        held[boundary.target] += run.sizes[number] * pipeline.slots(number)
        held[boundary.source] += run.sizes[number] * pipeline.slots(number) * boundary.gradient
    spans = sorted(run.spans, key=lambda span: (span.start, span.partition))
    return PipelinePrice(max(run.now, default=0.0), tuple(spans), tuple(run.busy), tuple(held))


class _Timeline:
    """Until when everybody and everything is busy, and what everybody holds."""

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
        """Do the next action of a partition, unless it waits for another partition's; whether it did."""
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
