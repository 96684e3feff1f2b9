"""Pipelines as data: the order in which each partition of a split model takes microbatches forward and backward, and
the values that cross between partitions.

The rules of a pipeline:

1. A partition does its tasks in order; in each it computes its segments in order, or in reverse order backward.
2. It receives a segment's inputs before it first needs them. It sends a segment's outputs to each partition once, as
   soon as they are computed. Gradients cross the same boundaries backward: a partition adds up those of its segments,
   and sends the sum after the last.
3. Each boundary has slots for each direction, which are used in turn. A sender waits until the slot is free, a receiver
   until it is full. It is free once the last segment that uses its content is computed; a segment uses its inputs
   backward too.

The algorithms differ only in the number of microbatches that a partition has in flight. It takes that many forward,
then alternates one backward and the next forward, then takes the rest backward. A test executes pipelines symbolically:
they must end with every gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec

from distbelief.errors import UsageError, unknown


class Pass(Enum):
    """Direction of a microbatch through a segment, or of a tensor through a boundary."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Backward, which computes the gradients of inputs and weights."""


class PartitionTask(NamedTuple):
    """All segments of a partition in one direction, for one microbatch."""

    direction: Pass
    microbatch: int
    """Number of the microbatch, from 0."""


class SegmentTask(NamedTuple):
    """One segment in one direction, for one microbatch."""

    direction: Pass
    segment: int
    microbatch: int


class Crossing(NamedTuple):
    """A microbatch's value that crosses a boundary forward, or its gradient backward."""

    boundary: int
    microbatch: int
    direction: Pass


Action = SegmentTask | Crossing


class Boundary(msgspec.Struct, frozen=True):
    """Way of a value from the partition that computes it to one that needs it."""

    value: str
    source: int
    target: int
    size: int = 0
    """Bytes for each sample."""
    gradient: bool = True
    """True if its gradient comes back."""

    def ends(self, direction: Pass) -> tuple[int, int]:
        """Return the sender and the receiver."""
        return (self.source, self.target) if direction is Pass.FORWARD else (self.target, self.source)


class PartitionSegment(msgspec.Struct, frozen=True):
    """Computation of one partition without waits, with its inputs from other partitions and its outputs to them."""

    name: str
    partition: int
    takes: tuple[int, ...] = ()
    """Numbers of the boundaries over which its inputs arrive."""
    gives: tuple[int, ...] = ()
    """Numbers of the boundaries over which its outputs leave."""


class SegmentGraph(msgspec.Struct, frozen=True, dict=True):
    """Segments of a split model, in an order in which each takes only outputs of earlier ones.

    Raises:
        UsageError: a boundary does not exist, or lacks a segment that gives at its source and a later one that takes at
            its target; or a value comes to a partition twice; or a partition has no segment.
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
                        f"{segment.name} takes {self.boundaries[number]}, which no earlier segment gives there"
                    )
            for number in segment.gives:
                if number in sent or self.boundaries[number].source != segment.partition:
                    raise UsageError(f"{segment.name} gives {self.boundaries[number]}, which another segment gives too")
                sent.add(number)
        received = {number for segment in self.segments for number in segment.takes}
        arrivals = set[tuple[str, int]]()
        for number, edge in enumerate(self.boundaries):
            if number not in received or edge.source == edge.target or (edge.value, edge.target) in arrivals:
                raise UsageError(f"{edge}: a value crosses once to each other partition that takes it")
            arrivals.add((edge.value, edge.target))
        if {segment.partition for segment in self.segments} != set(range(self.partitions)):
            raise UsageError(
                f"of partitions 0 to {self.partitions - 1} some have no segment: number them from 0 without gaps"
            )

    @cached_property
    def partitions(self) -> int:
        """Number of partitions."""
        return 1 + max((segment.partition for segment in self.segments), default=-1)

    def of(self, partition: int) -> list[int]:
        """Return the segments of a partition, in order."""
        return [number for number, segment in enumerate(self.segments) if segment.partition == partition]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each partition; see `depths_of`."""
        return depths_of(self.partitions, ((boundary.source, boundary.target) for boundary in self.boundaries))

    def uses(self, task: SegmentTask) -> list[Crossing]:
        """Return the crossings to its partition that a segment uses, forward or backward."""
        segment = self.segments[task.segment]
        inputs = [Crossing(number, task.microbatch, Pass.FORWARD) for number in segment.takes]
        if task.direction is Pass.FORWARD:
            return inputs
        back = [number for number in segment.gives if self.boundaries[number].gradient]
        return inputs + [Crossing(number, task.microbatch, Pass.BACKWARD) for number in back]

    def makes(self, task: SegmentTask) -> list[Crossing]:
        """Return the crossings that can be sent once a segment is computed."""
        segment = self.segments[task.segment]
        if task.direction is not Pass.BACKWARD:
            return [Crossing(number, task.microbatch, Pass.FORWARD) for number in segment.gives]
        earlier = {number for segment in self.segments[: task.segment] for number in segment.takes}
        ready = [number for number in segment.takes if self.boundaries[number].gradient and number not in earlier]
        return [Crossing(number, task.microbatch, Pass.BACKWARD) for number in ready]


