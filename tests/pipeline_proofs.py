"""The symbolic executor of pipelines, and the proof that one comes to its end with every gradient.

It follows what lies in every slot and at every partition, and owes nothing to how a pipeline was made. Partitions wait
for nothing but slots, each with one who writes and one who reads: whether they come to an end does not depend on who
goes first, so that one execution proves it for all.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from distbelief.errors import LocalProtocolError
from distbelief.schedules.pipeline import Action, Crossing, Pass, Pipeline, SegmentTask


class Execution(msgspec.Struct, frozen=True):
    """What a pipeline was seen to do."""

    in_flight: tuple[int, ...]
    """Of each partition, the most microbatches that were forward and not yet back."""
    waits: int
    """How often somebody who was to send found no slot free."""


def prove(pipeline: Pipeline, slots: int | None = None) -> Execution:
    """Prove that a pipeline runs to its end and that every gradient is made of all that it should be.

    Every segment goes forward and back once with each microbatch, at its own partition, and has what it uses, of that
    microbatch; each value and each gradient crosses once to each partition that needs it; no slot is written before it
    is free; nobody waits forever.

    Args:
        pipeline: what is played.
        slots: of every boundary, each way; `pipeline.slots` where None.

    Raises:
        LocalProtocolError: it does not; with the partition and the action.

    >>> from distbelief.schedules.pipeline import chain
    >>> from distbelief.schedules.pipeline import pipeline
    >>> prove(pipeline("1f1b", chain(3), 8)).in_flight
    (3, 2, 1)
    """
    run = _Proof(pipeline, slots)
    while any(run.advance(partition) for partition in range(pipeline.graph.partitions)):
        pass
    return run.end()


class _Proof:
    """Where everybody is, and what lies where."""

    def __init__(self, pipeline: Pipeline, slots: int | None) -> None:
        self.pipeline, self.graph, self.fixed = pipeline, pipeline.graph, slots
        self.at = [0] * self.graph.partitions
        self.rings: dict[tuple[int, Pass], list[Crossing | None]] = {}
        self.here: dict[Crossing, int] = {}
        """What was received and is still used, and the slot in which it lies."""
        self.sent: set[Crossing] = set()
        self.received: set[Crossing] = set()
        self.written: Counter[tuple[int, Pass]] = Counter()
        self.read: Counter[tuple[int, Pass]] = Counter()
        self.done: set[SegmentTask] = set()
        self.waits = 0
        self.in_flight = [0] * self.graph.partitions

    def advance(self, partition: int) -> bool:
        """Go on until it waits; whether it did anything."""
        actions, before = self.pipeline.actions[partition], self.at[partition]
        while self.at[partition] < len(actions) and self._act(partition, actions[self.at[partition]]):
            self.at[partition] += 1
        return self.at[partition] > before

    def end(self) -> Execution:
        """What was seen, once everybody is at the end."""
        for partition, actions in enumerate(self.pipeline.actions):
            if self.at[partition] < len(actions):
                raise self._wrong(partition, actions[self.at[partition]], "waits forever")
        for number, segment in enumerate(self.graph.segments):
            ways = [(way, m) for way in (Pass.FORWARD, Pass.BACKWARD) for m in range(self.pipeline.microbatches)]
            for way, microbatch in ways:
                if (task := SegmentTask(way, number, microbatch)) not in self.done:
                    raise self._wrong(segment.partition, task, "is never computed")
        return Execution(tuple(self.in_flight), self.waits)

    def _act(self, partition: int, action: Action) -> bool:
        if isinstance(action, SegmentTask):
            self._compute(partition, action)
            return True
        source, target = self.graph.boundaries[action.boundary].ends(action.direction)
        if partition not in (source, target):
            raise self._wrong(partition, action, "is of other partitions")
        return self._send(partition, action) if partition == source else self._receive(partition, action)

    def _ring(self, way: tuple[int, Pass]) -> list[Crossing | None]:
        count = self.pipeline.slots(way[0]) if self.fixed is None else self.fixed
        return self.rings.setdefault(way, [None] * count)

    def _send(self, partition: int, action: Crossing) -> bool:
        if action in self.sent:
            raise self._wrong(partition, action, "crosses a second time")
        made_by = [
            SegmentTask(action.direction, number, action.microbatch)
            for number, segment in enumerate(self.graph.segments)
            if action.boundary in (segment.gives if action.direction is Pass.FORWARD else segment.takes)
        ]
        if not self.done.issuperset(made_by):
            raise self._wrong(partition, action, "is sent before it is made")
        way = action.boundary, action.direction
        ring, at = self._ring(way), self.written[way]
        if not ring or ring[at % len(ring)] is not None:
            self.waits += 1
            return False
        ring[at % len(ring)] = action
        self.sent.add(action)
        self.written[way] += 1
        return True

    def _receive(self, partition: int, action: Crossing) -> bool:
        way = action.boundary, action.direction
        ring, at = self._ring(way), self.read[way]
        lies = ring[at % len(ring)] if ring else None
        if lies is None or lies in self.received:
            return False
        if lies != action:
            raise self._wrong(partition, action, f"finds {lies} in its slot")
        self.received.add(action)
        self.read[way] += 1
        self.here[action] = at % len(ring)
        return True

    def _compute(self, partition: int, task: SegmentTask) -> None:
        if self.graph.segments[task.segment].partition != partition:
            raise self._wrong(partition, task, "is of another partition")
        if task in self.done:
            raise self._wrong(partition, task, "is computed a second time")
        for crossing in self.graph.uses(task):
            if crossing not in self.here:
                raise self._wrong(partition, task, f"lacks {crossing}")
        for other in self._before(partition, task):
            if other not in self.done:
                raise self._wrong(partition, task, f"comes before {other}")
        self.done.add(task)
        self._account(partition)
        for crossing in self.graph.uses(task):
            if self.pipeline.last_uses[crossing] == task:
                self.rings[crossing.boundary, crossing.direction][self.here.pop(crossing)] = None

    def _before(self, partition: int, task: SegmentTask) -> list[SegmentTask]:
        """What the same partition must have computed: segments may use whatever those before them have."""
        mine = self.graph.of(partition)
        at = mine.index(task.segment)
        if task.direction is Pass.FORWARD:
            return [task._replace(segment=number) for number in mine[:at]]
        behind = [task._replace(segment=number) for number in mine[at + 1 :]]
        return [task._replace(direction=Pass.FORWARD), *behind]

    def _account(self, partition: int) -> None:
        """Count what is in flight."""
        first = self.graph.of(partition)[0]
        flying = [
            m for m in range(self.pipeline.microbatches)
            if SegmentTask(Pass.FORWARD, first, m) in self.done
            and SegmentTask(Pass.BACKWARD, first, m) not in self.done
        ]  # fmt: skip
        self.in_flight[partition] = max(self.in_flight[partition], len(flying))

    def _wrong(self, partition: int, action: Action, says: str) -> LocalProtocolError:
        name = f"{self.pipeline.algorithm}, {self.pipeline.microbatches} microbatches, partition {partition}"
        return LocalProtocolError(f"{name}: {action} {says}")
