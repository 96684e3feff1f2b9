"""A replica's work: the minibatches dealt to it, its pushes, and its reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from distbelief.core.conversations.dealing import Progress, StreamStart
from distbelief.core.conversations.pushing import Push
from distbelief.core.effects import Batch, Compute, Computed, Payload, Send, Steps
from distbelief.core.portions import Portion
from distbelief.core.settings import Settings
from distbelief.errors import LossNotFinite
from distbelief.replica.split_compute import SplitCompute

REPORT_SECONDS = 0.25
"""Seconds of computing between two reports, beside those at the end of a portion."""
REPORTS = 1000
"""Most reports of all replicas in a second, beside those that ask for work."""


def report_seconds(replicas: int) -> float:
    """Return how many seconds each of so many replicas computes between two reports.

    >>> report_seconds(8), report_seconds(2000)
    (0.25, 2.0)
    """
    return max(REPORT_SECONDS, replicas / REPORTS)


# Work is dealt in portions and done in their order: by a count of steps the coordinator knows which minibatches are
# done. So returned portions are reported before later ones begin, and an ended epoch takes no more work, though a
# portion of it may still arrive.
class WorkQueue:
    """Work of one replica.

    >>> work = WorkQueue()
    >>> work.deal(Portion(epoch=0, first=5, count=1)); work.next(), work.next()
    (Batch(epoch=0, index=5), None)
    """

    def __init__(self) -> None:
        self.requested = False
        """True where a request for more work is open."""
        self.seconds = 0.0
        """Seconds of computing since the last report."""
        self._steps = 0
        self._portions: deque[Portion] = deque()
        self._ended = -1
        """Last epoch without more work."""
        self._returned: list[Portion] = []
        self._loss, self._losses = 0.0, 0

    def deal(self, portion: Portion) -> None:
        """Take a portion, unless its epoch has ended."""
        if portion.epoch > self._ended:
            self._portions.append(portion)
        self.requested = False

    def end(self, epoch: int) -> None:
        """End an epoch, and drop its work."""
        self._ended = epoch
        self._portions = deque(portion for portion in self._portions if portion.epoch > epoch)
        self._returned = [portion for portion in self._returned if portion.epoch > epoch]

    def give_back(self) -> None:
        """Return all unbegun work with the next report.

        >>> work = WorkQueue()
        >>> work.deal(Portion(epoch=0, first=5, count=3)); work.next(); work.give_back(); work.next()
        Batch(epoch=0, index=5)
        """
        self._returned += self._portions
        self._portions.clear()

    @property
    def runs_out(self) -> bool:
        """True where it is time to ask for more."""
        return not self.requested and len(self._portions) < 2  # one in reserve saves a wait

    @property
    def returns(self) -> bool:
        """True where returned work is not reported yet."""
        return bool(self._returned)

    def next(self) -> Batch | None:
        """Return the next minibatch, or None."""
        if not self._portions:
            return None
        portion, rest = self._portions.popleft().cut(1)
        if rest.count:
            self._portions.appendleft(rest)
        return Batch(portion.epoch, portion.first)

    def coming(self, most: int) -> list[Batch]:
        """Return the next minibatches, as far as they are dealt.

        >>> work = WorkQueue()
        >>> work.deal(Portion(epoch=0, first=5, count=3)); work.coming(2)
        [Batch(epoch=0, index=5), Batch(epoch=0, index=6)]
        """
        dealt = (Batch(portion.epoch, number) for portion in self._portions for number in portion.numbers)
        return list(islice(dealt, most))

    def add(self, report: Progress) -> None:
        """Add another partition's work to the next report."""
        self._loss += report.loss
        self._losses += report.losses

    def spend(self, seconds: float) -> None:
        """Add the computing of a step to the next report."""
        self.seconds += seconds
        self._steps += 1

    def count(self, loss: float) -> None:
        """Add the loss of a step to the next report."""
        self._loss += loss
        self._losses += 1

    def report(self, pushes: Pushes, wants: bool, start: StreamStart | None = None) -> Progress:
        """Make the next report; `wants` asks for more work, `start` reports the beginning of a stream."""
        self.requested |= wants
        steps, samples, count, dropped = pushes.take()
        mean, returned = self.seconds / max(1, self._steps), tuple(self._returned)
        report = Progress(steps, samples, count, self._loss, self._losses, wants, dropped, returned, start, mean)
        self.seconds = self._loss = 0.0
        self._steps = self._losses = 0
        self._returned.clear()
        return report


