"""A split replica's step at one partition: it runs its segments, gives what crosses to others, and takes what comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from distbelief.core.conversations.partitioning import Boundary, Crossed
from distbelief.core.effects import Batch, Compute, Computed, Phantom, Send, Work
from distbelief.errors import UsageError
from distbelief.fabric.crossings import Crossings
from distbelief.replica.part import Part
from distbelief.replica.siblings import Siblings
from distbelief.replica.steps import Steps
from distbelief.schedules.pipeline import Action, Crossing, Pass, SegmentTask

PART = 1 << 20
"""Most bytes of what crosses in one message."""


class CrossingKey(NamedTuple):
    """Key of something that crosses between two partitions."""

    generation: int
    """Generation of the job."""
    step: int
    """Step of the replica, since then."""
    transfer: int
    microbatch: int
    backward: bool


# A step is two generators, one in the other. `compute` owns the step: its number, when it begins and ends for the
# others, and whose word says what is computed, the part's own or that of a script. `_play` owns its actions: it plays
# them in the order of the pipeline, and lets the replica's story go on where one cannot cross yet.
#
# On one host what crosses lies in memory that the partitions share, and a message only wakes a sleeping one. Otherwise
# it is sent in parts and kept by its key until it is asked for: another partition may be a step ahead, or already in
# the job's next generation, and sends nothing twice.
class SplitCompute:
    """One partition's steps.

    Args:
        siblings: the other partitions.
        part: the part of the replica that this one computes.
        crossings: memory that it shares with the others, where they are on one host; else what crosses is sent.
    """

    def __init__(self, siblings: Siblings, part: Part, crossings: Crossings | None = None) -> None:
        self.siblings, self._part, self._crossings = siblings, part, crossings
        self._generation = self._step = 0
        self._worked = False
        """True once something was computed in this step."""
        self._here: dict[CrossingKey, bytearray] = {}
        """Bytes that are here and not taken."""
        self._coming: dict[CrossingKey, list[bytes]] = {}
        """Parts of what is not all here."""
        self._waits_for: Crossing | None = None

    def begin(self, generation: int) -> list[Send]:
        """Begin a generation of the job; what is left of those before is dropped."""
        self._generation, self._step, self._waits_for = generation, 0, None
        self._here = {key: data for key, data in self._here.items() if key.generation >= generation}
        self._coming = {key: parts for key, parts in self._coming.items() if key.generation >= generation}
        return self._begin_step()

    def _begin_step(self) -> list[Send]:
        if self._crossings is None:
            return []
        return [self._wake(partition) for partition in self._crossings.begin(self.siblings.moment(self._step))]

    def _wake(self, partition: int) -> Send:
        return Send(self.siblings.role_of(partition), Crossed())

    def waits(self) -> str:
        """Say what it waits for; "" where for nothing."""
        if self._waits_for is None:
            return ""
        path, (source, target) = self._part.transfer(self._waits_for).path, self._part.ends(self._waits_for)
        if source == self._part.partition:
            return f"for {self.siblings.role_of(target)} to begin the step"
        forward = self._waits_for.direction is Pass.FORWARD
        what = f"what {path} needs" if forward else f"the gradient of what {path} needed"
        return f"for {what} from {self.siblings.role_of(source)}"

    def compute(self, batch: Batch, wait: Callable[[], Steps[None]]) -> Steps[Computed | None]:
        """Compute this partition's part of a step; returns None where a script has left its loop."""
        self._step += 1
        self._worked = False
        yield from self._begin_step()
        computed: Computed | None
        if self._part.scripted:
            while isinstance(answer := (yield Compute(batch)), Sequence):
                yield from self._play(answer, wait)
            computed = answer
        else:
            self._part.begin(batch)
            yield from self._play(self._part.actions(), wait)
            computed = self._part.end()
        if self._crossings is not None:
            for partition in self._crossings.end():
                yield self._wake(partition)
        return computed

    def _play(self, actions: Sequence[Action], wait: Callable[[], Steps[None]]) -> Steps[None]:
        """Play actions in order.

        Raises:
            UsageError: something will never cross: the other's script has left the loop, and this one's waits for it.
        """
        for action in actions:
            if isinstance(action, SegmentTask):
                yield Work(self._part.share(action), not self._worked)
                self._worked = True
                self._part.run(action)
                continue
            source, target = self._part.ends(action)
            gives = source == self._part.partition
            data = self._part.give(action) if gives else None
            while (sends := self._given(action, data) if gives else self._taken(action)) is None:
                if (other := self.siblings.role_of(target if gives else source)) in self.siblings.left:
                    raise apart(self.siblings.role, other)
                self._waits_for = action
                yield from wait()
            self._waits_for = None
            yield from sends

    def _given(self, crossing: Crossing, data: torch.Tensor | None) -> Iterable[Send] | None:
        """Give something, and return what to send; None where the other, who has not begun the step, reads the last."""
        _, target = self._part.ends(crossing)
        if data is None:
            phantom = Phantom(self._part.size(crossing))
            return [Send(self.siblings.role_of(target), Boundary(*self._key(crossing), 0, b""), phantom)]
        if self._crossings is None:
            return self._sent(crossing, data)
        if not self._crossings.give(self._part.slot(crossing), target, data):
            return None
        return [self._wake(target)] if self._crossings.sleeps(target) else []

    def _sent(self, crossing: Crossing, data: torch.Tensor) -> Iterable[Send]:
        """Messages of what crosses, in parts, each made when it is sent."""
        to, key = self.siblings.role_of(self._part.ends(crossing)[1]), self._key(crossing)
        sent = data.cpu().contiguous().reshape(-1).view(torch.uint8)
        parts = [sent[start : start + PART] for start in range(0, len(sent), PART)] or [sent]
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            yield Send(to, Boundary(*key, left, part.numpy().tobytes()), Phantom(len(part)))

    def _taken(self, crossing: Crossing) -> Iterable[Send] | None:
        """Take something; None where it is not here yet.

        Raises:
            UsageError: the other has ended the step, and never gives it.
        """
        if self._crossings is None:
            if (data := self._here.pop(self._key(crossing), None)) is None:
                return None
            self._part.take(crossing, self._part.decode(crossing, data))
            return ()
        # Ask whether the other has ended the step before looking at its slot: in the other order it could give and end
        # in between, and would pass for one that never gives.
        slot, dtype = self._part.slot(crossing), self._part.transfer(crossing).shape.dtype
        source, _ = self._part.ends(crossing)
        while True:
            over = self._crossings.ended(source)
            if (value := self._crossings.take(slot, dtype, self._part.shape(crossing))) is not None:
                self._part.take(crossing, value)
                return ()
            if over:
                raise apart(self.siblings.role, self.siblings.role_of(source))
            if not self._crossings.ended(source):  # it may have, before it could know that this one sleeps
                return None

    def _key(self, crossing: Crossing) -> CrossingKey:
        backward = crossing.direction is Pass.BACKWARD
        return CrossingKey(self._generation, self._step, crossing.boundary, crossing.microbatch, backward)

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
    return _whole(batch) if split is None else split.compute(batch, wait)


def _whole(batch: Batch) -> Steps[Computed | None]:
    computed: Computed | None = yield Compute(batch)
    return computed


def apart(role: str, other: str) -> UsageError:
    """Make the error of a partition whose step another never makes."""
    return UsageError(
        f"the script of {other} has gone on from a minibatch, or has left the loop, and that of {role} waits for it "
        "there: all partitions of a replica do the same with a minibatch; leave what only one does out of the loop"
    )
