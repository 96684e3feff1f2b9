"""How an endpoint waits: it looks for a bounded time before it sleeps, and less where that was in vain."""

import os

import pytest

from distbelief.transport import sockets
from distbelief.transport.sockets import CROWDED_SECONDS, LOOK_SECONDS, REST_LIMIT, Patience

EVENTS = [(7, 1)]
QUICK, CROWDED = CROWDED_SECONDS / 2, CROWDED_SECONDS * 2
LOOKS = round(LOOK_SECONDS / QUICK)


class Kernel:
    """An epoll, a clock and a scheduler; the events come at look number `comes`, or when one sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, yield_seconds: float = QUICK) -> None:
        self.now, self.yield_seconds, self.comes = 0.0, yield_seconds, 0
        self.looks, self.slept = 0, list[float | None]()
        monkeypatch.setattr(sockets, "monotonic", lambda: self.now)
        monkeypatch.setattr(os, "sched_yield", self.sched_yield)
        self.patience = Patience(self)  # type: ignore[arg-type]

    def sched_yield(self) -> None:
        self.now += self.yield_seconds

    def poll(self, timeout: float | None, _: int) -> list[tuple[int, int]]:
        if timeout == 0:
            self.looks += 1
            return EVENTS if self.looks == self.comes else []
        self.slept.append(timeout)
        return EVENTS

    def wait(self, timeout: float | None = None, comes: int = 0) -> tuple[int, bool]:
        """Wait once; returns how often it looked, and whether it slept."""
        self.looks, self.comes, self.slept = 0, comes, []
        assert self.patience.wait(timeout) == EVENTS
        assert self.slept in ([], [timeout])
        return self.looks, bool(self.slept)


def test_it_looks_for_a_bounded_time_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    looks, slept = kernel.wait()
    assert abs(looks - LOOKS) <= 1
    assert slept
    assert kernel.now == pytest.approx(LOOK_SECONDS, abs=QUICK)


@pytest.mark.parametrize("comes", [1, 2, LOOKS - 1])
def test_what_comes_while_it_looks_is_there_without_a_sleep(monkeypatch: pytest.MonkeyPatch, comes: int) -> None:
    assert Kernel(monkeypatch).wait(comes=comes) == (comes, False)


def test_it_gives_way_where_the_core_is_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Kernel(monkeypatch, CROWDED).wait() == (1, True)


def test_a_wait_no_longer_than_a_look_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    assert kernel.wait(LOOK_SECONDS) == (0, True)
    assert kernel.wait(LOOK_SECONDS * 1.01)[0] > 0


def rests(kernel: Kernel) -> int:
    """Waits that sleep at once until it looks again, in vain."""
    for count in range(1000):
        if kernel.wait()[0]:
            return count
    raise AssertionError("it never looks again")


@pytest.mark.parametrize("yield_seconds", [QUICK, CROWDED])
def test_each_look_in_vain_makes_it_rest_twice_as_long_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, yield_seconds: float
) -> None:
    kernel = Kernel(monkeypatch, yield_seconds)
    assert [rests(kernel) for _ in range(9)] == [0, 1, 3, 7, 15, 31, REST_LIMIT, REST_LIMIT, REST_LIMIT]


def test_a_look_that_paid_makes_it_look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    assert [rests(kernel) for _ in range(4)] == [0, 1, 3, 7]
    assert [kernel.wait()[0] for _ in range(15)] == [0] * 15
    assert [kernel.wait(comes=1) for _ in range(3)] == [(1, False)] * 3
    assert [rests(kernel) for _ in range(3)] == [0, 1, 3]
