"""All-reduce through a window of shared memory: threads that each play a rank, and one that is gone."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce

import pytest
import torch
from patience import SECONDS

from distbelief.fabric import memory
from distbelief.fabric.memory import Window

CHUNK = 4096
"""Bytes: so that short vectors have many."""
LENGTHS = (0, 1, 2, 3, 16, 511, 1024, 1025, 2048, 5000, 30_000)
Make = Callable[[int], list[Window]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the sides of a window for so many ranks, which all are this process."""
    monkeypatch.setattr(memory, "CHUNK", CHUNK)
    made: list[int] = []

    def sides(ranks: int) -> list[Window]:
        made.append(os.memfd_create("test window"))
        return [Window(rank, ranks, made[-1], [os.getpid()] * ranks) for rank in range(ranks)]

    yield sides
    for one in made:
        os.close(one)


def all_at_once(acts: list[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(acts)) as pool:
        for done in [pool.submit(act) for act in acts]:
            done.result(SECONDS)


def add(side: Window, vector: torch.Tensor) -> None:
    side.add_up(vector)


def add_up(sides: list[Window], vectors: list[torch.Tensor]) -> None:
    all_at_once([partial(add, side, vector) for side, vector in zip(sides, vectors, strict=True)])


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (5, torch.float64)])
def test_all_ranks_hold_the_sum_in_the_order_of_the_ranks(make: Make, ranks: int, dtype: torch.dtype) -> None:
    sides = make(ranks)
    for length in (*LENGTHS, *LENGTHS):
        vectors = [torch.randn(length, dtype=torch.float64).to(dtype) for _ in range(ranks)]
        expected = reduce(torch.add, [vector.clone() for vector in vectors])
        add_up(sides, vectors)
        assert all(torch.equal(vector, expected) for vector in vectors), length


def test_ranks_that_come_at_any_time_one_after_the_other(make: Make) -> None:
    """Many in a row, and nobody waits for the others in between: no rank writes over what another has yet to read."""
    sides, rounds = make(3), 30
    lengths = [LENGTHS[(7 * i) % len(LENGTHS)] for i in range(rounds)]
    vectors = [[torch.randn(length) for length in lengths] for _ in sides]
    expected = [reduce(torch.add, parts) for parts in zip(*[[v.clone() for v in own] for own in vectors], strict=True)]

    def play(side: Window, own: list[torch.Tensor]) -> None:
        for vector in own:
            add(side, vector)

    all_at_once([partial(play, side, own) for side, own in zip(sides, vectors, strict=True)])
    for own in vectors:
        assert all(map(torch.equal, own, expected))


@pytest.mark.parametrize(("act", "reached"), [("_add", 4), ("_read", 5)])
def test_no_chunk_is_written_over_before_the_other_has_had_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, act: str, reached: int
) -> None:
    """The second rank puts off what it does with the first chunk until the first one waits."""
    first, second = make(2)
    waits, looks, late = threading.Event(), first._lost, getattr(second, act)

    def lost() -> str:
        if first._count(0, 1) >= reached:
            waits.set()
        return looks()

    def puts_off(number: int, *more: object) -> None:
        assert number or waits.wait(SECONDS)
        late(number, *more)

    monkeypatch.setattr(first, "_lost", lost)
    monkeypatch.setattr(second, act, puts_off)
    vectors = [torch.randn(6 * CHUNK // 4) for _ in range(2)]
    expected = vectors[0] + vectors[1]
    add_up([first, second], vectors)
    assert all(torch.equal(vector, expected) for vector in vectors)


def test_a_window_is_small_however_many_ranks_there_are(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 1 << 20)
    monkeypatch.setattr(memory, "SIZE", 1 << 20)
    sides = make(9)
    vectors = [torch.full((100_000,), float(rank)) for rank in range(9)]
    add_up(sides, vectors)
    assert all(bool((vector == 36).all()) for vector in vectors)


def test_who_waits_for_one_that_leaves_is_told(make: Make) -> None:
    sides, told = make(3), list[str]()

    def waits(side: Window) -> None:
        with pytest.raises(RuntimeError) as error:
            add(side, torch.ones(9))
        told.append(str(error.value))

    threads = [threading.Thread(target=waits, args=(side,)) for side in sides[:2]]
    for one in threads:
        one.start()
    sides[2].leave()
    for one in threads:
        one.join(SECONDS)
    assert told == ["rank 2 has left"] * 2


def test_who_leaves_waits_no_more(make: Make) -> None:
    sides = make(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(add, sides[0], torch.ones(9))
        sides[0].leave()
        with pytest.raises(RuntimeError, match="rank 0 has left"):
            waiting.result(SECONDS)


def test_what_one_counted_before_it_left_counts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the count it counts and leaves."""
    first, second = make(2)

    def counts_and_leaves() -> str:
        first._tell(0, 1)
        return "rank 0 has left"

    monkeypatch.setattr(second, "_lost", counts_and_leaves)
    second._tell(0, 1)
    second._wait(0, 1)
    with pytest.raises(RuntimeError, match="rank 0 has left"):
        second._wait(0, 2)


@pytest.mark.parametrize(("one", "other"), [(10, 14), (10, 0), (10, 5000)])
def test_ranks_that_add_up_something_else_are_told(make: Make, one: int, other: int) -> None:
    sides, told = make(2), list[str]()

    def adds(side: Window, length: int) -> None:
        with pytest.raises(RuntimeError) as error:
            add(side, torch.ones(length))
        told.append(str(error.value))
        side.leave()

    all_at_once([lambda: adds(sides[0], one), lambda: adds(sides[1], other)])
    assert any(f"rank 0 {one} elements of 4 bytes" in why and f"rank 1 {other} elements" in why for why in told), told


def test_a_process_that_was_forked_and_ends_leaves_nothing_for_the_other(make: Make) -> None:
    sides, vectors = make(2), [torch.ones(9), torch.ones(9)]
    sides[0]._process = os.getpid() + 1  # as in a child
    sides[0].leave()
    add_up(sides, vectors)
    assert [vector.tolist() for vector in vectors] == [[2.0] * 9] * 2


def test_a_process_that_has_ended_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE_SECONDS", 10.0)  # half an hour, if nobody saw it
    segment, ended = os.memfd_create("test window"), subprocess.Popen(["true"])
    try:  # nobody waits for it yet, so that its number is still its own
        side = Window(0, 2, segment, [os.getpid(), ended.pid])
        with pytest.raises(RuntimeError, match="the process of rank 1 has ended"):
            add(side, torch.ones(9))
    finally:
        os.close(segment)
        ended.wait(SECONDS)
