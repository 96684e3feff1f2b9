"""Standbys: what they hold, that one in its shard's place loses nothing that was acknowledged, and who is believed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from oracles import classes, mlp, smooth
from torch import nn
from watching.observed import Look, Observed, Watcher

from distbelief.core import records
from distbelief.core.conversations import membership, mirroring, pushing
from distbelief.core.messages import Message
from distbelief.core.optimizer import LAYERWISE, optim
from distbelief.core.records import Cause
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Bounded, Downpour, Softsync, Synchronous
from distbelief.strategies.parameter_server.options import Served
from distbelief.testing.simulations import Endings
from distbelief.transport.cluster_model import NetworkModel

STRATEGIES = [
    Downpour(3, 2, standby=1), Downpour(3, 2, push_every=2, fetch_every=2, prefetch=1, standby=1), Softsync(4, 2, n=2,
        standby=1),
    Bounded(3, 2, staleness=1, standby=1), Synchronous(3, 2, standby=1), Synchronous(4, 2, backup_workers=1, standby=1),
]  # fmt: skip


def name(strategy: Any) -> str:
    return f"{strategy.name} {getattr(strategy, 'prefetch', '')}{getattr(strategy, 'backup_workers', '')}"


def play(strategy: Served, *crashes: Crash, **options: Any) -> Observed:
    cluster = options.pop("cluster", None) or Simulated(
        crashes=crashes, network=NetworkModel(jitter=3.0), compute=ComputeModel(spread="exponential")
    )
    usual = {"epochs": 3, "batch_size": 4, "evaluate_every": 0}
    run = Observed(Job(smooth(83), strategy, **{**usual, **options}), cluster)
    run.accounted()
    return run


class Last(Watcher):
    """Keeps the standbys of a run as they are when they are told to stop."""

    def __init__(self, run: Observed) -> None:
        self.run, self.held = run, dict[str, Any]()
        run.watch(self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, membership.Stop) and to.startswith("standby"):
            standby: Any = self.run.simulation.driver._players[to].machine
            self.held[to] = standby.following.held.arrays(), standby.following.shard


OPTIMIZERS = [optim("sgd"), optim("momentum"), optim("adagrad"), optim("adam"), optim("rmsprop")]
IN_ROUNDS = [strategy for strategy in STRATEGIES if strategy.name == "synchronous"]


MODELS: list[tuple[Any, torch.dtype]] = [
    (lambda: nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.2), nn.Linear(10, 3)), torch.float32),
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), torch.float32),
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16(), torch.bfloat16),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
def test_a_standby_holds_what_its_shard_holds_bit_for_bit(strategy: Served) -> None:
    layerwise = [optim(own) for own in LAYERWISE] if strategy in IN_ROUNDS else []
    for optimizer, (model, dtype) in some(product([*OPTIMIZERS, *layerwise], MODELS)):
        task = classes(model, samples=83, dtype=dtype)
        cluster = Simulated(network=NetworkModel(jitter=3.0), compute=ComputeModel(spread="exponential"))
        strategy = dataclasses.replace(strategy, optimizer=optimizer)
        run = Observed(Job(task=task, strategy=strategy, batch_size=8, evaluate_every=0, lr_schedule="linear"), cluster)
        last = Last(run)
        run.simulation.run()
        for index, shard in enumerate(run.simulation.shards):
            arrays, twin = last.held[f"standby {index}"]
            assert arrays.keys() == (own := shard.held.arrays()).keys()
            assert all(torch.equal(arrays[key], own[key]) for key in own)  # type: ignore[arg-type]
            assert (twin.version, twin.samples, twin.staleness) == (shard.version, shard.samples, shard.staleness)
            assert twin.version.updates > 2


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
@pytest.mark.parametrize("moment", some(range(20, 62, 3), SEEDS // 3))
def test_a_shard_that_dies_loses_nothing_and_nobody_goes_back(strategy: Served, moment: int) -> None:
    run = play(strategy, Crash("shard 1", moment))
    assert run.outcome == "done"
    assert [record.role for record in run.told(records.Succeeded)] == ["shard 1"]
    assert not run.told(records.Forgotten, records.Rewound)
    assert run.trained() == 3 * 83
    assert run.simulation.shards[1].version.incarnation == 1


def test_a_standby_that_dies_costs_nothing_and_another_comes() -> None:
    run = play(Downpour(3, 2, standby=1), Crash("standby 0", 30))
    assert run.outcome == "done"
    vacant = [(record.role, record.incarnation) for record in run.told(records.Vacant)]
    assert vacant == [("standby 0", 1)]


def test_one_death_after_another_in_one_place() -> None:
    deaths = (Crash("shard 0", 40), Crash("shard 0", 40), Crash("shard 0", 40))
    cluster = Simulated(crashes=deaths, restart_seconds=1e-3)
    run = play(Synchronous(2, 2, standby=1), cluster=cluster, epochs=6)
    assert run.outcome == "done"
    assert run.simulation.shards[0].version.incarnation == 3
    assert not run.told(records.Rewound)


def confirms(kept: list[int]) -> Look:
    """Have the number of what a standby has confirmed last be kept."""

    def delivered(_sender: str, _to: str, message: Message) -> None:
        if isinstance(message, mirroring.Confirmed):
            kept[0] = message.number

    return delivered


@pytest.mark.long
def test_nothing_is_acknowledged_that_the_standby_has_not_confirmed() -> None:
    """Each push that a replica is told of was confirmed before, from when a standby would take over."""
    job = Job(task=classes(mlp, samples=83), strategy=Downpour(3, 1, standby=1), batch_size=4, evaluate_every=0)
    run = Observed(job, Simulated(network=NetworkModel(jitter=5.0)))
    copied: dict[tuple[str, int], int] = {}
    kept, told = [0], list[bool]()

    def sent(_sender: str, to: str, message: Message) -> None:
        if isinstance(message, mirroring.Copied):
            copied[message.keys[0].who, message.keys[0].clock] = message.number
        elif isinstance(message, pushing.Pushed) and (to, message.clock) in copied:
            told.append(copied[to, message.clock] <= kept[0])

    run.look(sent, confirms(kept))
    run.simulation.run()
    assert len(told) > 15
    assert all(told)


@pytest.mark.parametrize("strategy", [Synchronous(3, 1, standby=1), Bounded(3, 1, staleness=0, standby=1)], ids=name)
def test_no_floor_is_told_that_the_standby_has_not_confirmed(strategy: Served) -> None:
    """Else its replicas would begin a step that is too far ahead of the standby, should it take the shard's place."""
    job = Job(task=classes(mlp, samples=83), strategy=strategy, batch_size=4, evaluate_every=0)
    run = Observed(job, Simulated(network=NetworkModel(jitter=5.0)))
    floors, kept, told = dict[int, int](), [0], 0

    def sent(_sender: str, to: str, message: Message) -> None:
        nonlocal told
        if isinstance(message, mirroring.StateSent | mirroring.Copied | mirroring.Decided):
            floors[message.number] = message.floor
        elif isinstance(message, pushing.Fetched) and floors and message.floor:
            confirmed = max((floor for number, floor in floors.items() if number <= kept[0]), default=-1)
            assert kept[0] < min(floors) or message.floor <= confirmed, (
                f"{to} is told of {message.floor}, the standby of {confirmed}"
            )
            told += 1

    run.look(sent, confirms(kept))
    run.simulation.run()
    assert run.outcome == "done"
    assert told > 10


