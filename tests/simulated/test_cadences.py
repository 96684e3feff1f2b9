"""When a job measures, and when it ends: by minibatches, and by a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import distbelief as db
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Strategy
from distbelief.tasks import Task
from distbelief.tasks.task import TensorData

WAYS = [db.Single(), db.Downpour(2), db.Synchronous(2), db.Allreduce(2), db.Hogwild(2)]
DATA = TensorData(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3)
TASK = Task(model=lambda: torch.nn.Linear(6, 3), train=lambda: DATA, test=lambda: DATA)
STEADY = db.ComputeModel(step=0.2, spread="constant")


@pytest.mark.parametrize("strategy", WAYS, ids=lambda one: one.name)
def test_a_budget_ends_the_job_at_its_time(strategy: Strategy) -> None:
    """A step takes 0.2 s: each replica has made 50 when 10 s are spent, and ends the one that it is at."""
    job = Job(TASK, strategy, epochs=1000, batch_size=4, budget="10s", snapshot_every="0")
    result = db.Simulated(compute=STEADY).run(job)
    assert (result["outcome"], result["cause"]) == ("done", "the budget is spent")
    breaks_off = isinstance(strategy, db.Allreduce)  # the round that its replicas are at
    assert 10 - 0.2 * breaks_off <= result["seconds"] < 10.5
    assert 46 * result["replicas"] <= result["steps"] <= 52 * result["replicas"]


@pytest.mark.parametrize("strategy", WAYS, ids=lambda one: one.name)
def test_evaluations_are_made_every_so_many_applied_minibatches(strategy: Strategy) -> None:
    """Of 40 minibatches: when the coordinator hears that 12 more are applied, and at the end."""
    job = Job(TASK, strategy, epochs=4, batch_size=4, evaluate_every="12minibatches")
    history = db.Simulated(compute=STEADY).run(job)["history"]
    done = [row["samples"] // 4 for row in history]
    assert len(done) == 4
    assert all(12 * number <= at <= 12 * number + 3 for number, at in enumerate(done[:-1], 1))
    assert done[-1] == 40


@pytest.mark.parametrize("message", [11, 17, 29])
def test_a_job_that_goes_back_measures_by_the_minibatches_of_its_checkpoint(message: int) -> None:
    """All replicas die between two measures, and make again what they made since the checkpoint."""
    job = Job(TASK, db.Allreduce(2, restarts=1), epochs=4, batch_size=4, evaluate_every="12minibatches")
    crashes = tuple(Crash(f"replica {i}", message) for i in range(2))
    result = db.Simulated(compute=STEADY, crashes=crashes, restart_seconds=1.0).run(job)
    done = [row["samples"] // 4 for row in result["history"]]
    assert result["steps"] > 40
    assert {12, 24, 36} <= {*done}
    assert all(at % 12 <= 1 for at in done[:-1])


@pytest.mark.parametrize("strategy", WAYS, ids=lambda one: one.name)
def test_a_resumed_job_counts_the_minibatches_from_before(strategy: Strategy, tmp_path: Path) -> None:
    """Of 40 minibatches the first 10 are an earlier attempt's."""
    named: dict[str, Any] = {"batch_size": 4, "evaluate_every": "12minibatches", "out": str(tmp_path)}
    db.Simulated(compute=STEADY).run(Job(TASK, strategy, epochs=1, **named))
    history = db.Simulated(compute=STEADY).run(Job(TASK, strategy, epochs=4, resume=True, **named))["history"]
    done = [row["samples"] // 4 for row in history if row["samples"] > 40]
    assert len(done) == 4
    assert all(12 * number <= at <= 12 * number + 3 for number, at in enumerate(done[:-1], 1)), done


def test_minibatches_mean_nothing_to_a_strategy_that_counts_iterations() -> None:
    with pytest.raises(UsageError, match="--evaluate-every 5minibatches: strategy sandblaster counts iterations"):
        Job("digits", db.Sandblaster(), evaluate_every="5minibatches").settings()


@pytest.mark.parametrize(
    ("name", "value"), [("evaluate_every", "5 epochs"), ("evaluate_every", "0minibatches"), ("budget", "5"),
                        ("snapshot_every", "5minibatch"), ("budget", "-1s"), ("evaluate_every", "-1")],
)  # fmt: skip
def test_times_and_counts_that_are_none_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} '?{value}"):
        Job("digits", **{name: value}).settings()
