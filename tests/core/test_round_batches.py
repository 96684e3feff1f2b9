"""Round batches: whatever group is dealt to and breaks up, each minibatch is in exactly one round that is done."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distbelief.core.portions import Portion, Position
from distbelief.core.settings import Plan, Settings
from distbelief.errors import RemoteProtocolError
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.strategies.grouped.round_batches import RoundBatches

SAMPLES, BATCH, BATCHES, EPOCHS = 118, 3, 40, 2
"""The last minibatch has one sample."""
PLAN = Plan(Settings(batch_size=BATCH, epochs=EPOCHS), lay_out([Tensor("weight", (4,), "float32")]), (), SAMPLES)
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
        self.round_batches, self.accumulate = RoundBatches(PLAN, cut, 0, accumulate), accumulate
        self.group, self.members = ["a"], ["a"]  # who is dealt to next, and was last
        self.done = Counter({(epoch, index) for epoch, index in ALL if (epoch, index) < (cut.epoch, cut.batch)})
        for portion in cut.undone:
            self.done -= Counter((portion.epoch, portion.first + i) for i in range(portion.count))
        self.rounds: deque[list[tuple[int, int]]] = deque()
        """Those that are dealt and not done, each with its minibatches, which the members take by turns."""
        self.samples = 0

    @rule(before=st.integers(1, 90))
    def deal(self, before: int) -> None:
        held = sum(map(len, self.rounds))
        portion, width = self.round_batches.deal(self.group, before), len(self.group) * self.accumulate
        free = ALL - self.done.keys() - {one for taken in self.rounds for one in taken}
        epoch = min((epoch for epoch, _ in ALL - self.done.keys()), default=EPOCHS)
        free = {one for one in free if one[0] == epoch}  # the next is dealt when this one is done
        assert (portion is None) == (not free or before <= held)
        if portion is not None:
            self.members = self.group
            numbers = [(portion.epoch, index) for index in range(portion.first, portion.first + portion.count)]
            dealt = [numbers[at : at + width] for at in range(0, len(numbers), width)]
            assert held + portion.count < before + width
            assert {one for taken in dealt for one in taken} <= free
            assert portion.first == min(index for _, index in free)
            self.rounds.extend(dealt)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        shares = dict[str, tuple[int, int]]()
        made = data.draw(st.integers(0, len(self.rounds)))
        for taken in (self.rounds.popleft() for _ in range(made)):
            self.done.update(taken)
            for turn, (_, index) in enumerate(taken):
                role = self.members[turn % len(self.members)]
                steps, samples = shares.get(role, (0, 0))
                shares[role] = steps + 1, samples + (1 if index == BATCHES - 1 else BATCH)
        assert self.round_batches.settle(made) == shares
        self.samples += sum(samples for _, samples in shares.values())
        assert self.round_batches.samples == self.samples

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
        count = len(self.members)
        for at, role in enumerate(self.members):
            assert self.round_batches.held(role) == sum(len(taken[at::count]) for taken in self.rounds)
        assert self.round_batches.recall() == sum(map(len, self.rounds))
        self.rounds.clear()
        self.group = list("abcde"[:members])
        if again:  # another attempt of the job
            self.round_batches = RoundBatches(PLAN, self.round_batches.position(), self.samples, self.accumulate)
            self.members = self.group

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
            while (portion := self.round_batches.deal(self.group)) is not None:
                self.done.update((portion.epoch, portion.first + i) for i in range(portion.count))
                self.round_batches.settle(-(-portion.count // (2 * self.accumulate)))
            assert self.round_batches.finished
            assert self.done == Counter(ALL)


TestGrouped = Grouped.TestCase
