"""Computation of a split replica's step at one partition: it runs what it can, gives others what crosses to them, and
takes what crosses to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from distbelief.core.conversations.partitioning import Boundary, Crossed
from distbelief.core.effects import Batch, Compute, Computed, Phantom, Send, Work
from distbelief.errors import UsageError
from distbelief.fabric.crossings import Crossings
from distbelief.fabric.pinned import DeviceCopies
from distbelief.replica.home_part import AskScript, PartSteps
from distbelief.replica.siblings import Siblings
from distbelief.replica.steps import Steps
from distbelief.schedules.pipeline import Pass
from distbelief.split.play import Give, RunSegment, Take

PART = 1 << 20
"""Most bytes of what crosses in one message."""


class SplitPart(Protocol):
    """The part of a split model that a partition holds."""

    copies: DeviceCopies | None
    """Between the host and the device where it computes; None where that is the host, or nothing is computed."""

    @property
    def slots(self) -> Sequence[int]:
        """Bytes of each thing that may cross in a step, at most; none where nothing is computed."""
        ...

    def play(self, batch: Batch) -> PartSteps:
        """Its part of a step: the gradient of a minibatch, left where the vectors take it from; the loss, where it has
        that. None where a script has left its loop.
        """
        ...

    def share(self, run: RunSegment) -> float:
        """Return a segment's share of the work of a step."""
        ...

    def slot(self, asked: Give | Take) -> int:
        """Return its number among all things that cross in a step."""
        ...

    def size(self, asked: Give | Take) -> int:
        """Return the number of bytes that cross."""
        ...

    def encode(self, given: Give) -> torch.Tensor | None:
        """Encode what crosses, where this partition computes; None where nothing is computed."""
        ...

    def shape(self, asked: Give | Take) -> tuple[int, ...]:
        """Return the shape of what crosses."""
        ...

    def decode(self, wanted: Take, data: bytearray) -> torch.Tensor | None:
        """Decode what has crossed, where this partition computes; None where nothing is computed."""
        ...


class CrossingKey(NamedTuple):
    """Something that crosses between two partitions."""

    generation: int
    """Generation of the job."""
    step: int
    """Step of the replica, since then."""
    transfer: int
    microbatch: int
    backward: bool


