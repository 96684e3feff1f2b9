"""Round batches: an epoch's minibatches, dealt to a whole group round by round, and taken back as it breaks up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

from distbelief.coordination.dealing import DataDealer
from distbelief.core.portions import Portion, Position, RoundDealer
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError

ROUNDS_LIMIT = 16
"""Most rounds in one round batch; a group is dealt the next while it makes one."""
GROUP = "the group"
"""Name of the holder of what is dealt, to the dealer."""


class RoundBatches(DataDealer):
    """Deals the data of a plan, from a position at which `samples` are done.

    A round takes one minibatch for each member, or `accumulate` of them, so that it is the same as one of a larger
    minibatch; only the last of an epoch may be smaller, but where what a death has put back lies apart. An epoch is
    dealt when the one before is done.
    """

    def __init__(self, plan: Plan, position: Position, samples: int, accumulate: int) -> None:
        self.samples, self._accumulate = samples, accumulate
        self._size, self._all = plan.settings.batch_size, plan.samples
        self._dealer = RoundDealer(plan.batches, plan.settings.epochs, position)
        self.epochs = self._dealer.completed
        self.pushes = self.minibatches = self.rounds = 0
        """Done since somebody last set the first two to 0, and rounds since all began."""
        self._group: Sequence[str] = ()
        self._rounds: deque[Portion] = deque()
        """Rounds that are dealt and not done, of the group that was dealt anything last."""

    @property
    def out(self) -> int:
        """Number of rounds that are dealt and not done."""
        return len(self._rounds)

    @property
    def completed(self) -> int:
        """Number of epochs that are done."""
        return self._dealer.completed

    @property
    def finished(self) -> bool:
        """True where every minibatch of every epoch is done."""
        return self._dealer.finished

    def width(self, group: Collection[str]) -> int:
        """Return how many minibatches a round of a group has."""
        return len(group) * self._accumulate

    def deal(self, group: Sequence[str], before: float = math.inf) -> Portion | None:
        """The next round batch of a group, of the rounds that `before` minibatches take at most; None where there is
        none now.
        """
        width = self.width(group)
        left = before - self._dealer.held(GROUP)
        rounds = min(ROUNDS_LIMIT, -(-left // width)) if left > 0 else 0
        portion = self._dealer.deal(GROUP, int(rounds) * width) if rounds else None
        if portion is not None:
            self._group, rest = group, portion
            while rest.count:
                taken, rest = rest.cut(width)
                self._rounds.append(taken)
        return portion

    def settle(self, rounds: int) -> dict[str, tuple[int, int]]:
        """So many more rounds are done; returns the steps and samples of each member in them.

        Raises:
            RemoteProtocolError: more than were dealt.
        """
        if not 0 <= rounds <= self.out:
            raise RemoteProtocolError(f"{rounds} rounds are reported, and {self.out} were dealt")
        shares: dict[str, tuple[int, int]] = {}
        for _ in range(rounds):
            taken = self._rounds.popleft()
            self._dealer.done(GROUP, taken.count)
            for turn, index in enumerate(taken.numbers):
                role = self._group[turn % len(self._group)]
                steps, samples = shares.get(role, (0, 0))
                size = min(self._size, self._all - index * self._size)
                shares[role] = steps + 1, samples + size
                self.samples += size
            self.minibatches += taken.count
        self.pushes += rounds
        self.rounds += rounds
        return shares

    def recall(self) -> int:
        """Take back what is not done; returns how many minibatches that is."""
        self._rounds.clear()
        return self._dealer.lost(GROUP)

    def held(self, role: str) -> int:
        """Return how many minibatches of what is dealt and not done are a member's."""
        if role not in self._group:
            return 0
        return sum(len(taken.numbers[self._group.index(role) :: len(self._group)]) for taken in self._rounds)

    def lost(self, role: str) -> int:
        """A replica is gone; returns how many minibatches it held, which are dealt again once the group is whole."""
        return self.held(role)

    def position(self) -> Position:
        """Return the present position in the data, for a checkpoint."""
        return self._dealer.position()

    def validate(self, members: Collection[str]) -> None:
        """Assert that no minibatch is lost or counted twice, and that what the group holds is in rounds."""
        self._dealer.validate()
        held, rounds = self._dealer.held(GROUP), sum(taken.count for taken in self._rounds)
        assert held == rounds, f"the group holds {held} minibatches, and its rounds have {rounds}"
