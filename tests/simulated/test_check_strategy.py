"""The conformance suite of strategies passes those that hold what it asks, and finds each that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from drawn import SEEDS
from oracles import sequential

from distbelief.core.effects import Batch
from distbelief.core.optimizer import optim
from distbelief.errors import LocalProtocolError
from distbelief.replica.downpour import DownpourTraining
from distbelief.replica.served_replica import ServedReplica
from distbelief.runtime.player import PlayedRole
from distbelief.strategies import Bounded, Downpour, Softsync, Strategy, Synchronous
from distbelief.strategies.context import Context
from distbelief.strategies.parameter_server.players import PLAYERS
from distbelief.strategies.players import Players
from distbelief.tasks import Task
from distbelief.testing.strategies import (
    Knob,
    Sequential,
    check_faults,
    check_options,
    check_sequential,
    check_strategy,
)

LOCAL = {"local_optimizer": optim("sgd"), "optimizer": optim("average"), "shards": 2}
KNOBS = {
    "bounded": {"staleness": Knob(0), "push_every": Knob(2)},
    "softsync": {"n": Knob(2), "shards": Knob(1)},
    "synchronous": {
        "push_every": Knob(2),
        "backup_workers": Knob(1),
        "quorum": Knob(0.5),
        "push_weight": Knob("speed", LOCAL),
        "stagger": Knob(True, {**LOCAL, "push_every": 2}),
        "stagger_delay": Knob(1, {**LOCAL, "push_every": 3, "stagger": True}),
        "stagger_mix": Knob(0.5, {**LOCAL, "push_every": 3, "stagger": True}),
    },
}


@pytest.fixture
def sgd() -> Sequential:
    def loop(task: Task, strategy: Any, epochs: int, batch_size: int, seed: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = sequential(
            task, "sgd", lr=strategy.optimizer.lr, epochs=epochs, batch_size=batch_size, seed=seed
        )
        return found

    return loop


@pytest.mark.parametrize("strategy", [Bounded(), Softsync(), Synchronous()], ids=lambda one: one.name)
def test_what_the_package_has_holds_it(strategy: Strategy, sgd: Sequential) -> None:
    check_strategy(strategy, sgd, KNOBS[strategy.name], seeds=min(40, SEEDS))


def test_another_loop_than_its_own_is_found(sgd: Sequential) -> None:
    def twice(task: Task, strategy: Any, *rest: int) -> dict[str, torch.Tensor]:
        optimizer = dataclasses.replace(strategy, optimizer=msgspec.structs.replace(strategy.optimizer, lr=0.2))
        return sgd(task, optimizer, *rest)

    with pytest.raises(AssertionError, match=r"with one replica, 0\.weight differs from the sequential loop's by 0\."):
        check_sequential(Downpour(), twice)


@dataclass(frozen=True)
class Idle(Downpour):
    name: ClassVar[str] = "downpour"
    colour: str = "red"


def test_an_option_that_does_nothing_is_found_and_so_is_one_that_nobody_tries() -> None:
    with pytest.raises(AssertionError, match=r"^colour='blue' changes neither the model nor how it was trained"):
        check_options(Idle(), {"colour": Knob("blue")})
    with pytest.raises(AssertionError, match=r"^another value of colour is not given"):
        check_options(Idle(), {"push_every": Knob(2)})
    with pytest.raises(AssertionError, match=r"^push_every is 1 by default"):
        check_options(Downpour(), {"push_every": Knob(1), "fetch_every": Knob(2)})


def telling(story: Callable[..., ServedReplica]) -> Players:
    """The players of downpour, whose replicas tell another story."""

    def replica(context: Context) -> PlayedRole:
        other = story(context.role, context.vectors, context.samples, incarnation=context.incarnation)
        return PLAYERS.replica(context)._replace(player=other)

    return dataclasses.replace(PLAYERS, replica=replica)


class Skipping(DownpourTraining):
    """Computes every minibatch but the fifth, of which it says that it has."""

    def _next_batch(self) -> Generator[Any, Any, Batch | None]:
        batch = yield from super()._next_batch()
        if batch is not None and self._replica.step == 4:
            batch = yield from super()._next_batch()
        return batch


@dataclass(frozen=True)
class Lossy(Downpour):
    name: ClassVar[str] = "downpour"

    @classmethod
    def players(cls) -> Players:
        return telling(partial(ServedReplica, Skipping))


def test_a_minibatch_that_is_lost_is_found() -> None:
    with pytest.raises((AssertionError, LocalProtocolError)) as found:
        check_faults(Lossy(), 20)
    assert any("of check_faults" in note for note in found.value.__notes__)


class Deaf(ServedReplica):
    def _leave(self) -> Any:
        while self._training is not None:
            yield from self._training.wait()


@dataclass(frozen=True)
class Endless(Downpour):
    name: ClassVar[str] = "downpour"

    @classmethod
    def players(cls) -> Players:
        return telling(partial(Deaf, DownpourTraining))


def test_a_job_that_does_not_end_is_found() -> None:
    with pytest.raises(LocalProtocolError, match="every role waits") as found:
        check_faults(Endless(), 5)
    assert any("of check_faults" in note for note in found.value.__notes__)
