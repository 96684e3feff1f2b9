"""Portions and the ledger: nothing is dealt twice to the living or forgotten with the dead; no push counts twice."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distbelief.coordination.allotments import Allotment, Allotments, own_numbers
from distbelief.core.ledger import Ledger, PushTaken
from distbelief.core.portions import OWN, PORTION_LIMIT, Dealer, Portion, Position, RoundDealer
from distbelief.errors import RemoteProtocolError, UsageError
from distbelief.replica.work import Pushes, WorkQueue

names = st.sampled_from(["replica 0", "replica 1", "replica 2"])


def minibatches(portion: Portion) -> list[tuple[int, int]]:
    return [(portion.epoch, index) for index in portion.numbers]


class Dealing(RuleBasedStateMachine):
    """Deals, reports, returns, deaths and resumptions in any order, against a list of every minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.epochs = 40, 2
        self.dealer = self.made(Position(0, 0, ()), replicas=3)
        self.free = {(epoch, index) for epoch in range(self.epochs) for index in range(self.batches)}
        self.held: dict[str, list[tuple[int, int]]] = {}
        self.begun: Counter[str] = Counter()
        self.work: dict[str, WorkQueue] = {}
        self.done: set[tuple[int, int]] = set()
        self.completed: list[int] = []

    def made(self, position: Position, replicas: int) -> Dealer:
        return Dealer(self.batches, self.epochs, replicas, position)

    def dealt(self, who: str, at_most: int, first: int, every: int) -> Portion | None:
        return self.dealer.deal(who, at_most)

    @property
    def open(self) -> set[tuple[int, int]]:
        """What may be dealt now."""
        return self.free

    @rule(who=names, at_most=st.integers(1, PORTION_LIMIT), first=st.integers(-1, 45), every=st.integers(1, 5))
    def deal(self, who: str, at_most: int, first: int, every: int) -> None:
        expects = bool(self.open)
        portion = self.dealt(who, at_most, first, every)
        assert (portion is not None) == expects
        if portion is not None:
            dealt = minibatches(portion)
            assert 0 < len(dealt) <= at_most
            assert set(dealt) <= self.free
            self.free -= set(dealt)
            self.held.setdefault(who, []).extend(dealt)
            self.work.setdefault(who, WorkQueue()).deal(portion)

    @rule(who=names)
    def begin(self, who: str) -> None:
        held = self.held.get(who, [])
        if self.begun[who] < len(held):
            batch = self.work[who].next()
            assert (batch.epoch, batch.index) == held[self.begun[who]]
            self.begun[who] += 1

    @rule(who=names)
    def give_back(self, who: str) -> None:
        held, work = self.held.get(who, []), self.work.get(who, WorkQueue())
        work.give_back()
        returned = work.report(Pushes(0, (), 1), wants=False).returned
        assert [one for portion in returned for one in minibatches(portion)] == held[self.begun[who] :]
        self.dealer.give_back(who, returned)
        self.free |= set(held[self.begun[who] :])
        del held[self.begun[who] :]
        assert work.next() is None

    @rule(who=names, data=st.data())
    def report(self, who: str, data: st.DataObject) -> None:
        held = self.held.get(who, [])
        steps = data.draw(st.integers(0, len(held)))
        while self.begun[who] < steps:
            self.begin(who)
        self.begun[who] -= steps
        self.done |= set(held[:steps])
        del held[:steps]
        before = self._complete()
        self.completed += self.dealer.done(who, steps)
        assert sorted(self.completed) == before

    def _complete(self) -> list[int]:
        return [
            epoch for epoch in range(self.epochs) if all((epoch, index) in self.done for index in range(self.batches))
        ]

    @rule(who=names)
    def die(self, who: str) -> None:
        lost = self.held.pop(who, [])
        self.work.pop(who, None)
        self.begun[who] = 0
        assert self.dealer.lost(who) == len(lost)
        self.free |= set(lost)

    @rule(who=names, more=st.integers(1, 3))
    def report_too_much(self, who: str, more: int) -> None:
        if not self.held.get(who):
            with pytest.raises(RemoteProtocolError, match=f"{who} reports {more} more steps than it was dealt"):
                self.dealer.done(who, more)

    @precondition(lambda self: not self.dealer.finished)
    @rule(replicas=st.integers(1, 5))
    def resume(self, replicas: int) -> None:
        self.dealer = self.made(self.dealer.position(), replicas)
        for held in self.held.values():
            self.free |= set(held)
        self.held.clear()
        self.work.clear()
        self.begun.clear()

    @invariant()
    def all_is_accounted_for(self) -> None:
        assert self.dealer.finished == (len(self.done) == self.batches * self.epochs)
        assert self.dealer.completed == len(self._complete())
        for who in ("replica 0", "replica 1", "replica 2"):
            assert self.dealer.held(who) == len(self.held.get(who, []))

    def teardown(self) -> None:
        for who in list(self.held):
            self.die(who)
        while (portion := self.dealer.deal("replica 0")) is not None:
            assert set(minibatches(portion)) <= self.free
            self.free -= set(minibatches(portion))
            self.dealer.done("replica 0", portion.count)
        assert self.dealer.finished
        assert not self.free