def gradient(split: SplitCompute | None, batch: Batch, wait: Callable[[], Steps[None]]) -> Steps[Computed | None]:
    """Compute a minibatch's gradient, or this partition's part of it; returns None where a script has left its loop."""
    if split is not None:
        return (yield from split.compute(batch, wait))
    computed: Computed | None = yield Compute(batch)
    return computed


def check_loss(role: str, loss: float, batch: Batch | None, step: int, what: str, settings: Settings) -> None:
    """Refuse, with `LossNotFinite`, a loss or a gradient's norm that is not finite."""
    if not math.isfinite(loss):
        where = f" (epoch {batch.epoch + 1}, minibatch {batch.index})" if batch else ""
        raise LossNotFinite(
            f"{role}: the {what} is {loss} at step {step}{where}; lower --lr (it is {settings.optimizer.lr:g}),"
            " clip with --clip-norm, or look for a division by zero in the model"
        )


@dataclass(slots=True)
class NextPush:
    """Contents of a push that is still accruing."""

    steps: int = 0
    samples: int = 0
    covered: int = 0
    """Minibatches, those without a step too."""
    held_steps: int = 0
    """Minibatches since the last step, without one of their own."""
    held_samples: int = 0
    seconds: float = 0.0
    """Seconds of computing its local steps."""

    def clear(self) -> None:
        """Begin the next push; minibatches that are held over go into it."""
        self.steps = self.samples = self.covered = 0


class _OwedPush:
    def __init__(self, slot: int, steps: int, samples: int, sent: dict[str, Send | None]) -> None:
        self.slot, self.steps, self.samples, self.dropped = slot, steps, samples, False
        self.sent = sent
        """Messages without an acknowledgement, by their receivers; None for those that have not left yet."""


NONE_LATE = _OwedPush(0, 0, 0, {})


