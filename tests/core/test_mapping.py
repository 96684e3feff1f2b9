"""The mapping: where its ranges are cut, and which of them a row lies in; counts and simulated locks."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distbelief.errors import UsageError
from distbelief.sharding.layout import ALIGNMENT, Tensor, lay_out
from distbelief.strategies.shared_memory.counts import ROW, STALENESS, Counts, size_of
from distbelief.strategies.shared_memory.locks import Queues, RoundRobin
from distbelief.strategies.shared_memory.mapped import touched
from distbelief.strategies.shared_memory.mapping import ranges

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=6)


@given(SIZES, st.integers(1, 12))
def test_ranges_follow_each_other_and_are_cut_where_a_tensor_may_be(sizes: list[int], count: int) -> None:
    layout = lay_out([Tensor(f"t{i}", (size,), "float32") for i, size in enumerate(sizes)])
    count = min(count, layout.parameters)
    found = ranges(layout, count)
    assert len(found) == count
    assert (found[0].start, found[-1].stop) == (0, layout.trained.stop)
    assert all(a.stop == b.start for a, b in pairwise(found))
    starts = [entry.start for entry in layout.trained_entries]
    for part in found[1:]:
        inside = max(start for start in [*starts, layout.trained.stop] if start <= part.start)
        assert (part.start - inside) % ALIGNMENT == 0 or part.start in starts


def test_ranges_of_a_large_model_are_of_one_size() -> None:
    sizes = [
        part.size
        for part in ranges(lay_out([Tensor("a", (300, 784), "float32"), Tensor("b", (100, 300), "float32")]), 8)
    ]
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT


def test_more_ranges_than_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="--shards 3 is more than the model's 2 parameters"):
        ranges(lay_out([Tensor("a", (2,), "float32")]), 3)


@given(st.lists(st.integers(0, 29), max_size=8), st.integers(1, 90), st.integers(1, 9))
def test_the_ranges_of_some_rows_are_those_that_have_a_byte_of_them(rows: list[int], columns: int, count: int) -> None:
    layout = lay_out([Tensor("first", (33,), "float32"), Tensor("rows", (30, columns), "float32")])
    cut = ranges(layout, count)
    entry = layout.trained_entries[1]
    taken = {entry.start + row * columns * 4 + byte for row in rows for byte in range(columns * 4)}
    expected = tuple(i for i, part in enumerate(cut) if any(part.start <= byte < part.stop for byte in taken))
    stops = torch.tensor([part.stop for part in cut])
    assert touched(torch.tensor(rows, dtype=torch.int64), entry, stops) == expected


def test_high_stalenesses_are_counted_together_and_what_was_done_before_counts() -> None:
    memory = [7] * size_of(2)
    one, other = Counts(memory, 2, 0), Counts(memory, 2, 1)
    one.begin({"updates": 5, "samples": 50, "staleness": {"1": 4, "1000": 1}})
    one.look()
    for _ in range(100):
        other.look()
        other.add(1)
    one.add(1)
    most = str(ROW - 1 - STALENESS)
    assert one.facts() == {"updates": 106, "samples": 151, "staleness": {"0": 100, "1": 4, most: 2}, "taken": []}


def test_the_dead_wait_for_nothing_and_hold_nothing() -> None:
    locks = Queues()
    assert [locks.ask(role, 0) for role in ("a", "b", "c")] == [True, False, False]
    assert locks.ask("b", 1)
    assert locks.release_dead("b") == []
    assert locks.release_dead("a") == ["c"]
    assert (locks.holder(0), locks.holder(1)) == ("c", "")


@given(st.lists(st.tuples(st.sampled_from(["compute", "idle", "ask", "give"]), st.integers(0, 3)), max_size=60))
def test_by_turns_one_updates_and_nobody_waits_for_who_computes_nothing(asked: list[tuple[str, int]]) -> None:
    """Whoever updates is the only one; who waits, waits for somebody who computes or updates; and nobody is overtaken
    twice.
    """
    order = RoundRobin()
    computing, waiting, updating = set[int](), set[int](), set[int]()
    overtaken = dict.fromkeys(permutations(range(4), 2), 0)
    """Of a replica by another: how many updates that has made since the one's gradient was begun."""

    def begin(replica: int) -> None:
        computing.add(replica)
        overtaken.update(((replica, other), 0) for other in range(4) if other != replica)

    def told(replica: int | None) -> None:
        if replica is not None:
            assert replica in waiting
            waiting.discard(replica)
            updating.add(replica)

    for what, who in asked:
        if what == "compute" and not {who} & (computing | waiting | updating):
            order.enter(who)
            begin(who)
        elif what == "idle":
            told(order.leave(who))
            for state in (computing, waiting, updating):
                state.discard(who)
        elif what == "ask" and who in computing:
            computing.discard(who)
            waiting.add(who)
            if order.ask(who):
                told(who)
        elif what == "give" and who in updating:
            updating.discard(who)
            for other in computing | waiting:
                overtaken[other, who] += 1
            told(order.give(who))
            begin(who)
        assert len(updating) <= 1
        assert not waiting or computing | updating
        assert all(order.has(who) for who in updating)
        assert max(overtaken.values()) <= 1


def test_by_turns_who_computes_nothing_has_none() -> None:
    order = RoundRobin()
    with pytest.raises(AssertionError, match="replica 2 asks for a turn, and has computed no gradient"):
        order.ask(2)
