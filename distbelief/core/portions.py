"""Portions: minibatches of an epoch, dealt to replicas on demand, and dealt again when a replica dies.

An epoch is a seeded permutation of the samples, cut at multiples of the batch size; a portion is a run of its
minibatches. Each minibatch is dealt once while no replica dies. It counts as done once all shards have acknowledged the
push with its gradient.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain, takewhile

import msgspec

from distbelief.core.records import Json
from distbelief.errors import RemoteProtocolError

PORTION_LIMIT = 32
"""Most minibatches in a portion: bounds what a death costs, and how long a fast replica waits at the end."""
OWN = 1 << 40
"""Numbers of minibatches reserved for each replica that has its own data: the most in an epoch."""
STREAM = -1
"""Size of data without a length."""


def cut_numbers(index: int, replicas: int, batches: int) -> range:
    """Return the numbers of replica `index`'s minibatches, of `batches` in all.

    >>> [cut_numbers(index, 3, 10) for index in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    return range(index * batches // replicas, (index + 1) * batches // replicas)


class Portion(msgspec.Struct, frozen=True, array_like=True, repr_omit_defaults=True):
    """Minibatch `first` of an epoch and each `every`th after it, `count` of them.

    >>> portion = Portion(0, 4, 3, every=2)
    >>> [*portion.numbers], portion.cut(1)
    ([4, 6, 8], (Portion(epoch=0, first=4, count=1, every=2), Portion(epoch=0, first=6, count=2, every=2)))
    """

    epoch: int
    first: int
    count: int
    every: int = 1

    @property
    def numbers(self) -> range:
        """Numbers of its minibatches."""
        return range(self.first, self.first + self.count * self.every, self.every)

    def cut(self, count: int) -> tuple[Portion, Portion]:
        """Return its first minibatches, at most `count`, and the rest."""
        count = min(count, self.count)
        rest = Portion(self.epoch, self.first + count * self.every, self.count - count, self.every)
        return Portion(self.epoch, self.first, count, self.every), rest


class WorkUnit(msgspec.Struct, frozen=True, array_like=True):
    """Portion of a batch that is dealt, computed, sent and counted as one, and the part of the batch that it is in."""

    portion: Portion
    part: int = 0


class AllotmentPlace(msgspec.Struct, frozen=True, array_like=True):
    """Progress of one replica in its allotment: minibatches `first` up to `first + count` of every epoch."""

    role: str
    first: int
    count: int
    epoch: int
    batch: int
    undone: tuple[Portion, ...]


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Position of a job in its data: portions that are not done, and the minibatch to deal after these."""

    epoch: int
    batch: int
    undone: tuple[Portion, ...]
    state: Json = {}
    """State of a batch method's coordinator: numbers, words and lists of them."""
    places: tuple[AllotmentPlace, ...] = ()
    """Progress of each replica with an allotment; `epoch`, `batch` and `undone` are unused then."""
    unmeasured: int = 0
    """Minibatches applied since an evaluation was last due by their number."""

    def earliest(self, role: str) -> int:
        """Return the earliest epoch that a replica may be dealt minibatches of.

        >>> Position(4, 0, (Portion(3, 7, 1),)).earliest("replica 0")
        3
        """
        places: list[AllotmentPlace] | list[Position]
        places = [place for place in self.places if place.role == role] or [*self.places] or [self]
        return min(epoch for place in places for epoch in (place.epoch, *(portion.epoch for portion in place.undone)))


START = Position(0, 0, ())


class StartingPoint(msgspec.Struct, frozen=True, array_like=True):
    """State from which a job goes on."""

    checkpoint: str = ""
    """Checkpoint to load; "" for a fresh job."""
    position: Position = START
    """Position in the data at that checkpoint."""
    samples: int = 0
    """Samples that are done at that checkpoint."""
    number: int = 1
    """Number of the next checkpoint."""


ANEW = StartingPoint()


class Dealer:
    """Dealer of `epochs` epochs of `batches` minibatches to `replicas` replicas.

    Portions get smaller with what is left; with 0 replicas they are as large as asked for.

    >>> dealer = Dealer(batches=3, epochs=1, replicas=1)
    >>> dealer.deal("replica 0"), dealer.deal("replica 0")
    (Portion(epoch=0, first=0, count=1), Portion(epoch=0, first=1, count=1))
    >>> dealer.done("replica 0", 1), dealer.lost("replica 0"), dealer.deal("replica 1")
    ([], 1, Portion(epoch=0, first=1, count=1))
    """

    def __init__(self, batches: int, epochs: int, replicas: int, position: Position = START) -> None:
        self.batches, self.epochs = batches, epochs
        self._epoch, self._batch = position.epoch, position.batch
        self._again: deque[Portion] = deque(position.undone)
        self._left: dict[int, int] = {}
        for portion in position.undone:
            self._left[portion.epoch] = self._left.get(portion.epoch, 0) + portion.count
        if position.epoch < epochs:
            self._left[position.epoch] = self._left.get(position.epoch, 0) + batches - position.batch
        self.replicas = replicas
        self._held: dict[str, deque[Portion]] = {}

    def _forward(self, count: int) -> Portion:
        """Deal the next minibatches of the epoch under way."""
        portion = Portion(self._epoch, self._batch, count)
        self._batch += count
        if self._batch == self.batches:
            self._next_epoch()
        return portion

    def _next_epoch(self) -> None:
        self._epoch, self._batch = self._epoch + 1, 0
        if self._epoch < self.epochs:
            self._left.setdefault(self._epoch, self.batches)

    def _count(self, epoch: int, done: int) -> bool:
        """Count minibatches of an epoch that are done; return whether the epoch is."""
        self._left[epoch] -= done
        if self._left[epoch]:
            return False
        del self._left[epoch]
        return True

    @property
    def epoch(self) -> int:
        """Earliest epoch that is not done."""
        return min(self._left, default=self.epochs)

    def validate(self, free: Iterable[Portion] = ()) -> None:
        """Assert that each minibatch is to come, held, to be dealt again, `free` or done."""
        out = Counter[int]()
        for portion in chain(free, self._again, *self._held.values()):
            out[portion.epoch] += portion.count
        if self._epoch < self.epochs:
            out[self._epoch] += self.batches - self._batch
        assert +out == self._left, f"{dict(+out)} minibatches are not done by epoch, and {self._left} are counted"

    @property
    def completed(self) -> int:
        """Number of epochs that are done."""
        return self._epoch + (self._epoch < self.epochs) - len(self._left)

    @property
    def finished(self) -> bool:
        """True once every minibatch of every epoch is done."""
        return not self._left

    def deal(self, who: str, at_most: int = PORTION_LIMIT) -> Portion | None:
        """Return a replica's next portion, of the earliest epoch with any left; None once all is dealt."""
        again = min(self._again, key=lambda portion: portion.epoch, default=None)
        if again is not None:
            self._again.remove(again)
            portion = self._take(again, at_most)
        elif self._epoch < self.epochs:
            left = self.batches - self._batch
            # A quarter of a fair share: portions are large at first, since each costs a message, and small at the end,
            # so that no replica works long while the others have nothing left.
            part = left // (4 * self.replicas) if self.replicas else left
            portion = self._forward(max(1, min(part, PORTION_LIMIT, at_most)))
        else:
            return None
        self._held.setdefault(who, deque()).append(portion)
        return portion

    def _take(self, portion: Portion, at_most: int) -> Portion:
        """Return the first `at_most` minibatches of a portion; the rest waits to be dealt again."""
        head, rest = portion.cut(at_most)
        if rest.count:
            self._again.appendleft(rest)
        return head

    def done(self, who: str, steps: int) -> list[int]:
        """Note that a replica's next `steps` minibatches are applied at all shards; return the epochs completed."""
        if steps < 0:
            raise RemoteProtocolError(f"{who} reports {steps} steps")
        return [portion.epoch for portion in self._next(who, steps) if self._count(portion.epoch, portion.count)]

    def report(self, who: str, steps: int, dropped: tuple[tuple[int, int], ...] = ()) -> list[int]:
        """Note that a replica's next `steps` minibatches are applied; return the completed epochs.

        Each (at, count) in `dropped` is a run of `count` minibatches that were dropped after `at` applied ones. They
        are dealt again.

        >>> dealer = Dealer(batches=2, epochs=1, replicas=1)
        >>> _ = dealer.deal("replica 0"), dealer.deal("replica 0")
        >>> dealer.report("replica 0", 1, ((0, 1),)), dealer.deal("replica 1")
        ([], Portion(epoch=0, first=0, count=1))
        """
        completed: list[int] = []
        past = 0
        for at, vain in dropped:
            completed += self.done(who, at - past)
            past = at
            completed += self._put_back(self._next(who, vain))
        return completed + self.done(who, steps - past)

    def _put_back(self, vain: list[Portion]) -> list[int]:
        """Take back minibatches that were dropped; return the epochs that this completes."""
        self._again.extend(vain)
        return []

    def _next(self, who: str, steps: int) -> list[Portion]:
        """Take the next minibatches from a replica's portions."""
        # a number of minibatches is enough: a replica computes its portions in the order in which they were dealt
        held, portions = self._held.get(who, deque()), []
        while steps:
            if not held:
                raise RemoteProtocolError(f"{who} reports {steps} more steps than it was dealt")
            portion, rest = held.popleft().cut(steps)
            if rest.count:
                held.appendleft(rest)
            portions.append(portion)
            steps -= portion.count
        return portions

    def give_back(self, who: str, portions: tuple[Portion, ...]) -> None:
        """Take back ends of portions that a replica has not begun; they are dealt next.

        >>> dealer = Dealer(batches=32, epochs=1, replicas=1)
        >>> dealer.deal("replica 0"), dealer.give_back("replica 0", (Portion(0, 2, 6),)), dealer.deal("replica 1", 4)
        (Portion(epoch=0, first=0, count=8), None, Portion(epoch=0, first=2, count=4))
        """
        held = self._held.get(who, deque())
        for end_portion in reversed(portions):
            cuts = [portion.cut(max(0, portion.count - end_portion.count)) for portion in held]
            at = next((i for i, (_, end) in enumerate(cuts) if end == end_portion), -1)
            if at < 0 or not end_portion.count:
                raise RemoteProtocolError(f"{who} gives back {end_portion}, and was dealt no portion with that end")
            if (kept := cuts[at][0]).count:
                held[at] = kept
            else:
                del held[at]
            self._again.appendleft(end_portion)

    def undealt(self, who: str) -> int:
        """Return how many minibatches are left to deal to a replica in the earliest epoch that is not done."""
        to_come = self.batches - self._batch if self._epoch == self.epoch < self.epochs else 0
        return to_come + sum(portion.count for portion in self._again if portion.epoch == self.epoch)

    def held(self, who: str) -> int:
        """Return how many minibatches a replica was dealt and has not done."""
        return sum(portion.count for portion in self._held.get(who, ()))

    def lost(self, who: str) -> int:
        """Put back the minibatches that a dead replica held; return their number."""
        held = self._held.pop(who, deque())
        self._again.extendleft(reversed(held))
        return sum(portion.count for portion in held)

    def position(self) -> Position:
        """Return the present position in the data, for a checkpoint."""
        held = [portion for portions in self._held.values() for portion in portions]
        return Position(self._epoch, self._batch, (*held, *self._again))


class RoundDealer(Dealer):
    """Dealer for rounds: a round's minibatches follow each other in the epoch, in the order of the replicas.

    >>> dealer = RoundDealer(batches=6, epochs=1)
    >>> dealer.deal("replica 1", 3, first=1, every=2), dealer.undealt("replica 0")
    (Portion(epoch=0, first=1, count=3, every=2), 3)
    >>> dealer.lost("replica 1"), dealer.deal("replica 0", 2, first=0, every=2), dealer.deal("replica 2", 2)
    (3, Portion(epoch=0, first=0, count=2, every=2), Portion(epoch=0, first=1, count=1))
    """

    def __init__(self, batches: int, epochs: int, position: Position = START) -> None:
        super().__init__(batches, epochs, 0, position)
        self._free: set[int] = set()
        """Minibatches of the earliest epoch that is not done, of lower numbers than the next, that no replica holds."""

    def _collect(self) -> None:
        """Move what was put back of that epoch to the free minibatches."""
        for portion in [portion for portion in self._again if portion.epoch == self.epoch]:
            self._again.remove(portion)
            self._free.update(portion.numbers)

    def deal(self, who: str, at_most: int = PORTION_LIMIT, first: int = -1, every: int = 1) -> Portion | None:
        """Deal minibatch `first` of the epoch and each `every`th after it, as far as these are free.

        If `first` is not free, deal the earliest free one; if the epoch ends before it, the last free one.
        """
        self._collect()
        to_come = range(self._batch, self.batches) if self._epoch == self.epoch < self.epochs else range(0)
        # A replica's minibatch of a round follows from its place among the replicas, not from which asks first, so that
        # a run can be repeated. After a death another may hold that minibatch.
        if first not in self._free and first not in to_come:
            which, ends = (max, to_come[-1:]) if first >= self.batches else (min, to_come[:1])
            first, every = which([*self._free, *ends], default=-1), 1
        numbers = range(first, first + at_most * every, every)
        free = list(takewhile(lambda number: number in self._free or number in to_come, numbers))
        if not free:
            return None
        portion = Portion(self.epoch, first, len(free), every)
        if free[-1] in to_come:
            self._free.update(to_come[: free[-1] + 1 - self._batch])
            self._forward(free[-1] + 1 - self._batch)
        self._free.difference_update(free)
        self._held.setdefault(who, deque()).append(portion)
        return portion

    def undealt(self, who: str) -> int:
        """Return how many minibatches are left to deal, with the free ones."""
        self._collect()
        return super().undealt(who) + len(self._free)

    def validate(self, free: Iterable[Portion] = ()) -> None:
        """Assert the invariants of `Dealer`, with the free minibatches."""
        super().validate((*free, *(Portion(self.epoch, number, 1) for number in self._free)))

    def position(self) -> Position:
        """Return the position with free and held minibatches as plain runs, from which any dealer can go on."""
        self._collect()
        position = super().position()
        # a job of another strategy may read the checkpoint, and its dealer knows no strides
        apart = [portion for portion in position.undone if portion.every > 1]
        runs: list[Portion] = []
        for number in sorted(self._free.union(*(portion.numbers for portion in apart))):
            if runs and runs[-1].numbers.stop == number:
                runs[-1] = Portion(self.epoch, runs[-1].first, runs[-1].count + 1)
            else:
                runs.append(Portion(self.epoch, number, 1))
        rest = [portion for portion in position.undone if portion.every == 1]
        return Position(position.epoch, position.batch, (*runs, *rest))
