"""Round batches: runs of rounds that are dealt to a whole group, and taken back when it breaks up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

from distbelief.coordination.dealing import DataDealer
from distbelief.core.portions import Portion, Position, RoundDealer
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError

ROUNDS_LIMIT = 16
"""Most rounds in one round batch; the group gets the next batch while it works on one."""
GROUP = "the group"
"""The dealer's name for the group, which holds what is dealt."""


class RoundBatches(DataDealer):
    """Dealer of a plan's data in rounds.

    A round has one minibatch for each member, or `accumulate` of them: a step on a larger minibatch. The last round of
    an epoch may be smaller, and so may rounds of minibatches that a death has put back. An epoch is dealt once the one
    before is done.
    """

    def __init__(self, plan: Plan, position: Position, samples: int, accumulate: int) -> None:
        self.samples, self._accumulate = samples, accumulate
        self._size, self._all = plan.settings.batch_size, plan.samples
        self._dealer = RoundDealer(plan.batches, plan.settings.epochs, position)
        self.epochs = self._dealer.completed
        self.pushes = self.minibatches = self.rounds = 0
        """Done since the first two were last reset; rounds since the start."""
        self._group: Sequence[str] = ()
        self._rounds: deque[Portion] = deque()
        """Rounds of the group that are dealt and not done."""

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
        return self._dealer.finished

    def width(self, group: Collection[str]) -> int:
        """Return the number of minibatches in a round of a group."""
        return len(group) * self._accumulate

    def deal(self, group: Sequence[str], before: float = math.inf) -> Portion | None:
        """Return the group's next round batch, of at most `before` minibatches; None where there is none now."""
        width = self.width(group)
        left = before - self._dealer.held(GROUP)
        rounds = min(ROUNDS_LIMIT, -(-left // width)) if left > 0 else 0
        portion = self._dealer.deal(GROUP, int(rounds) * width) if rounds else None
        if portion is not None:
            self._group, rest = group, portion
            while rest.count:
                round_, rest = rest.cut(width)
                self._rounds.append(round_)
        return portion

    def settle(self, rounds: int) -> dict[str, tuple[int, int]]:
        """Note that so many more rounds are done; return each member's steps and samples in them."""
        if not 0 <= rounds <= self.out:
            raise RemoteProtocolError(f"{rounds} rounds are reported, and {self.out} were dealt")
        shares: dict[str, tuple[int, int]] = {}
        for _ in range(rounds):
            round_ = self._rounds.popleft()
            self._dealer.done(GROUP, round_.count)
            for turn, index in enumerate(round_.numbers):
                role = self._group[turn % len(self._group)]
                steps, samples = shares.get(role, (0, 0))
                size = min(self._size, self._all - index * self._size)
                shares[role] = steps + 1, samples + size
                self.samples += size
            self.minibatches += round_.count
        self.pushes += rounds
        self.rounds += rounds
        return shares

    def recall(self) -> int:
        """Take back the rounds that are not done; return their number of minibatches."""
        self._rounds.clear()
        return self._dealer.lost(GROUP)

    def held(self, role: str) -> int:
        """Return how many minibatches of rounds that are not done belong to a member."""
        if role not in self._group:
            return 0
        return sum(len(round_.numbers[self._group.index(role) :: len(self._group)]) for round_ in self._rounds)

    def lost(self, role: str) -> int:
        """Return how many minibatches a dead member held; they are dealt again with the next group."""
        return self.held(role)

    def position(self) -> Position:
        return self._dealer.position()

    def validate(self, members: Collection[str]) -> None:
        self._dealer.validate()
        held, rounds = self._dealer.held(GROUP), sum(round_.count for round_ in self._rounds)
        assert held == rounds, f"the group holds {held} minibatches, and its rounds have {rounds}"
