"""Invariants of coordinator, shards and supervisor: simulations under observation assert them after every event."""

from __future__ import annotations

from collections import Counter

import pytest
from oracles import classes, mlp

import distbelief as db
from distbelief.coordination.coordinator import Coordinator
from distbelief.job import Job
from distbelief.places.supervisor import Supervisor
from distbelief.server.shard import Shard
from distbelief.testing.simulations import Observed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often events were taken and invariants asserted, by machine."""
    counted = Counter[str]()

    def count(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def counting(self: object, *given: object) -> object:
            counted[f"{kind.__name__}.{name}"] += 1
            return method(self, *given)

        monkeypatch.setattr(kind, name, counting)

    for kind in (Coordinator, Shard, Supervisor):
        count(kind, "handle")
        count(kind, "validate")
    return counted


def job() -> Job:
    return Job(classes(mlp, samples=24), db.Downpour(2, 2, restarts=1), epochs=1, evaluate_every=0)


def test_what_holds_is_asserted_after_every_event(calls: Counter[str]) -> None:
    crash = db.Crash("replica 1", 6)
    assert Observed(job(), db.Simulated(crashes=(crash,))).run().outcome == "done"
    for kind in ("Coordinator", "Shard", "Supervisor"):
        assert calls[f"{kind}.validate"] == calls[f"{kind}.handle"] > 3


def test_a_simulation_that_nobody_observes_asserts_nothing(calls: Counter[str]) -> None:
    db.Simulated().run(job())
    assert calls["Shard.handle"] > 3
    assert not any(count for name, count in calls.items() if name.endswith("validate"))
