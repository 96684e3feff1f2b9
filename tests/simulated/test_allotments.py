"""Minibatches of a replica's own: each applied once, whoever dies, and gradients weighted by what they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from oracles import classes, mlp, smooth
from watching.observed import Observed, Watcher

from distbelief.core import records, roles
from distbelief.core.conversations import dealing
from distbelief.core.effects import Batch, Computed
from distbelief.core.messages import Message
from distbelief.core.optimizer import Optimizer
from distbelief.core.portions import OWN, STREAM, Portion
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.runtime.player import Answer, Compute, PlayedRole
from distbelief.strategies import Bounded, Downpour, Softsync, Strategy, Synchronous
from distbelief.strategies.context import Context
from distbelief.strategies.parameter_server.players import PLAYERS
from distbelief.strategies.players import Players
from distbelief.tasks import Task
from distbelief.testing.accounting import Accounting

EPOCHS, BATCH = 2, 4
STRATEGIES: dict[str, Strategy] = {
    "downpour": Downpour(3, 2, push_every=2),
    "prefetch": Downpour(2, 2, prefetch=1),
    "bounded": Bounded(3, 2, staleness=0),
    "softsync": Softsync(3, 2),
    "synchronous": Synchronous(3, 2),
    "backup workers": Synchronous(3, 2, backup_workers=1),
    "standby": Synchronous(2, 2, standby=1),
}
LENGTHS = (5, 11, 8)
"""Minibatches of the stream of each replica."""


def streaming(context: Context) -> PlayedRole:
    """A replica whose data are a stream of so many minibatches."""

    def computes(clip_norm: float) -> Compute:
        inner = context.computes(clip_norm)

        def compute(batch: Batch, answer: Answer) -> Computed | None:
            if batch.index % OWN >= LENGTHS[roles.index_of(context.role)]:
                return Computed(None, 0, 0.0, ended=True)
            return inner(batch, answer)

        return compute

    return PLAYERS.replica(dataclasses.replace(context, samples=STREAM, computes=computes))


def of_streams(strategy: Strategy) -> Strategy:
    @dataclass(frozen=True)
    class Streaming(type(strategy)):  # type: ignore[misc]
        @classmethod
        def players(cls) -> Players:
            return dataclasses.replace(PLAYERS, replica=streaming)

    return Streaming(**{one.name: getattr(strategy, one.name) for one in dataclasses.fields(strategy) if one.init})


def _minibatches(portion: Portion) -> list[tuple[int, int]]:
    return [(portion.epoch, index) for index in range(portion.first, portion.first + portion.count)]


class Dealt(Watcher):
    """What each life of each replica is dealt, and does not give back."""

    def __init__(self) -> None:
        self.minibatches: dict[str, list[tuple[int, int]]] = {}

    def sent(self, sender: str, to: str, message: Message) -> None:
        """Note a portion, or that it is given back."""
        if isinstance(message, dealing.Deal):
            self.minibatches.setdefault(to, []).extend(_minibatches(message.portion))
        elif isinstance(message, dealing.Progress):
            for one in message.returned:
                for minibatch in _minibatches(one):
                    self.minibatches[sender].remove(minibatch)


def observe(task: Task, strategy: Strategy, cluster: Simulated | None = None, **options: Any) -> tuple[Observed, Dealt]:
    usual = {"epochs": EPOCHS, "batch_size": BATCH, "evaluate_every": 0, "snapshot_every": "3"}
    run, dealt = Observed(Job(task=task, strategy=strategy, **{**usual, **options}), cluster), Dealt()
    accounting = Accounting(run)
    run.watch(dealt)
    run.run()
    accounting.finish(run.outcome, run.simulation.killed)
    assert run.outcome == "done"
    return run, dealt


def unequal(*lengths: int) -> Task:
    """A task that has so many samples for each replica in turn; before that it is loaded once for the job."""
    task = smooth(max(lengths))
    loads: Iterator[int] = iter((max(lengths), *lengths))

    def train() -> Any:
        data, count = task.train(), next(loads)
        return smooth(max(lengths)).train() if count == len(data) else Head(data, count)

    return dataclasses.replace(task, train=train)


class Head:
    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def batch(self, numbers: torch.Tensor) -> Any:
        """A minibatch."""
        return self._data.batch(numbers)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_stream_is_dealt_to_its_end(name: str) -> None:
    strategy = STRATEGIES[name]
    run, _ = observe(classes(mlp, samples=60), of_streams(strategy))
    counted = dict.fromkeys(range(3), 0)
    for record in run.records:
        if isinstance(record, records.Stepped):
            counted[roles.index_of(record.role)] += record.steps
    n = strategy.replicas
    if name != "backup workers":
        assert counted == {index: EPOCHS * LENGTHS[index] if index < n else 0 for index in range(3)}
    assert len(run.told(records.EpochDone)) == EPOCHS


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("data", ["sequential", "own", "private", "stream"])
def test_whoever_dies_each_minibatch_of_its_own_is_applied(name: str, data: str) -> None:
    strategy, task = STRATEGIES[name], classes(mlp, samples=60)
    # a shard has to go back to a checkpoint, and its third message is before the first
    deaths = [(role, message) for role in ("replica 1", "coordinator", "shard 0") for message in (3, 11, 26)]
    for role, message in some((one for one in deaths if one != ("shard 0", 3)), SEEDS // 5):
        cluster = Simulated(crashes=(Crash(role, message),), restart_seconds=0.01)
        options = {"sequential": {"order": "sequential"}, "stream": {}}.get(data, {"data": data})
        observe(task, of_streams(strategy) if data == "stream" else strategy, cluster, **options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_left_to_a_replica_that_never_comes_again_is_told(name: str) -> None:
    strategy = dataclasses.replace(STRATEGIES[name], restarts=0)
    task = classes(mlp, samples=60)
    job = Job(task=task, strategy=strategy, epochs=EPOCHS, batch_size=BATCH, order="sequential", evaluate_every=0)
    run = Observed(job, Simulated(crashes=(Crash("replica 1", 12),)))
    run.simulation.run()
    gone = next(record for record in run.told(records.Gone) if record.died)
    done = sum(record.steps for record in run.told(records.Stepped) if record.role == "replica 1")
    n = strategy.replicas
    part = len(range(15 // n, 2 * 15 // n))
    assert run.outcome == "done"
    assert gone.given_up == EPOCHS * part - done


@pytest.mark.parametrize("drop_last", [False, True])
def test_synchronous_replicas_on_unequal_data_are_sgd_on_the_weighted_union(drop_last: bool) -> None:
    lengths, lr = (10, 23), 0.5
    strategy = Synchronous(2, 2, optimizer=Optimizer("sgd", lr))
    # a checkpoint would break up a round: who is held back sits out
    own = {"data": "own", "order": "sequential", "snapshot_every": "0"}
    run, _ = observe(unequal(*lengths), strategy, epochs=1, drop_last=drop_last, **own)
    task = smooth(max(lengths))
    torch.manual_seed(0)
    model, data = task.model(), task.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for first in range(0, max(lengths), BATCH):
        own = [range(first, min(first + BATCH, length)) for length in lengths]
        numbers = [i for one in own for i in one if not drop_last or len(one) == BATCH]
        if numbers:
            optimizer.zero_grad()
            inputs, targets = data.batch(torch.tensor(numbers))
            task.loss(model(inputs), targets).backward()
            optimizer.step()
    vector, plan = run.vector(), run.simulation.coordinator.plan
    for entry in plan.layout.entries:
        theirs = model.state_dict()[entry.tensor.name]
        ours = torch.frombuffer(bytearray(vector[entry.start : entry.start + entry.tensor.size]), dtype=torch.float32)
        assert torch.allclose(ours.view(theirs.shape), theirs, atol=1e-6), entry.tensor.name
