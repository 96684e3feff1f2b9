"""A split replica's step at one partition: it runs its segments, gives what crosses to others, and takes what comes."""

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
        """Most bytes of each thing that may cross in a step; none where nothing is computed."""

    def play(self, batch: Batch) -> PartSteps:
        """Play this partition's part of a step; returns None where a script has left its loop."""
        ...

    def share(self, run: RunSegment) -> float:
        """Return a segment's share of the work of a step."""

    def slot(self, crossing: Give | Take) -> int:
        """Return its number among all things that cross in a step."""

    def size(self, crossing: Give | Take) -> int:
        """Return the number of bytes that cross."""

    def encode(self, give: Give) -> torch.Tensor | None:
        """Encode what crosses, where this partition computes; None where nothing is computed."""

    def shape(self, crossing: Give | Take) -> tuple[int, ...]:
        """Return the shape of what crosses."""

    def decode(self, take: Take, data: bytearray) -> torch.Tensor | None:
        """Decode what has crossed, where this partition computes; None where nothing is computed."""


class CrossingKey(NamedTuple):
    """Key of something that crosses between two partitions."""

    generation: int
    """Generation of the job."""
    step: int
    """Step of the replica, since then."""
    transfer: int
    microbatch: int
    backward: bool


# A step is a generator of the part, which asks for a segment to be run, for something to be given or to be taken. On
# one host what crosses lies in memory that the partitions share, and a message only wakes a sleeping one. Otherwise it
# is sent in parts and kept by its key until it is asked for: another partition may be a step ahead, or already in the
# job's next generation, and sends nothing twice.
class SplitCompute:
    """One partition's steps.

    Args:
        siblings: the other partitions.
        part: the part of the model that this one computes.
        crossings: memory that it shares with the others, where they are on one host; else what crosses is sent.
    """

    def __init__(self, siblings: Siblings, part: SplitPart, crossings: Crossings | None = None) -> None:
        self.siblings, self._part, self._crossings = siblings, part, crossings
        self._generation = self._step = 0
        self._here: dict[CrossingKey, bytearray] = {}
        """Bytes that are here and not taken."""
        self._coming: dict[CrossingKey, list[bytes]] = {}
        """Parts of what is not all here."""
        self._waits_for: Give | Take | None = None

    def begin(self, generation: int) -> list[Send]:
        """Begin a generation of the job; what is left of those before is dropped."""
        self._generation, self._step, self._waits_for = generation, 0, None
        self._here = {key: data for key, data in self._here.items() if key.generation >= generation}
        self._coming = {key: parts for key, parts in self._coming.items() if key.generation >= generation}
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
        """Play this partition's part of a step; returns None where a script has left its loop."""
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
                effect = play.send(answer)
            except StopIteration as end:
                computed: Computed | None = end.value
                return computed
            answer = None
            match effect:
                case RunSegment():
                    yield Work(self._part.share(effect), begins)
                    begins = False
                case Give():
                    yield from self._give(effect, wait)
                case Take():
                    answer = yield from self._take(effect, wait)
                case AskScript():
                    answer = yield Compute(batch)

    def _key(self, crossing: Give | Take) -> CrossingKey:
        backward = crossing.direction is Pass.BACKWARD
        return CrossingKey(self._generation, self._step, crossing.transfer.number, crossing.microbatch, backward)

    def _give(self, give: Give, wait: Callable[[], Steps[None]]) -> Steps[None]:
        data, other, key = self._part.encode(give), give.other, self._key(give)
        to = self.siblings.role_of(other)
        if data is None:
            yield Send(to, Boundary(*key, 0, b""), Phantom(self._part.size(give)))
        elif self._crossings is not None:
            slot = self._part.slot(give)
            while not self._crossings.give(slot, other, data):  # the other has not begun the step: it reads the last
                yield from self._wait(give, wait)
            self._waits_for = None
            if self._crossings.sleeps(other):
                yield self._wake(other)
        else:
            sent = data.cpu().contiguous().reshape(-1).view(torch.uint8)
            parts = [sent[start : start + PART] for start in range(0, len(sent), PART)] or [sent]
            for left, part in zip(reversed(range(len(parts))), parts, strict=True):
                yield Send(to, Boundary(*key, left, part.numpy().tobytes()), Phantom(len(part)))

    def _take(self, take: Take, wait: Callable[[], Steps[None]]) -> Steps[torch.Tensor | None]:
        if self._crossings is None:
            key = self._key(take)
            while key not in self._here:
                yield from self._wait(take, wait)
            value = self._part.decode(take, self._here.pop(key))
        else:
            # Ask whether the other has ended the step before looking at its slot: in the other order it could give and
            # end in between, and would pass for one that never gives.
            slot, dtype, shape = self._part.slot(take), take.transfer.shape.dtype, self._part.shape(take)
            while True:
                over = self._crossings.ended(take.other)
                if (value := self._crossings.take(slot, dtype, shape)) is not None:
                    break
                if over:
                    raise apart(self.siblings.role, self.siblings.role_of(take.other))
                if not self._crossings.ended(take.other):  # it may have, before it could know that this one sleeps
                    yield from self._wait(take, wait)
        self._waits_for = None
        return value

    def _wait(self, crossing: Give | Take, wait: Callable[[], Steps[None]]) -> Steps[None]:
        """Wait for the next arrival, as something cannot cross yet.

        Raises:
            UsageError: it never will: the other's script has left the loop, and this one's waits for it there.
        """
        if self.siblings.role_of(crossing.other) in self.siblings.left:
            raise apart(self.siblings.role, self.siblings.role_of(crossing.other))
        self._waits_for = crossing
        yield from wait()

    def arrive(self, message: Boundary) -> None:
        """Take a part of something that crosses to this partition; what is of a generation before is dropped."""
        key = CrossingKey(message.generation, message.step, message.transfer, message.microbatch, message.backward)
        if key.generation < self._generation:
            return
        parts = self._coming.setdefault(key, [])
        parts.append(message.data)
        if not message.left:
            self._here[key] = bytearray().join(self._coming.pop(key))


def gradient(split: SplitCompute | None, batch: Batch, wait: Callable[[], Steps[None]]) -> Steps[Computed | None]:
    """Compute a minibatch's gradient, or this partition's part of it; returns None where a script has left its loop."""
    computed: Computed | None
    if split is None:
        computed = yield Compute(batch)
    else:
        computed = yield from split.compute(batch, wait)
    return computed


def apart(role: str, other: str) -> UsageError:
    """Make the error of a partition whose step another never makes."""
    return UsageError(
        f"the script of {other} has gone on from a minibatch, or has left the loop, and that of {role} waits for it "
        "there: all partitions of a replica do the same with a minibatch; leave what only one does out of the loop"
    )
