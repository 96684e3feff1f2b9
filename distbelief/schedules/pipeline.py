"""Pipelines as data: in which order each partition of a split model takes microbatches forward and back, and what
crosses.

The rules of a pipeline:

1. A partition does its tasks in order, and in each the segments that it has: in order forward, in reverse back.
2. A segment's inputs from other partitions are received before it first needs them; what it gives to others is sent
  when it
   has been computed, to each partition once. Going back, gradients take the same boundaries the other way; what several
   segments of a partition make of one is added there, and leaves when the last has added to it.
3. Each boundary has slots of its own for each way, which are taken in turn. Who sends waits until the slot is free, who
   receives until it is full; it is freed when the last that uses what lies in it has been computed: a segment uses its
   inputs going back too.

`schedules/pipeline_proof` executes a pipeline symbolically, and refuses it where it does not come to its end with every
gradient; `schedules/pipelines` has the algorithms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec

from distbelief.errors import UsageError


class Pass(Enum):
    """Direction of a microbatch through a segment, or of a tensor through a boundary."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The gradients of what was taken, and of the weights."""


class PartitionTask(NamedTuple):
    """All segments of a partition, one way, for one microbatch."""

    direction: Pass
    microbatch: int
    """From 0 on."""


class SegmentTask(NamedTuple):
    """One segment, one way, for one microbatch."""

    direction: Pass
    segment: int
    microbatch: int


class Crossing(NamedTuple):
    """Passage of one microbatch through a boundary: a value forward, or its gradient back."""

    boundary: int
    microbatch: int
    direction: Pass


Action = SegmentTask | Crossing


class Boundary(msgspec.Struct, frozen=True):
    """Crossing point of one value, from the partition that computes it to one that needs it."""

    value: str
    source: int
    target: int
    size: int = 0
    """Bytes of a sample."""
    gradient: bool = True
    """True if its gradient comes back."""

    def ends(self, direction: Pass) -> tuple[int, int]:
        """Return who sends, and who receives."""
        return (self.source, self.target) if direction is Pass.FORWARD else (self.target, self.source)


class PartitionSegment(msgspec.Struct, frozen=True):
    """A computation of one partition without waiting, by what it takes from other partitions and gives to them."""

    name: str
    partition: int
    takes: tuple[int, ...] = ()
    """The numbers of the boundaries over which its inputs come."""
    gives: tuple[int, ...] = ()
    """Numbers of the boundaries over which its outputs leave."""


class SegmentGraph(msgspec.Struct, frozen=True, dict=True):
    """The segments of a split model, in an order in which each takes only what those before it give.

    Raises:
        UsageError: a boundary that there is not, that has not one segment which gives at its source, before one that
            takes at its target, or over which a value comes to a partition that has it already; a partition without a
            segment.

    >>> chain(2).segments[1], chain(2).partitions
    (PartitionSegment(name='stage 1', partition=1, takes=(0,), gives=()), 2)
    """

    segments: tuple[PartitionSegment, ...]
    boundaries: tuple[Boundary, ...] = ()

    def __post_init__(self) -> None:
        sent: set[int] = set()
        for segment in self.segments:
            for number in (*segment.takes, *segment.gives):
                if not 0 <= number < len(self.boundaries):
                    raise UsageError(f"{segment.name}: boundary {number} of {len(self.boundaries)}: number them from 0")
            for number in segment.takes:
                if number not in sent or self.boundaries[number].target != segment.partition:
                    raise UsageError(
                        f"{segment.name} takes {self.boundaries[number]}, which nobody before it gives there"
                    )
            for number in segment.gives:
                if number in sent or self.boundaries[number].source != segment.partition:
                    raise UsageError(
                        f"{segment.name} gives {self.boundaries[number]}, which is another segment's to give"
                    )
                sent.add(number)
        received = {number for segment in self.segments for number in segment.takes}
        arrivals = set[tuple[str, int]]()
        for number, edge in enumerate(self.boundaries):
            if number not in received or edge.source == edge.target or (edge.value, edge.target) in arrivals:
                raise UsageError(f"{edge}: a value crosses once to each other partition that takes it")
            arrivals.add((edge.value, edge.target))
        if {segment.partition for segment in self.segments} != set(range(self.partitions)):
            raise UsageError(
                f"of partitions 0 to {self.partitions - 1} some have no segment: number those that have, from 0 on"
            )

    @cached_property
    def partitions(self) -> int:
        """Return how many partitions there are."""
        return 1 + max((segment.partition for segment in self.segments), default=-1)

    def of(self, partition: int) -> list[int]:
        """The segments of a partition, in order."""
        return [number for number, segment in enumerate(self.segments) if segment.partition == partition]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Count the partitions that a microbatch passes, from each partition to where it turns: 1 for the last of a
        chain.

        Partitions that need values of each other have the same depth.

        >>> chain(3).depths
        (3, 2, 1)
        """
        return depths_of(self.partitions, ((boundary.source, boundary.target) for boundary in self.boundaries))

    def uses(self, task: SegmentTask) -> list[Crossing]:
        """Return what a segment uses, forward or back, of what its partition received."""
        segment = self.segments[task.segment]
        inputs = [Crossing(number, task.microbatch, Pass.FORWARD) for number in segment.takes]
        if task.direction is Pass.FORWARD:
            return inputs
        back = [number for number in segment.gives if self.boundaries[number].gradient]
        return inputs + [Crossing(number, task.microbatch, Pass.BACKWARD) for number in back]

    def makes(self, task: SegmentTask) -> list[Crossing]:
        """Return what is ready to be sent when a segment has been computed."""
        segment = self.segments[task.segment]
        if task.direction is not Pass.BACKWARD:
            return [Crossing(number, task.microbatch, Pass.FORWARD) for number in segment.gives]
        earlier = {number for segment in self.segments[: task.segment] for number in segment.takes}
        ready = [number for number in segment.takes if self.boundaries[number].gradient and number not in earlier]
        return [Crossing(number, task.microbatch, Pass.BACKWARD) for number in ready]


def depths_of(partitions: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return how many partitions a microbatch is at, from each partition on to the one where it turns.

    Args:
        partitions: how many there are.
        edges: from each that gives something, to the one that takes it.

    >>> depths_of(3, [(0, 1), (1, 2)]), depths_of(2, [(0, 1), (1, 0)])
    ((3, 2, 1), (1, 1))
    """
    reach = [{partition} for partition in range(partitions)]
    for source, target in edges:
        reach[source].add(target)
    for middle in range(partitions):
        for partition in range(partitions):
            if middle in reach[partition]:
                reach[partition] |= reach[middle]
    depths: dict[int, int] = {}
    # who reaches more comes later, so that all behind it are known; partitions that reach each other reach the same
    for partition in sorted(range(partitions), key=lambda partition: len(reach[partition])):
        depths[partition] = 1 + max(
            (depths[other] for other in reach[partition] if partition not in reach[other]), default=0
        )
    return tuple(depths[partition] for partition in range(partitions))


