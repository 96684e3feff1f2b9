"""Work units: each is done once, none is forgotten, whoever is slow or dies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.strategies import Sandblaster
from distbelief.strategies.sandblaster.evaluating import RESERVE, BatchWindows, WorkUnits

WHO = [f"replica {i}" for i in range(4)]


@given(
    count=st.integers(0, 30),
    members=st.lists(st.sampled_from(WHO), unique=True),
    copies=st.integers(0, 3),
    happenings=st.lists(
        st.tuples(st.sampled_from(["deal", "done", "lost"]), st.sampled_from(WHO), st.integers(0, 5)), max_size=200
    ),
)
def test_whatever_happens_everything_is_done_once(
    count: int, members: list[str], copies: int, happenings: list[tuple[str, str, int]]
) -> None:
    work_units, held, counted = WorkUnits(count, members, copies), {who: list[int]() for who in WHO}, list[int]()

    def deal(who: str) -> bool:
        number = work_units.deal(who)
        if number is not None:
            assert number not in counted, "one that is done is dealt"
            assert number not in held[who]
            held[who].append(number)
            assert len(held[who]) <= RESERVE
            assert sum(number in one for one in held.values()) <= 1 + copies
        return number is not None

    def done(who: str, which: int) -> None:
        number = held[who].pop(which % len(held[who]))
        first = work_units.done(number, who)
        assert first == (number not in counted)
        if first:
            counted.append(number)
            for other in work_units.withdraw(number):
                held[other].remove(number)
                assert not work_units.done(number, other), "its copy was on its way, and counts again"

    for what, who, which in happenings:
        if what == "deal":
            deal(who)
        elif what == "done" and held[who]:
            done(who, which)
        elif what == "lost":
            work_units.lost(who)
            held[who].clear()
        assert work_units.left == count - len(counted)
    while work_units.left:  # whoever is still there does the rest
        dealt = deal(WHO[0])
        assert dealt or held[WHO[0]] or copies == 0
        if held[WHO[0]]:
            done(WHO[0], 0)
        elif not dealt:  # without copies, those who hold something must do it
            who = next(one for one in WHO if held[one])
            done(who, 0)
    assert sorted(counted) == list(range(count))


def test_what_the_dead_one_held_is_dealt_again() -> None:
    work_units = WorkUnits(3, WHO[:1], copies=0)
    assert [work_units.deal(WHO[0]), work_units.deal(WHO[0])] == [0, 1]
    assert work_units.lost(WHO[0]) == 2
    assert [work_units.deal(WHO[1]), work_units.deal(WHO[1])] == [0, 1]


@pytest.mark.parametrize(("size", "overlap"), [(40, 0.25), (20, 0.4), (24, 0.3)])
def test_windows_share_what_they_say_and_go_over_all_samples(size: int, overlap: float) -> None:
    batches = BatchWindows(Sandblaster(batch_size=size, overlap=overlap, send_every=2), samples=83, portion_size=4)

    def portions(batch: int, part: int | None = None) -> list[tuple[int, int]]:
        cut = [work_unit for work_unit in batches.work_units(batch) if part in (None, work_unit.part)]
        return [(b.portion.epoch, b.portion.first + i) for b in cut for i in range(b.portion.count)]

    seen = set()
    for batch in range(60):
        assert portions(batch, 2) == portions(batch + 1, 0), "what two batches share is one part of each"
        assert len(portions(batch)) == size // 4
        seen |= set(portions(batch))
    whole = {(epoch, index) for epoch, index in seen if epoch < max(seen)[0]}
    assert whole == {(epoch, index) for epoch in range(max(seen)[0]) for index in range(21)}
