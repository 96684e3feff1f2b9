"""Every option of the benchmarks `simulator` and `accuracy` reaches what they run."""

from typing import Any

import pytest

import distbelief as db
from distbelief.bench import accuracy, simulator


def simulated(**options: int) -> dict[str, Any]:
    return simulator.run(simulator.SimulatorOptions(**{"replicas": 3, "shards": 2, "steps": 2, "repeats": 1, "quiet": True, **options}))


@pytest.mark.parametrize("name", ["replicas", "shards", "steps"])
def test_a_larger_simulation_has_more_messages(name: str) -> None:
    assert simulated(**{name: 4})["messages"] > simulated()["messages"]


def test_a_simulation_is_run_so_many_times() -> None:
    assert [len(simulated(repeats=repeats)["runs"]) for repeats in (1, 3)] == [1, 3]


def test_accuracy_is_of_the_jobs_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(accuracy, "_accuracies", lambda *job: [asked.append(job), {accuracy.EARLY: 0.5, accuracy.LATE: 0.5}][1])
    accuracy.run(accuracy.AccuracyOptions("digits", replicas=3, shards=4, prefetch=1, optimizer="adam", lr=0.5, seeds=2, quiet=True))
    optimizer = db.optim("adam", lr=0.5)
    strategies = (db.Single(optimizer=optimizer), db.Downpour(replicas=3, shards=4, prefetch=1, optimizer=optimizer))
    assert asked == [("digits", strategy, seed) for seed in (0, 1) for strategy in strategies]