class SplitCompute:
    """One partition's steps.

    Args:
        siblings: with whom it makes them.
        part: what it computes.
        crossings: what it shares with the others, where they are on one host; else what crosses is sent.
    """

    def __init__(self, siblings: Siblings, part: SplitPart, crossings: Crossings | None = None) -> None:
        self.siblings, self._part, self._crossings = siblings, part, crossings
        self._generation = self._step = 0
        self._here: dict[CrossingKey, bytearray] = {}
        self._coming: dict[CrossingKey, list[bytes]] = {}
        self._waits_for: Give | Take | None = None

    def begin(self, generation: int) -> list[Send]:
        """The replica begins, in a generation of the job; what is left of another is dropped."""
        self._generation, self._step, self._waits_for = generation, 0, None
        self._here = {one: data for one, data in self._here.items() if one.generation >= generation}
        self._coming = {one: parts for one, parts in self._coming.items() if one.generation >= generation}
        return self._begin_step()

    def _begin_step(self) -> list[Send]:
        if self._crossings is None:
            return []
        return [self._wake(home) for home in self._crossings.begin(self.siblings.moment(self._step))]

    def _wake(self, home: int) -> Send:
        return Send(self.siblings.role_of(home), Crossed())

    def waits(self) -> str:
        """Say what it waits for; "" where for nothing."""
        if self._waits_for is None:
            return ""
        transfer, way = self._waits_for.transfer, self._waits_for.direction
        other = self.siblings.role_of(self._waits_for.other)
        if isinstance(self._waits_for, Give):
            return f"for {other} to begin the step"
        what = f"what {transfer.path} needs" if way is Pass.FORWARD else f"the gradient of what {transfer.path} needed"
        return f"for {what} from {other}"

    def compute(self, batch: Batch, wait: Callable[[], Steps[None]]) -> Steps[Computed | None]:
        """Its part of a step; `wait` is for the next arrival. None where a script has left its loop."""
        self._step += 1
        yield from self._begin_step()
        computed = yield from self._play(batch, self._part.play(batch), wait)
        if self._crossings is not None:
            for home in self._crossings.end():
                yield self._wake(home)
        return computed

    def _play(self, batch: Batch, play: PartSteps, wait: Callable[[], Steps[None]]) -> Steps[Computed | None]:
        answer, begins = None, True
        while True:
            try:
                asked = play.send(answer)
            except StopIteration as end:
                computed: Computed | None = end.value
                return computed
            answer = None
            match asked:
                case RunSegment():
                    yield Work(self._part.share(asked), begins)
                    begins = False
                case Give():
                    yield from self._give(asked, wait)
                case Take():
                    answer = yield from self._take(asked, wait)
                case AskScript():
                    answer = yield Compute(batch)

    def _crossing(self, asked: Give | Take) -> CrossingKey:
        backward = asked.direction is Pass.BACKWARD
        return CrossingKey(self._generation, self._step, asked.transfer.number, asked.microbatch, backward)

    def _give(self, given: Give, wait: Callable[[], Steps[None]]) -> Steps[None]:
        data, other, crossing = self._part.encode(given), given.other, self._crossing(given)
        to = self.siblings.role_of(other)
        if data is None:
            yield Send(to, Boundary(*crossing, 0, b""), Phantom(self._part.size(given)))
        elif self._crossings is not None:
            slot = self._part.slot(given)
            while not self._crossings.give(slot, other, data):
                yield from self._wait(given, wait)
            self._waits_for = None
            if self._crossings.sleeps(other):
                yield self._wake(other)
        else:
            data = data if self._part.copies is None else self._part.copies.leaving(data)
            sent = data.contiguous().reshape(-1).view(torch.uint8)
            parts = [sent[start : start + PART] for start in range(0, len(sent), PART)] or [sent]
            for left, part in zip(reversed(range(len(parts))), parts, strict=True):
                yield Send(to, Boundary(*crossing, left, part.numpy().tobytes()), Phantom(len(part)))

    def _take(self, wanted: Take, wait: Callable[[], Steps[None]]) -> Steps[torch.Tensor | None]:
        if self._crossings is None:
            crossing = self._crossing(wanted)
            while crossing not in self._here:
                yield from self._wait(wanted, wait)
            taken = self._part.decode(wanted, self._here.pop(crossing))
        else:
            slot, dtype, shape = self._part.slot(wanted), wanted.transfer.shape.dtype, self._part.shape(wanted)
            while True:
                over = self._crossings.ended(wanted.other)  # before what it has given is looked at
                if (taken := self._crossings.take(slot, dtype, shape)) is not None:
                    break
                if over:
                    raise apart(self.siblings.role, self.siblings.role_of(wanted.other))
                if not self._crossings.ended(wanted.other):  # it may have, before it could know that this one sleeps
                    yield from self._wait(wanted, wait)
        self._waits_for = None
        return taken

    def _wait(self, asked: Give | Take, wait: Callable[[], Steps[None]]) -> Steps[None]:
        """Wait for the next arrival, as something cannot cross yet.

        Raises:
            UsageError: it never will: the other's script has left the loop, and this one's waits for it there.
        """
        if self.siblings.role_of(asked.other) in self.siblings.left:
            raise apart(self.siblings.role, self.siblings.role_of(asked.other))
        self._waits_for = asked
        yield from wait()

    def arrive(self, told: Boundary) -> None:
        """Something that crosses to this partition is here, or a part of it; what is of the past is dropped."""
        crossing = CrossingKey(told.generation, told.step, told.transfer, told.microbatch, told.backward)
        if crossing.generation < self._generation:
            return
        parts = self._coming.setdefault(crossing, [])
        parts.append(told.data)
        if not told.left:
            self._here[crossing] = bytearray().join(self._coming.pop(crossing))


def gradient(split: SplitCompute | None, batch: Batch, wait: Callable[[], Steps[None]]) -> Steps[Computed | None]:
    """The gradient of a minibatch: of a split replica its part, together with the other partitions; None where a script
    has left its loop.
    """
    computed: Computed | None
    if split is None:
        computed = yield Compute(batch)
    else:
        computed = yield from split.compute(batch, wait)
    return computed


def apart(role: str, other: str) -> UsageError:
    """The error where another partition never makes a step that this one has begun."""
    return UsageError(
        f"the script of {other} has gone on from a minibatch, or has left the loop, and that of {role} waits for it "
        "there: all partitions of a replica do the same with a minibatch; leave what only one does out of the loop"
    )
