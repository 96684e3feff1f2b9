"""The rounds of an epoch that replicas are dealt minibatches for, so that each is a part of the data.

An epoch is dealt when the one before is done, so that no round holds minibatches of two. A replica is at the round that
it was dealt so many minibatches for, and has of each the one of its place among all, as in `allreduce`. It is dealt
more only as far as what is left has all others come as far: so only the last round of an epoch is smaller, and those
that somebody has missed who has died or come. Who has nothing left of an epoch says so, and is not waited for until the
next begins (`core/rounds`); what a dead replica held is dealt again when its push can be in no round any more. Where
those who are late are left behind, each is at what it holds, and has the first minibatch that nobody has.
"""

from __future__ import annotations

from bisect import bisect_right

from distbelief.core import roles


class RoundsDealt:
    """Rounds of an epoch for which each replica was dealt minibatches.

    >>> rounds = RoundsDealt()
    >>> rounds.add("replica 0", 0), rounds.add("replica 1", 0)
    (None, None)
    >>> rounds.share("replica 0", 7, most=32), rounds.add("replica 0", 3)
    (3, None)
    >>> rounds.share("replica 0", 4, most=32), rounds.add("replica 0", 1), rounds.share("replica 0", 3, most=32)
    (1, None, 0)
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.of: dict[str, int] = {}
        self._at: dict[int, int] = {}
        """Number of replicas at each round."""

    def begin(self, epoch: int) -> None:
        """Nobody is dealt anything of an epoch yet."""
        self.epoch = epoch
        self.of.clear()
        self._at.clear()

    def add(self, who: str, count: int) -> None:
        """A replica is dealt so many more, or is there from that round on."""
        at = self.of.get(who, 0) + count
        self.remove(who)
        self.of[who] = at
        self._at[at] = self._at.get(at, 0) + 1

    def remove(self, who: str) -> None:
        """A replica is gone."""
        if who in self.of:
            at = self.of.pop(who)
            self._at[at] -= 1
            if not self._at[at]:
                del self._at[at]

    def place(self, who: str) -> tuple[int, int]:
        """The minibatch of the next round that is a replica's, of those of an epoch, and how far apart its are.

        >>> rounds = RoundsDealt()
        >>> rounds.add("replica 0", 0), rounds.add("replica 1", 3), rounds.place("replica 1")
        (None, None, (7, 2))
        """
        before = sum(roles.index_of(other) < roles.index_of(who) for other in self.of)
        return self.of[who] * len(self.of) + before, len(self.of)

    def share(self, who: str, left: float, most: int) -> int:
        """Return how many of the minibatches left a replica may be dealt, such that the others can come as far. It is
        one more where not all can, and none behind it goes short.
        """
        # `needed(count)` minibatches bring the others as far as this replica would be with `count` more. It grows with
        # `count`, so a bisection finds the largest that what is left allows.
        at_round = self.of[who]

        def needed(count: int) -> int:
            return sum(replicas * max(0, at_round + count - at) for at, replicas in self._at.items())

        return max(bisect_right(range(1, most + 1), left, key=needed), int(left > needed(0)))