def chain(stages: int, size: int = 0) -> SegmentGraph:
    """Stages, each at a partition of its own and giving the next one a value of so many bytes a sample."""
    last = stages - 1
    return SegmentGraph(
        tuple(
            PartitionSegment(f"stage {n}", n, (n - 1,) if n else (), (n,) if n < last else ()) for n in range(stages)
        ),
        tuple(Boundary(f"output of stage {n}", n, n + 1, size) for n in range(last)),
    )


class Pipeline(msgspec.Struct, frozen=True, dict=True):
    """Orders of the partitions for a minibatch of so many microbatches.

    >>> from distbelief.schedules.pipelines import pipeline
    >>> made = pipeline("gpipe", chain(2), 1)
    >>> [(task.direction.value, task.microbatch) for task in made.orders[1]]
    [('forward', 0), ('backward', 0)]
    >>> for action in made.actions[1]:
    ...     print(action)
    Crossing(boundary=0, microbatch=0, direction=<Pass.FORWARD: 'forward'>)
    SegmentTask(direction=<Pass.FORWARD: 'forward'>, segment=1, microbatch=0)
    SegmentTask(direction=<Pass.BACKWARD: 'backward'>, segment=1, microbatch=0)
    Crossing(boundary=0, microbatch=0, direction=<Pass.BACKWARD: 'backward'>)
    """

    algorithm: str
    graph: SegmentGraph
    microbatches: int
    orders: tuple[tuple[PartitionTask, ...], ...]
    """The tasks of each partition."""

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Return what each partition computes, receives and sends, in order, by the rules."""
        return tuple(tuple(self.actions_of(partition)) for partition in range(self.graph.partitions))

    def actions_of(self, partition: int) -> Iterator[Action]:
        """Yield what one partition computes, receives and sends, in order."""
        mine, received = self.graph.of(partition), set[Crossing]()
        for direction, microbatch in self.orders[partition]:
            for number in mine if direction is Pass.FORWARD else reversed(mine):
                task = SegmentTask(direction, number, microbatch)
                for crossing in self.graph.uses(task):
                    if crossing not in received:
                        received.add(crossing)
                        yield crossing
                yield task
                yield from self.graph.makes(task)

    @cached_property
    def last_uses(self) -> Mapping[Crossing, SegmentTask]:
        """Return the task that uses each received thing last."""
        tasks = (action for actions in self.actions for action in actions if isinstance(action, SegmentTask))
        return {crossing: task for task in tasks for crossing in self.graph.uses(task)}

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most microbatches of each partition that went forward and are not back."""
        most = []
        for order in self.orders:
            ways = [(way is Pass.FORWARD) - (way is Pass.BACKWARD) for way, _ in order]
            most.append(max(accumulate(ways), default=0))
        return tuple(most)

    def slots(self, boundary: int) -> int:
        """Return the slots of a boundary each way: as many as its source has in flight.

        Whoever sends finds one free: its source takes a further microbatch forward only after an earlier one is back,
        and with it what was taken of that one everywhere behind. Where no gradient comes back he may have to wait.
        """
        return self.in_flight[self.graph.boundaries[boundary].source]
