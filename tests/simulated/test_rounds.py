"""Rounds against a plain loop: where N minibatches are all data, N synchronous replicas make its steps."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from drawn import some
from oracles import classes
from split_jobs import smooth, state_of
from watching.observed import Observed

import distbelief as db
from distbelief.core.optimizer import Optimizer
from distbelief.job import Job
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Synchronous
from distbelief.testing.accounting import Accounting
from distbelief.transport.cluster_model import NetworkModel

SAMPLES, EPOCHS, RATE = 43, 8, 0.1
LATE = NetworkModel(latency=1e-3, jitter=20.0, delay_chance=0.2, delay=3e-2)
UNEVEN = db.ComputeModel(step=1e-3, spread="exponential", slow={0: 3.0}, straggle_chance=0.1)
SPLIT = {"partitions": 2, "split": "stages"}


def play(strategy: Synchronous, crashes: Any = (), **options: Any) -> tuple[Observed, Accounting]:
    """A job whose steps are random in time, on links that delay and reorder, and its accounts."""
    task = classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    cluster = db.Simulated(network=LATE, compute=UNEVEN, crashes=crashes, restart_seconds=0.02)
    run = Observed(Job(task, strategy, epochs=EPOCHS, evaluate_every=0, **options), cluster)
    accounting = run.accounted()
    assert run.outcome == "done"
    return run, accounting


def whole_gradient(seed: int) -> dict[str, torch.Tensor]:
    """As many steps of a plain loop, each with the gradient of all samples."""
    task = classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    torch.manual_seed(seed)
    model, data = task.model(), task.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        inputs, targets = data.batch(torch.arange(SAMPLES))
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize(
    ("minibatches", "options"),
    some(
        product(
            (2, 3, 5),
            (
                {}, {"push_every": 2}, SPLIT, {"standby": 1}, {"spare": 1, "backup_workers": 1},
                {"spare": 2, "backup_workers": 2, **SPLIT}, {"spare": 1}, {"spare": 1, "quorum": 1.0},
            ),
        ),
        9,
    ),
)  # fmt: skip
def test_as_many_replicas_as_minibatches_make_the_steps_of_the_whole_gradient(
    minibatches: int, options: dict[str, Any]
) -> None:
    """Of unequal minibatches, also where there are more replicas than these, and rounds do not wait for all."""
    options = {**options}
    replicas = minibatches + options.pop("spare", 0)
    options |= {"quorum": minibatches} if "quorum" in options else {}
    batch_size = -(-SAMPLES // (minibatches * options.get("push_every", 1)))
    for seed in range(3):
        strategy = Synchronous(replicas, 2, optimizer=Optimizer("momentum", RATE), **options)
        run, accounting = play(strategy, batch_size=batch_size, seed=seed)
        assert len(accounting.groups["shard 0"]) == EPOCHS
        expected = whole_gradient(seed)
        for name, tensor in state_of(run).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("replicas", "batches"), some(product((2, 3, 5), (7, 11, 40, 43)), 6))
def test_only_the_last_round_of_an_epoch_is_smaller(replicas: int, batches: int) -> None:
    """The others are of the minibatches that follow each other: what one replica would train with larger ones."""
    size = -(-SAMPLES // batches)
    _, accounting = play(Synchronous(replicas, 2), batch_size=size, snapshot_every="0")
    rounds = [sorted(accounting.batches(group)) for _, group in sorted(accounting.groups["shard 0"].items())]
    every = [(epoch, index) for epoch in range(EPOCHS) for index in range(-(-SAMPLES // size))]
    assert rounds == [
        [one for one in every if (one[0], one[1] // replicas) == of]
        for of in dict.fromkeys((epoch, index // replicas) for epoch, index in every)
    ]


@pytest.mark.parametrize("message", some(range(6, 60, 3), 8))
@pytest.mark.parametrize("options", [{}, {"backup_workers": 1}, SPLIT], ids=str)
def test_after_a_death_rounds_have_as_many_again_from_the_next_epoch_on(message: int, options: dict[str, Any]) -> None:
    strategy, replica = Synchronous(3, 2, restarts=1, **options), "replica 1.0" if "split" in options else "replica 1"
    run, accounting = play(strategy, (Crash(replica, message),), batch_size=4, snapshot_every="0")
    assert run.simulation.killed
    rounds = [accounting.batches(group) for _, group in sorted(accounting.groups["shard 0"].items())]
    sizes = Counter(len(one) for one in rounds if one[0][0] == EPOCHS - 1)
    waited = 3 - options.get("backup_workers", 0)
    assert sizes[waited] >= 11 // 3