@pytest.mark.parametrize("lost", [8, 14])
def test_what_was_held_when_a_standby_came_is_in_a_round_of_its_own(lost: int) -> None:
    """The pushes that are held for a round are not sent to it; when it is the shard, they come again."""
    slow = ComputeModel(spread="constant", slow={2: 50.0})  # so that two pushes are held nearly always
    for fallen in some(range(20, 50), SEEDS // 2):
        cluster = Simulated(
            crashes=(Crash("standby 0", lost), Crash("shard 0", fallen)), compute=slow, restart_seconds=1e-3
        )
        assert play(Synchronous(3, 1, standby=1), cluster=cluster, epochs=1).outcome == "done"


@pytest.mark.parametrize("kind", [Downpour, Synchronous, Softsync, Bounded])
def test_once_it_mirrors_no_message_is_too_late_for_its_shard_to_die(kind: type[Any]) -> None:
    """Also in its last life, while the last replica leaves, and while the job closes: the end is told, and saved."""
    task, strategy = classes(mlp, samples=43), kind(2, 2, standby=1, restarts=0)
    job, said = Job(task=task, strategy=strategy, epochs=2, batch_size=8, snapshot_every="3"), Counter[str]()
    calm = Observed(job)
    calm.look(lambda sender, *_: said.update([sender]))
    calm.run()
    assert said["shard 0"] > 40
    deaths = [(which, message) for which in (0, 1) for message in range(1, said[f"shard {which}"] + 1)]
    for which, message in some(deaths):
        run = Observed(job, Simulated(crashes=(Crash(f"shard {which}", message),)))
        endings = Endings(run)
        run.accounted()
        cause = endings.hold()
        if run.simulation.killed and not run.told(records.Succeeded):
            assert message < 20, f"message {message}: the standby holds everything by then"
            assert cause is Cause.SHARD_SPENT
            continue
        assert cause is Cause.EPOCHS_DONE, f"message {message}"
        assert run.trained() == 2 * 43
        assert run.told(records.Checkpointed)[-1].error == "", f"message {message}"
        assert len({record.role for record in run.told(records.Applied)}) == 2
