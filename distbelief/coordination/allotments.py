"""Allotments: minibatches that belong to one replica, dealt to it alone and in order, and again after its death.

An allotment is a range of numbers, the same in every epoch. If all replicas have the same data, it is a part of their
minibatches. If each has its own data, or a stream, no two replicas share a number. A stream has no length: in each
epoch the replica reports where it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from distbelief.core.portions import OWN, PORTION_LIMIT, START, AllotmentPlace, Dealer, Portion, Position
from distbelief.errors import RemoteProtocolError, UsageError


def own_numbers(index: int, count: int = OWN) -> range:
    """Return the numbers of replica `index`'s minibatches if each replica has its own data.

    >>> own_numbers(1, 3)[2] % OWN, own_numbers(1)[-1] < own_numbers(2)[0]
    (2, True)
    """
    return range(index * OWN, index * OWN + count)


class Allotment(Dealer):
    """Dealer of one replica's minibatches; after its death, those left undone come first.

    Args:
        numbers: those of its minibatches, in every epoch.
        epochs: the job's.
        position: where it continues.
        in_order: skip minibatches whose gradients were lost, as for a stream: data read in order are read once.
        shrinks: whether portions get smaller towards the end.

    >>> allotment = Allotment(range(8, 11), epochs=1)
    >>> allotment.deal("replica 2"), allotment.deal("replica 2"), allotment.lost("replica 2")
    (Portion(epoch=0, first=8, count=1), Portion(epoch=0, first=9, count=1), 2)
    >>> allotment.deal("replica 2"), allotment.deal("replica 2"), allotment.end("replica 2", 0, 9)
    (Portion(epoch=0, first=8, count=1), Portion(epoch=0, first=9, count=1), None)
    >>> allotment.done("replica 2", 1), allotment.finished
    ([0], True)
    """

    def __init__(
        self, numbers: range, epochs: int, position: Position = START, in_order: bool = False, shrinks: bool = True
    ) -> None:
        super().__init__(len(numbers), epochs, int(shrinks), position)
        self._first, self._in_order = numbers.start, in_order or len(numbers) == OWN

    @property
    def numbers(self) -> range:
        """Numbers of its minibatches, in every epoch."""
        return range(self._first, self._first + self.batches)

    def _forward(self, count: int) -> Portion:
        portion = super()._forward(count)
        return Portion(portion.epoch, self._first + portion.first, portion.count)

    def _put_back(self, vain: list[Portion]) -> list[int]:
        if not self._in_order:
            return super()._put_back(vain)
        return [portion.epoch for portion in vain if self._count(portion.epoch, portion.count)]

    def end(self, who: str, epoch: int, number: int) -> None:
        """End an epoch before minibatch `number`: the replica has no more data.

        A minibatch that the replica does not hold is refused.
        """
        held = self._held.get(who, deque())
        if not any(
            portion.epoch == epoch and portion.first <= number < portion.first + portion.count for portion in held
        ):
            raise RemoteProtocolError(
                f"{who} says that its data end at minibatch {number} of epoch {epoch}, which it does not hold"
            )
        # Portions may have been dealt beyond the end. Cut them there, even those that wait to be dealt again, and count
        # again what is left of the epoch.
        left = 0
        for queue in (held, self._again):
            kept = [_before(portion, number) if portion.epoch == epoch else portion for portion in queue]
            queue.clear()
            queue.extend(portion for portion in kept if portion.count)
            left += sum(portion.count for portion in queue if portion.epoch == epoch)
        if epoch == self._epoch:
            self._next_epoch()
        self._left[epoch] = left
        self._count(epoch, 0)

    @property
    def left(self) -> int:
        """Number of minibatches that are not done; -1 for a stream."""
        epochs_to_come = max(0, self.epochs - self._epoch - 1)
        return -1 if self.batches == OWN else sum(self._left.values()) + epochs_to_come * self.batches

    def place(self, who: str) -> AllotmentPlace:
        """Return the replica's present place in its allotment."""
        position = self.position()
        return AllotmentPlace(who, self._first, self.batches, position.epoch, position.batch, position.undone)


def _before(portion: Portion, number: int) -> Portion:
    return Portion(portion.epoch, portion.first, max(0, min(portion.count, number - portion.first)))


