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
"""A replica reports its progress when it has computed for this long since its last report, and at the end of every
portion.
"""
REPORTS = 1000
"""A second, of all replicas together, beside those that ask for more: where there are many, each reports less often."""


def report_seconds(replicas: int) -> float:
    """Return the seconds that each of so many replicas computes between two reports.

    >>> report_seconds(8), report_seconds(2000)
    (0.25, 2.0)
    """
    return max(REPORT_SECONDS, replicas / REPORTS)


class Made(Protocol):
    """Counter of what was made of the work."""

    def take(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        """Since this was last asked: steps, samples, pushes, and of each that was dropped, after how many steps, and
        how many.
        """
        ...


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
        self._ended = -1  # the last epoch of which there is no more
        self._returned: list[Portion] = []
        self._loss, self._losses = 0.0, 0

    def deal(self, portion: Portion) -> None:
        """More work is here, unless it was on its way when the epoch had ended."""
        if portion.epoch > self._ended:
            self._portions.append(portion)
        self.asked = False

    def end(self, epoch: int) -> None:
        """There is no more of an epoch, whatever was dealt of it."""
        self._ended = epoch
        self._portions = deque(portion for portion in self._portions if portion.epoch > epoch)
        self._returned = [portion for portion in self._returned if portion.epoch > epoch]

    def give_back(self) -> None:
        """Nothing that was dealt is begun any more: the next report returns it.

        >>> work = WorkQueue()
        >>> work.deal(Portion(epoch=0, first=5, count=3)); work.next(); work.give_back(); work.next()
        Batch(epoch=0, index=5)
        """
        self._returned += self._portions
        self._portions.clear()

    @property
    def runs_out(self) -> bool:
        """True where it is time to ask for more: one portion is kept in reserve."""
        return not self.asked and len(self._portions) < 2

    @property
    def returns(self) -> bool:
        """True where something was given back that no report has told of: none of what follows it is begun before."""
        return bool(self._returned)

    def next(self) -> Batch | None:
        """The next minibatch; None where there is none."""
        if not self._portions:
            return None
        portion, rest = self._portions.popleft().cut(1)
        if rest.count:
            self._portions.appendleft(rest)
        return Batch(portion.epoch, portion.first)

    def coming(self, most: int) -> list[Batch]:
        """The minibatches that come next, as far as they are dealt.

        >>> work = WorkQueue()
        >>> work.deal(Portion(epoch=0, first=5, count=3)); work.coming(2)
        [Batch(epoch=0, index=5), Batch(epoch=0, index=6)]
        """
        dealt = (Batch(one.epoch, number) for one in self._portions for number in one.numbers)
        return list(islice(dealt, most))

    def add(self, report: Progress) -> None:
        """Add another partition's work to the next report."""
        self._loss += report.loss
        self._losses += report.losses

    def count(self, loss: float) -> None:
        """The loss of a step goes into the next report."""
        self._loss += loss
        self._losses += 1

    def report(self, made_by: Made, wants: bool, start: StreamStart | None = None) -> Progress:
        """Make the report of what was done since the last one; `wants` asks for more. `start` is how a stream began,
        where that is to be told.
        """
        self.asked |= wants
        steps, samples, made, dropped = made_by.take()
        report = Progress(steps, samples, made, self._loss, self._losses, wants, dropped, tuple(self._returned), start)
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
