"""Round batches: whatever group is dealt to, breaks up, and is formed anew, each minibatch is in exactly one round that
is
done.
"""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distbelief.core.portions import Portion, Position
from distbelief.errors import RemoteProtocolError
from distbelief.strategies.grouped.round_batches import RoundBatches, Share, round_of

SAMPLES, BATCH, BATCHES, EPOCHS = 118, 3, 40, 2
"""The last minibatch has one sample."""
ALL = {(epoch, index) for epoch in range(EPOCHS) for index in range(BATCHES)}
CUTS = [
    Position(0, 0, ()),
    Position(0, 25, (Portion(0, 3, 4), Portion(0, 20, 2))),
    Position(1, 10, (Portion(0, 30, 10), Portion(1, 0, 1), Portion(1, 2, 5))),
    Position(EPOCHS, 0, (Portion(1, 8, 12),)),
]
"""Where jobs may go on; those with something undone are of strategies that deal to one replica after the other."""


class Grouped(RuleBasedStateMachine):
    """Round batches, rounds and groups in any order, against a list of every minibatch."""

    @initialize(cut=st.sampled_from(CUTS), accumulate=st.integers(1, 3))
    def begin(self, cut: Position, accumulate: int) -> None:
        self.round_batches, self.accumulate = RoundBatches(SAMPLES, BATCH, EPOCHS, cut, accumulate), accumulate
        self.group, self.members = 1, 1  # members of what is dealt next, and of what was dealt last
        self.done = Counter({(epoch, index) for epoch, index in ALL if (epoch, index) < (cut.epoch, cut.batch)})
        for portion in cut.undone:
            self.done -= Counter((portion.epoch, portion.first + i) for i in range(portion.count))
        self.rounds: deque[list[tuple[int, int]]] = deque()
        """Those that are dealt and not done, each with its minibatches, which the members take by turns."""

    @rule(rounds=st.integers(1, 9))
    def deal(self, rounds: int) -> None:
        portion, self.members = self.round_batches.deal(self.group, rounds), self.group
        free = ALL - self.done.keys() - {one for taken in self.rounds for one in taken}
        assert (portion is None) == (not free)
        if portion is not None:
            width = self.members * self.accumulate
            dealt = [
                [(portion.epoch, index) for index in round_of(portion, width, number)]
                for number in range(-(-portion.count // width))
            ]
            assert len(dealt) <= rounds
            assert {one for taken in dealt for one in taken} <= free
            self.rounds.extend(dealt)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        shares = [Share() for _ in range(self.members)]
        made = data.draw(st.integers(0, len(self.rounds)))
        for taken in (self.rounds.popleft() for _ in range(made)):
            self.done.update(taken)
            for turn, (_, index) in enumerate(taken):
                steps, samples = shares[turn % self.members]
                shares[turn % self.members] = Share(steps + 1, samples + (1 if index == BATCHES - 1 else BATCH))
        assert self.round_batches.settle(made) == shares

    @rule(more=st.integers(1, 3))
    def settle_too_much(self, more: int) -> None:
        with pytest.raises(
            RemoteProtocolError,
            match=f"{len(self.rounds) + more} rounds are reported, and {len(self.rounds)} were dealt",
        ):
            self.round_batches.settle(len(self.rounds) + more)

    @rule(members=st.integers(1, 5), again=st.booleans())
    def regroup(self, members: int, again: bool) -> None:
        """Before another group is dealt anything, what the last had not done is taken back."""
        held = [sum(len(taken[member :: self.members]) for taken in self.rounds) for member in range(self.members)]
        assert self.round_batches.held() == held
        assert self.round_batches.recall() == held
        self.rounds.clear()
        self.group = members
        if again:  # another attempt of the job
            self.round_batches, self.members = (
                RoundBatches(SAMPLES, BATCH, EPOCHS, self.round_batches.position(), self.accumulate),
                1,
            )

    @precondition(lambda self: hasattr(self, "round_batches"))
    @invariant()
    def all_is_accounted_for(self) -> None:
        assert set(self.done.values()) <= {1}
        assert self.round_batches.finished == (self.done.keys() == ALL)
        assert self.round_batches.completed == sum(
            all((epoch, index) in self.done for index in range(BATCHES)) for epoch in range(EPOCHS)
        )

    def teardown(self) -> None:
        """However it began, dealing ends, with every minibatch done once."""
        if hasattr(self, "round_batches"):
            self.regroup(2, again=False)
            while (portion := self.round_batches.deal(2)) is not None:
                self.done.update((portion.epoch, portion.first + i) for i in range(portion.count))
                self.round_batches.settle(-(-portion.count // (2 * self.accumulate)))
            assert self.round_batches.finished
            assert self.done == Counter(ALL)


TestGrouped = Grouped.TestCase