def depths_of(partitions: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the depth of each partition: the number of partitions from it to the end, 1 for the last of a chain.

    Edges go from each partition that gives a value to the one that takes it; those in a cycle have the same depth.

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
    # partitions that reach more come later, when all that follow them are done; those in a cycle reach the same ones
    for partition in sorted(range(partitions), key=lambda partition: len(reach[partition])):
        after = (depths[other] for other in reach[partition] if partition not in reach[other])
        depths[partition] = 1 + max(after, default=0)
    return tuple(depths[partition] for partition in range(partitions))


def chain(stages: int, size: int = 0) -> SegmentGraph:
    """Return a chain of stages, each at its own partition, with values of `size` bytes a sample between them."""
    last = stages - 1
    ends = [((n - 1,) if n else (), (n,) if n < last else ()) for n in range(stages)]
    segments = (PartitionSegment(f"stage {n}", n, takes, gives) for n, (takes, gives) in enumerate(ends))
    boundaries = (Boundary(f"output of stage {n}", n, n + 1, size) for n in range(last))
    return SegmentGraph(tuple(segments), tuple(boundaries))


class Pipeline(msgspec.Struct, frozen=True, dict=True):
    """Order of each partition's tasks, for a minibatch of some number of microbatches.

    >>> gpipe = pipeline("gpipe", chain(2), 1)
    >>> [(task.direction.value, task.microbatch) for task in gpipe.orders[1]]
    [('forward', 0), ('backward', 0)]
    >>> for action in gpipe.actions[1]:
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
        """Computations, receipts and sends of each partition, in order."""
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
        """Return the last task that uses each crossing."""
        tasks = (action for actions in self.actions for action in actions if isinstance(action, SegmentTask))
        return {crossing: task for task in tasks for crossing in self.graph.uses(task)}

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Return for each partition the most microbatches that have gone forward and not yet backward."""
        most = []
        for order in self.orders:
            ways = [(way is Pass.FORWARD) - (way is Pass.BACKWARD) for way, _ in order]
            most.append(max(accumulate(ways), default=0))
        return tuple(most)

    def slots(self, boundary: int) -> int:
        """Return how many slots a boundary has in each direction: the microbatches that its source has in flight."""
        # So a sender finds a free slot: the source takes another microbatch forward only after one has come back, with
        # all gradients of its values. Only if no gradient comes back may the sender have to wait.
        return self.in_flight[self.graph.boundaries[boundary].source]


PIPELINES = ("sequential", "gpipe", "1f1b")


def pipeline(algorithm: str, graph: SegmentGraph, microbatches: int = 1) -> Pipeline:
    """Return the pipeline of an algorithm over the segments of a split model.

    - `sequential`: the minibatch passes through as a whole.
    - `gpipe`: all microbatches go forward, then all backward (Huang et al. 2018).
    - `1f1b`: a partition has at most as many microbatches in flight as there are partitions from it to the last
      (Narayanan et al. 2019, 2021).

    `microbatches` is 1 or more; 1 for `sequential`. Another number, or an algorithm that is not in `PIPELINES`, raises
    a `UsageError`.

    >>> [f"{way.value[0]}{number}" for way, number in pipeline("1f1b", chain(2), 3).orders[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    check_pipeline(algorithm, microbatches)
    most = [in_flight(algorithm, microbatches, depth) for depth in graph.depths]
    return Pipeline(algorithm, graph, microbatches, tuple(tuple(partition_tasks(microbatches, n)) for n in most))


def in_flight(algorithm: str, microbatches: int, depth: int) -> int:
    """Return how many microbatches a partition at a depth may have in flight.

    >>> in_flight("gpipe", 8, 2), in_flight("1f1b", 8, 2), in_flight("1f1b", 1, 2)
    (8, 2, 1)
    """
    return microbatches if algorithm == "gpipe" else min(microbatches, depth)


def partition_tasks(microbatches: int, in_flight: int) -> Iterator[PartitionTask]:
    """Yield the tasks of a partition with `in_flight` microbatches in flight.

    >>> [(way.value, number) for way, number in partition_tasks(2, 2)]
    [('forward', 0), ('forward', 1), ('backward', 0), ('backward', 1)]
    """
    for turn in range(microbatches + in_flight):
        if turn >= in_flight:
            yield PartitionTask(Pass.BACKWARD, turn - in_flight)
        if turn < microbatches:
            yield PartitionTask(Pass.FORWARD, turn)


def named(schedule: str, microbatches: int) -> str:
    """Return the name of a schedule; auto is `sequential` for a whole minibatch, else `1f1b`.

    >>> named("auto", 1), named("auto", 4), named("gpipe", 4)
    ('sequential', '1f1b', 'gpipe')
    """
    return schedule if schedule != "auto" else "1f1b" if microbatches > 1 else "sequential"


def check_pipeline(algorithm: str, microbatches: int) -> None:
    """Refuse an algorithm that does not exist, or cannot have this many microbatches."""
    if algorithm not in PIPELINES:
        raise unknown("schedule", algorithm, PIPELINES)
    if microbatches < 1:
        raise UsageError(f"--microbatches {microbatches}: must be 1 or more")
    if algorithm == "sequential" and microbatches > 1:
        raise UsageError(
            f"--microbatches {microbatches}: schedule sequential sends a minibatch through as a whole: use 1, or gpipe "
            "or 1f1b"
        )
