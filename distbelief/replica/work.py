"""A replica's work: the minibatches that it was dealt, and what it reports of them."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import Protocol

from distbelief.core.conversations.dealing import Progress, StreamStart
from distbelief.core.effects import Batch
from distbelief.core.portions import Portion
from distbelief.errors import LossNotFinite

REPORT_SECONDS = 0.25
"""Seconds that a replica computes between two reports, beside those at the end of a portion."""
REPORTS = 1000
"""Most reports of all replicas together in a second, beside those that ask for more."""


def report_seconds(replicas: int) -> float:
    """Return the seconds that each of so many replicas computes between two reports.

    >>> report_seconds(8), report_seconds(2000)
    (0.25, 2.0)
    """
    return max(REPORT_SECONDS, replicas / REPORTS)


class Made(Protocol):
    """Counter of what was made of the work."""

    def take(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        """Return steps, samples, pushes and dropped pushes since the last call, as `Pushes.take` does."""


# Work is dealt in portions and done in their order: by a count of steps the coordinator knows which minibatches are
# done. So what is given back is reported before anything behind it is begun, and an epoch that has ended takes no more
# work, though a portion of it may still arrive.
class WorkQueue:
    """The work of one replica.

    >>> work = WorkQueue()
    >>> work.deal(Portion(epoch=0, first=5, count=1)); work.next(), work.next()
    (Batch(epoch=0, index=5), None)
    """

    def __init__(self) -> None:
        self.asked = False
        """True where more was asked for, and is not here."""
        self.seconds = 0.0
        """Seconds of computing, since the last report."""
        self._portions: deque[Portion] = deque()
        self._ended = -1
        """Last epoch of which there is no more."""
        self._returned: list[Portion] = []
        self._loss, self._losses = 0.0, 0

    def deal(self, portion: Portion) -> None:
        """Take a portion, unless its epoch has ended."""
        if portion.epoch > self._ended:
            self._portions.append(portion)
        self.asked = False

    def end(self, epoch: int) -> None:
        """End an epoch, whatever was dealt of it."""
        self._ended = epoch
        self._portions = deque(portion for portion in self._portions if portion.epoch > epoch)
        self._returned = [portion for portion in self._returned if portion.epoch > epoch]

    def give_back(self) -> None:
        """Give back all that is not begun, with the next report.

        >>> work = WorkQueue()
        >>> work.deal(Portion(epoch=0, first=5, count=3)); work.next(); work.give_back(); work.next()
        Batch(epoch=0, index=5)
        """
        self._returned += self._portions
        self._portions.clear()

    @property
    def runs_out(self) -> bool:
        """True where it is time to ask for more."""
        return not self.asked and len(self._portions) < 2  # one is kept in reserve, so that asking costs no wait

    @property
    def returns(self) -> bool:
        """True where something was given back that is not reported yet."""
        return bool(self._returned)

    def next(self) -> Batch | None:
        """Return the next minibatch; None where there is none."""
        if not self._portions:
            return None
        portion, rest = self._portions.popleft().cut(1)
        if rest.count:
            self._portions.appendleft(rest)
        return Batch(portion.epoch, portion.first)

    def coming(self, most: int) -> list[Batch]:
        """Return the minibatches that come next, as far as they are dealt.

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

    def count(self, loss: float) -> None:
        """Add the loss of a step to the next report."""
        self._loss += loss
        self._losses += 1

    def report(self, made_by: Made, wants: bool, start: StreamStart | None = None) -> Progress:
        """Make the report since the last one; `wants` asks for more, `start` tells how a stream began."""
        self.asked |= wants
        steps, samples, pushes, dropped = made_by.take()
        report = Progress(
            steps, samples, pushes, self._loss, self._losses, wants, dropped, tuple(self._returned), start
        )
        self.seconds = self._loss = 0.0
        self._losses = 0
        self._returned.clear()
        return report


def check_loss(role: str, loss: float, batch: Batch | None, step: int, what: str, lr: float) -> None:
    """Refuse a loss, or the norm of a gradient, that is no finite number.

    Raises:
        LossNotFinite: naming role, step, minibatch and remedy.
    """
    if not math.isfinite(loss):
        where = f" (epoch {batch.epoch + 1}, minibatch {batch.index})" if batch else ""
        raise LossNotFinite(
            f"{role}: the {what} is {loss} at step {step}{where}; lower --lr (it is {lr:g}),"
            " clip with --clip-norm, or look for a division by zero in the model"
        )