class Allotments:
    """Dealer of every replica's allotment, with the methods of a `Dealer`.

    Args:
        epochs: the job's.
        awaited: replicas whose allotments belong to the job, whenever they join.
        in_order, shrinks: see `Allotment`.
        places: each known replica's place in its allotment, from which the job continues.

    >>> allotments = Allotments(1, ["replica 0", "replica 1"])
    >>> allotments.add("replica 0", range(2)), allotments.add("replica 1", range(2, 4))
    (None, None)
    >>> allotments.deal("replica 1"), allotments.deal("replica 0"), allotments.report("replica 1", 1)
    (Portion(epoch=0, first=2, count=1), Portion(epoch=0, first=0, count=1), None)
    >>> allotments.give_up("replica 0"), allotments.finished, allotments.completed
    (2, False, 0)
    """

    def __init__(
        self,
        epochs: int,
        awaited: Iterable[str],
        in_order: bool = False,
        places: Iterable[AllotmentPlace] = (),
        shrinks: bool = True,
    ) -> None:
        self.epochs, self._in_order, self._shrinks = epochs, in_order, shrinks
        self._awaited = {*awaited}
        self._of: dict[str, Allotment] = {}
        self._completed = 0
        for place in places:
            position = Position(place.epoch, place.batch, place.undone)
            self._of[place.role] = self._allotment(range(place.first, place.first + place.count), position)

    def _allotment(self, numbers: range, position: Position) -> Allotment:
        return Allotment(numbers, self.epochs, position, self._in_order, self._shrinks)

    def add(self, who: str, numbers: range) -> None:
        """Add a replica with minibatches of these numbers.

        A replica that is not awaited begins in the others' epoch. One that had other numbers before is refused.
        """
        if who not in self._of:
            epoch = 0 if who in self._awaited else self.completed
            self._of[who] = self._allotment(numbers, Position(epoch, 0, ()))
        elif (before := self._of[who].numbers) != numbers:
            raise UsageError(
                f"{who} has {len(numbers)} minibatches from number {numbers.start} on, and had {len(before)} from "
                f"{before.start} on: continue with the same data and number of replicas, or start anew with --init-from"
            )
        self._awaited.add(who)

    def deal(self, who: str, at_most: int = PORTION_LIMIT) -> Portion | None:
        return self._of[who].deal(who, at_most)

    def report(self, who: str, steps: int, dropped: tuple[tuple[int, int], ...] = ()) -> None:
        self._of[who].report(who, steps, dropped)

    def give_back(self, who: str, portions: tuple[Portion, ...]) -> None:
        """Take back portions that a replica has not begun; they are dealt to it next."""
        self._of[who].give_back(who, portions)

    def end(self, who: str, epoch: int, number: int) -> None:
        self._of[who].end(who, epoch, number)

    def undealt(self, who: str) -> int:
        """Return how many minibatches are left to deal to a replica in the earliest epoch that is not done."""
        return self._of[who].undealt(who) if self._of[who].epoch == self.epoch else 0

    def held(self, who: str) -> int:
        return self._of[who].held(who) if who in self._of else 0

    def lost(self, who: str) -> int:
        return self._of[who].lost(who) if who in self._of else 0

    def give_up(self, who: str) -> int:
        """Give up a replica and the rest of its allotment; return the number of minibatches.

        The number is -1 if the replica never reported how many it has, and 0 for a guest that was refused.
        """
        unheard = -1 if who in self._awaited else 0
        self._completed = self.completed
        self._awaited.discard(who)
        return self._of[who].left if who in self._of else unheard

    @property
    def absent(self) -> set[str]:
        """Awaited replicas that have never joined."""
        return self._awaited - self._of.keys()

    @property
    def undone(self) -> set[str]:
        """Awaited replicas that have joined and have not done their allotments."""
        return {who for who in self._awaited if who in self._of and not self._of[who].finished}

    @property
    def epoch(self) -> int:
        """Earliest epoch that is not done by all."""
        return self.completed

    @property
    def completed(self) -> int:
        """Number of epochs that all awaited replicas have done."""
        # epochs stay done when the last awaited replica is given up
        done = [self._of[who].completed if who in self._of else 0 for who in self._awaited]
        return max(self._completed, min(done, default=0))

    @property
    def finished(self) -> bool:
        return all(who in self._of and self._of[who].finished for who in self._awaited)

    def validate(self) -> None:
        for allotment in self._of.values():
            allotment.validate()

    def position(self) -> Position:
        return Position(0, 0, (), places=tuple(allotment.place(who) for who, allotment in sorted(self._of.items())))