class RoundDealing(Dealing):
    """The same in rounds, where an epoch is dealt when the one before is done, and each says what he would have."""

    def made(self, position: Position, replicas: int) -> Dealer:
        return RoundDealer(self.batches, self.epochs, position)

    def dealt(self, who: str, at_most: int, first: int, every: int) -> Portion | None:
        wanted = {(self.dealer.epoch, first)} & self.open
        assert self.dealer.undealt(who) == len(self.open)
        portion = self.dealer.deal(who, at_most, first, every)  # type: ignore[call-arg]  # of rounds
        assert portion is None or not wanted or portion.first == first
        return portion

    @property
    def open(self) -> set[tuple[int, int]]:
        """Of the first epoch that is not done."""
        return {one for one in self.free if one[0] == self.dealer.epoch}


TestDealing = Dealing.TestCase
TestRoundDealing = RoundDealing.TestCase


def test_a_portion_that_is_dealt_again_in_pieces_is_dealt_whole() -> None:
    dealer = Dealer(batches=64, epochs=1, replicas=1)
    whole = dealer.deal("replica 0")
    assert dealer.lost("replica 0") == whole.count == 16
    pieces = [piece for _ in range(6) if (piece := dealer.deal("replica 1", at_most=3))]
    assert [minibatch for piece in pieces for minibatch in minibatches(piece)] == minibatches(whole)


@pytest.mark.parametrize("given", [Portion(0, 0, 9), Portion(0, 4, 3), Portion(0, 8, 0), Portion(1, 4, 4)], ids=str)
def test_what_was_not_dealt_is_not_given_back(given: Portion) -> None:
    dealer = Dealer(batches=32, epochs=2, replicas=1)
    assert dealer.deal("replica 0") == Portion(0, 0, 8)
    with pytest.raises(RemoteProtocolError, match=r"replica 0 gives back .* was dealt no portion with that end"):
        dealer.give_back("replica 0", (given,))


def test_what_is_given_back_is_dealt_next_also_where_more_was_dealt_since() -> None:
    """A replica that is long at a step says late what it gives back."""
    dealer = Dealer(batches=64, epochs=1, replicas=1)
    first, second = dealer.deal("replica 0", 4), dealer.deal("replica 0", 4)
    assert second == Portion(0, 4, 4)
    assert dealer.deal("replica 0", 2) == Portion(0, 8, 2)
    dealer.give_back("replica 0", (Portion(0, 1, 3), second))
    assert [dealer.deal("replica 1"), dealer.deal("replica 1")] == [Portion(0, 1, 3), second]
    assert first is not None
    assert dealer.done("replica 0", 3) == []
    assert dealer.held("replica 0") == 0


def test_what_was_begun_comes_before_what_was_given_back_where_its_replica_leaves_or_a_job_goes_on() -> None:
    """A script that stops its job may have begun a minibatch of which the rest was given back for a checkpoint."""
    dealer = Dealer(batches=32, epochs=1, replicas=1)
    assert dealer.deal("replica 0") == Portion(0, 0, 8)
    dealer.done("replica 0", 3)
    dealer.give_back("replica 0", (Portion(0, 5, 3),))
    assert dealer.position().undone == (Portion(0, 3, 2), Portion(0, 5, 3))
    dealer.lost("replica 0")
    assert dealer.position().undone == (Portion(0, 3, 2), Portion(0, 5, 3))
    assert dealer.deal("replica 0") == Portion(0, 3, 2)


def test_portions_shrink_towards_the_end_of_an_epoch() -> None:
    dealer = Dealer(batches=800, epochs=1, replicas=4)
    counts = []
    while (portion := dealer.deal("replica 0")) is not None:
        counts.append(portion.count)
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (PORTION_LIMIT, 1)


def test_a_job_that_was_done_deals_nothing_and_one_cut_short_is_done_too() -> None:
    assert Dealer(5, 2, 1, Position(2, 0, ())).finished
    assert Dealer(5, 2, 1, Position(3, 0, ())).deal("replica 0") is None


# the ledger


