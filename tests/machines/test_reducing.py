"""A driver carries links and timers while a reduction runs, and breaks it off where its role must know something."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made import made

from distbelief.core import events
from distbelief.core.conversations import grouping, membership
from distbelief.core.effects import RECEIVE, Arrival, End, ReduceGradients
from distbelief.core.events import BucketDue
from distbelief.core.settings import Plan
from distbelief.runtime.clock import WallClock
from distbelief.runtime.driver import Driver
from distbelief.runtime.player import Worker
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.strategies.grouped.whole import Gradients

MOST = 100_000
"""Looks at a reduction that would go on for ever."""


class Endpoint:
    """One that delivers what it is given, when it is polled."""

    def __init__(self) -> None:
        self.deliver: Callable[[Arrival], None] = lambda _: None
        self.coming: dict[int, Arrival] = {}
        self.polls = 0

    def poll(self, timeout: float | None) -> None:
        assert timeout == 0, "it waits for something, and a reduction is to go on"
        self.polls += 1
        if (arrival := self.coming.get(self.polls)) is not None:
            self.deliver(arrival)

    def send(self, *_: Any) -> None: ...
    def flush(self) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...


class Reducing:
    """Its reduction is done when something is true."""

    def __init__(self, done: Callable[[], bool | None]) -> None:
        self.done, self.looks = done, 0

    def reduce(self) -> bool | None:
        self.looks += 1
        assert self.looks < MOST, "nothing else is done while a reduction runs"
        return self.done()


class Machine:
    """It ends with the first that it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def handle(self, *what: Any) -> list[Any]:
        self.told.append(what)
        return [End("told")]


def play(
    worker: Any, endpoint: Endpoint, answers: list[Any], later: Callable[[WallClock, Driver], None] = lambda *_: None
) -> Driver:
    clock = WallClock(endpoint)  # type: ignore[arg-type]
    driver = Driver(clock, lambda *_: None)

    def story() -> Generator[Any, Any, None]:
        answers.append((yield ReduceGradients()))
        if endpoint.coming:
            answers.append((yield RECEIVE).event)

    driver.add_story("replica 0", story(), endpoint, Worker(reduce=worker.reduce))  # type: ignore[arg-type]
    later(clock, driver)
    driver.run()
    return driver


@pytest.mark.parametrize("how", [True, False])
def test_the_answer_is_that_of_the_worker(how: bool) -> None:
    answers: list[Any] = []
    worker = Reducing(lambda: how if worker.looks > 2 else None)
    play(worker, Endpoint(), answers)
    assert (answers, worker.looks) == ([how], 3)


def test_timers_and_other_roles_go_on_while_a_reduction_waits() -> None:
    answers: list[Any] = []
    other = Machine()
    endpoint = Endpoint()

    def more(clock: WallClock, driver: Driver) -> None:
        driver.add_machine("shard 0", other, Endpoint())  # type: ignore[arg-type]
        clock.call_later(0.001, lambda _: driver.tell("shard 0", "replica 1", events.Woke(BucketDue(0, 0, 0))), None)

    play(Reducing(lambda: True if other.told else None), endpoint, answers, more)
    assert answers == [True]
    assert endpoint.polls


@pytest.mark.parametrize(
    "word", [grouping.Halt(0), membership.Stop("over"), events.Lost("gone")], ids=["halt", "stop", "lost"]
)
def test_a_reduction_is_broken_off_by_what_must_be_known_now_and_by_nothing_else(word: Any) -> None:
    answers: list[Any] = []
    endpoint = Endpoint()
    endpoint.coming = {2: Arrival("coordinator", events.Woke(BucketDue(0, 0, 0))), 5: Arrival("coordinator", word)}
    worker = Reducing(lambda: None)
    play(worker, endpoint, answers)
    assert (answers, worker.looks) == ([False, events.Woke(BucketDue(0, 0, 0))], 5)


def test_who_looks_sees_since_when_a_reduction_waits() -> None:
    answers: list[Any] = []
    seen: list[float | None] = []
    drivers: list[Driver] = []

    def done() -> bool | None:
        seen.append(drivers[0].waiting_since("replica 0"))
        return True if len(seen) > 2 else None

    play(Reducing(done), Endpoint(), answers, lambda _, driver: drivers.append(driver))
    assert seen[0] is None
    assert seen[1] is not None
    assert seen[1] == seen[2]


@pytest.mark.parametrize(("bucket_mb", "count"), [(25.0, 1), (0.0003, 2)])
def test_a_replica_adds_up_in_buckets_of_the_size_that_is_asked_for(bucket_mb: float, count: int) -> None:
    layout = lay_out([Tensor(name, (100,), "float32") for name in "ab"])
    opened: list[Any] = []

    def open_carrier(size: int, found: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        opened.extend(found)
        return torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    plan, carrier = Plan(made("allreduce", bucket_mb=bucket_mb), layout, (), 0), SimpleNamespace(ready=None)
    carrier.open = open_carrier
    parameters = [torch.zeros(100, requires_grad=True) for _ in "ab"]
    Gradients(plan, 0, parameters, torch.zeros(layout.total, dtype=torch.uint8), carrier, overlaps=False)  # type: ignore[arg-type]  # a carrier, as far as it is asked
    assert len(opened) == count