# A push is done when every shard has acknowledged it, and counts for the coordinator only then: a minibatch whose push
# reached some shards is dealt again if the replica dies. Pushes are done in the order of their clocks, whatever the
# order of acknowledgements: a report only counts steps, and the coordinator takes that many from the beginning of what
# it dealt.
#
# Shards and partitions acknowledge alike, but a slot is free once the shards have read it.
class Pushes:
    """Pushes of one incarnation of a replica.

    Args:
        slots: number of gradient vectors.
        reports: whether the lead of the replica hears of each push that is done.
        again: whether a dropped push is made again, and its steps are not repeated.
    """

    def __init__(
        self, incarnation: int, shards: Iterable[str], slots: int, reports: bool = False, again: bool = False
    ) -> None:
        self.clock = 0
        """Number of pushes so far."""
        self.busy = [0] * slots
        """Number of shards that still read each slot."""
        self.acknowledged = dict.fromkeys(shards, 0)
        """Clock of each shard's last acknowledged push."""
        self._incarnation = incarnation
        self._waiting: deque[_OwedPush] = deque()
        self._steps = self._samples = self._pushes = 0
        self._dropped: list[tuple[int, int]] = []
        """Steps to repeat: the number of steps done before them, and their own number."""
        self._lacking = False
        """True where a push was dropped since the last steps that are done."""
        self._again, self._late = again, NONE_LATE
        """Push that was dropped, until it is made again."""
        self._reports, self._finished = reports, list[tuple[int, bool]]()

    @property
    def waiting(self) -> bool:
        """True while a push lacks an acknowledgement."""
        return bool(self._waiting)

    def make(self, slot: int, steps: int, samples: int, sent: dict[str, Send], parts: Mapping[str, Send]) -> list[Send]:
        """Make the next push, of messages `sent` to shards and `parts` to partitions; returns them all."""
        self.clock += 1
        self._late = NONE_LATE
        self.busy[slot] = len(sent)
        self._waiting.append(_OwedPush(slot, steps, samples, {**sent, **parts}))
        return [*sent.values(), *parts.values()]

    def owed(self, shard: str) -> list[Send]:
        """Return the messages without an acknowledgement of a shard."""
        return [message for push in self._waiting if (message := push.sent.get(shard)) is not None]

    def open(self, slot: int, steps: int, samples: int, shards: Iterable[str]) -> None:
        """Make the next push, whose messages leave one by one."""
        self.clock += 1
        self._waiting.append(_OwedPush(slot, steps, samples, dict.fromkeys(shards)))

    def part(self, shard: str, message: Push, payload: Payload) -> Send:
        """Return the message of the newest push to a shard, which leaves now."""
        sent = self._waiting[-1].sent[shard] = Send(shard, message, payload)
        return sent

    def applied(self, who: str, incarnation: int, clock: int, dropped: bool) -> int | None:
        """Note that a shard or a partition has applied or dropped a push; returns its slot once no shard reads it."""
        # acknowledgements of an earlier incarnation's push, and second ones, match no push here
        waiting, newest = self._waiting, self.clock
        oldest = newest - len(waiting) + 1
        if incarnation != self._incarnation or not oldest <= clock <= newest:
            return None
        push = waiting[clock - oldest]
        if push.sent.pop(who, None) is None:
            return None
        slot = push.slot
        push.dropped |= dropped
        if who in self.acknowledged:
            self.acknowledged[who] = clock
            self.busy[slot] -= 1
        while waiting and not waiting[0].sent:
            push = waiting.popleft()
            if self._reports:
                self._finished.append((newest - len(waiting), push.dropped))
            if push.dropped and self._again:
                self._late = push
                continue
            self._lacking |= push.dropped
            self._pushes += not push.dropped
            self._done(push.steps, push.samples)
        return None if self.busy[slot] else slot

    def close(self, steps: int, samples: int) -> None:
        """Count steps as done once all pushes so far are."""
        if self._waiting:
            self._waiting[-1].steps += steps
            self._waiting[-1].samples += samples
        else:
            self._done(steps, samples)

    def _done(self, steps: int, samples: int) -> None:
        """Count steps whose pushes are done, or are to be repeated where one was dropped."""
        if not steps:
            return
        if self._lacking:
            self._dropped.append((self._steps, steps))
        else:
            self._steps += steps
            self._samples += samples
        self._lacking = False

    @property
    def late(self) -> tuple[int, int]:
        """Steps and samples of a dropped push that is to be made again; no steps without one."""
        return self._late.steps, self._late.samples

    def repeat_late(self) -> None:
        """Have the steps of a dropped push repeated, since it is not made again."""
        late, self._late = self._late, NONE_LATE
        self._lacking |= late.steps > 0
        self._done(late.steps, late.samples)

    def pass_over(self, steps: int, samples: int) -> None:
        """Count steps without a push as done, while no push is on its way."""
        self._steps += steps
        self._samples += samples

    def count_applied(self, samples: int) -> None:
        """Count a step whose gradient is applied already, as a push that all shards have acknowledged."""
        self.clock += 1
        self._pushes += 1
        self.pass_over(1, samples)

    def finished(self) -> list[tuple[int, bool]]:
        """Return for the lead the pushes done since the last call, and whether each was dropped."""
        done, self._finished = self._finished, []
        return done

    def take(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        """Return steps, samples, pushes since the last call, and for each dropped push the steps before and in it."""
        done = self._steps, self._samples, self._pushes, tuple(self._dropped)
        self._steps = self._samples = self._pushes = 0
        self._dropped.clear()
        return done