pushers = st.tuples(names, st.integers(0, 1))
"""A replica, and a partition of it."""


@given(st.lists(st.tuples(pushers, st.integers(0, 2), st.integers(1, 6)), max_size=60), st.integers(0, 60))
def test_a_push_is_applied_at_most_once_and_in_order_whatever_comes(
    pushes: list[tuple[tuple[str, int], int, int]], moment: int
) -> None:
    ledger, applied = Ledger(), []
    newest: dict[tuple[str, int], int] = {}
    gaps: list[tuple[Exception, int, int]] = []
    for number, (who, incarnation, clock) in enumerate(pushes):
        if number == moment:  # another that is told what this one has taken goes on as this one would
            taken, ledger = ledger.taken(), Ledger()
            ledger.restore(taken)
        try:
            verdict = ledger.judge(*who, incarnation, clock)
        except RemoteProtocolError as error:
            gaps.append((error, clock, sum((w, i) == (who, incarnation) for w, i, _ in applied)))
            continue
        assert verdict.reason
        if verdict.taking == "apply":
            assert incarnation >= newest.get(who, 0)
            newest[who] = incarnation
            applied.append((who, incarnation, clock))
        elif verdict.taking == "acknowledge":
            assert (who, incarnation, clock) in applied
        else:
            assert incarnation < newest[who]
    assert all(clock > before + 1 for _, clock, before in gaps), gaps
    assert len(set(applied)) == len(applied)
    for who, incarnation in {(w, i) for w, i, _ in applied}:
        clocks = [c for w, i, c in applied if (w, i) == (who, incarnation)]
        assert clocks == list(range(1, len(clocks) + 1))


@given(st.lists(st.tuples(pushers, st.integers(0, 2), st.integers(1, 6)), max_size=30), st.randoms())
def test_a_ledger_that_is_told_of_pushes_in_any_order_knows_the_last_of_each(
    pushes: list[tuple[tuple[str, int], int, int]], chance: Random
) -> None:
    ledger = Ledger()
    for who, incarnation, clock in chance.sample(pushes, len(pushes)):
        ledger.note(PushTaken(*who, incarnation, clock))
    last = {who: max((i, c) for w, i, c in pushes if w == who) for who, _, _ in pushes}
    assert sorted(ledger.taken()) == sorted(PushTaken(*who, *of) for who, of in last.items())


def test_an_allotment_is_dealt_in_order_however_often_its_replica_dies() -> None:
    allotments = Allotments(2, ["replica 0", "replica 1"])
    allotments.add("replica 0", range(5))
    allotments.add("replica 1", range(5, 10))
    dealt = [allotments.deal("replica 1") for _ in range(4)]
    assert allotments.lost("replica 1") == 4
    assert [allotments.deal("replica 1") for _ in range(2)] == dealt[:2]
    allotments.report("replica 1", 1)
    assert allotments.lost("replica 1") == 1
    again = [allotments.deal("replica 1") for _ in range(8)]
    assert [(one.epoch, one.first) for one in again if one] == [(0, at) for at in range(6, 10)] + [
        (1, at) for at in range(5, 9)
    ]


def test_an_allotment_goes_on_from_a_checkpoint_only_where_it_is_the_same() -> None:
    before = Allotments(2, ["replica 0"])
    before.add("replica 0", range(5))
    assert [before.deal("replica 0"), before.deal("replica 0")]
    before.report("replica 0", 1)
    after = Allotments(2, ["replica 0", "replica 1"], places=before.position().places)
    with pytest.raises(UsageError, match="replica 0 has 4 minibatches from number 0 on, and had 5 from 0 on"):
        after.add("replica 0", range(4))
    after.add("replica 0", range(5))
    assert after.deal("replica 0") == Portion(0, 1, 1)
    assert (after.absent, after.undone, after.finished, after.completed) == ({"replica 1"}, {"replica 0"}, False, 0)
    assert after.give_up("replica 1") == -1
    assert after.absent == set()


def test_an_end_of_what_was_not_dealt_is_refused() -> None:
    allotment = Allotment(own_numbers(1), 2)
    portion = allotment.deal("replica 1", 4)
    assert portion == Portion(0, OWN, 4)
    for epoch, number in ((0, OWN + 4), (0, 3), (1, OWN)):
        with pytest.raises(RemoteProtocolError, match="which it does not hold"):
            allotment.end("replica 1", epoch, number)
    allotment.end("replica 1", 0, OWN + 2)
    assert allotment.held("replica 1") == 2
    assert allotment.done("replica 1", 2) == [0]
    assert allotment.deal("replica 1", 1) == Portion(1, OWN, 1)
