"""Hosts that are told to go while a simulated job trains: their replicas leave it, and the others do the rest."""

from __future__ import annotations

import re
from typing import Any

import pytest
from drawn import SEEDS, some
from oracles import classes, mlp
from watching.observed import Observed

from distbelief.core import records, roles
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import LeavingHost
from distbelief.strategies import Allreduce, Downpour, Hogwild, Sandblaster, Synchronous
from distbelief.testing.accounting import Accounting
from distbelief.transport.cluster_model import NetworkModel

WAYS: dict[str, Any] = {
    "downpour": Downpour(3, 2),
    "push every 3": Downpour(3, 2, push_every=3, fetch_every=2),
    "split": Downpour(3, 2, partitions=2),
    "synchronous": Synchronous(3, 2),
    "sandblaster": Sandblaster(3, 2, 2, portion_size=8),
    "split sandblaster": Sandblaster(3, 2, 2, portion_size=8, partitions=2, split="stages"),
    "allreduce": Allreduce(3),
    "split allreduce": Allreduce(3, partitions=2),
}
EPOCHS, SAMPLES = 3, 48
LONG, SHORT = 1000.0, 1e-4
"""Time for anything, and for less than a step."""


def play(strategy: Any, *leaves: LeavingHost, **cluster: Any) -> Observed:
    fit = {} if isinstance(strategy, Sandblaster) else {"epochs": EPOCHS, "batch_size": 4}
    job = Job(classes(mlp, samples=SAMPLES), strategy, snapshot_every="0", **fit)
    slow = Simulated(NetworkModel(latency=1e-3), ComputeModel(step=5e-3, slow={1: 3.0}), leaves=leaves, **cluster)
    run = Observed(job, slow)
    served = isinstance(strategy, Downpour | Synchronous)
    accounting = Accounting(run) if served else None
    run.run()
    if accounting is not None:
        accounting.finish(run.outcome, run.simulation.killed)
    return run


def _name(way: str) -> str:
    """A replica, or a partition of one that does not lead it."""
    return "replica 1.1" if "split" in way else "replica 1"


def gone(run: Observed) -> list[tuple[str, bool]]:
    """Who went while the job trained, and whether by a death."""
    before = run.records[: next(at for at, one in enumerate(run.records) if isinstance(one, records.Ending))]
    return [(one.role, one.died) for one in before if isinstance(one, records.Gone)]


@pytest.mark.parametrize("seconds", [LONG, SHORT], ids=["in time", "cut short"])
@pytest.mark.parametrize("way", WAYS)
def test_a_host_that_is_told_to_go_leaves_at_whichever_message_and_the_others_do_the_rest(
    way: str, seconds: float
) -> None:
    left, messages = 0, some(range(2, 26), max(5, SEEDS // 5))
    for message in messages:
        run = play(WAYS[way], LeavingHost(_name(way), message, seconds))
        if not run.told(records.Joined):
            assert run.outcome == "interrupted", f"message {message}: the job had not begun, and ends"
            continue
        assert run.outcome == "done", f"message {message}"
        told = gone(run)
        assert told in ([], [(roles.lead_of(_name(way)), False)]), f"message {message}: {told}"
        left += bool(told)
        if seconds == LONG:
            assert not run.simulation.killed, f"message {message}: it had all the time"
    assert left >= len(messages) // 2, f"it left in {left} of {len(messages)} jobs"


@pytest.mark.parametrize(
    ("strategy", "leaves", "told"),
    [
        (Downpour(2), [("shard 0", 9, 1.0)], "shard 0 cannot leave: only replicas do, and there are 0 to 1"),
        (Downpour(2), [("replica 2", 9, 1.0)], "replica 2 cannot leave: only replicas do"),
        (Downpour(2), [("replica 1", 9, 1.0)] * 2, "replica 1 cannot leave twice"),
        (Downpour(2), [("replica 1", 0, 1.0)], "replica 1 cannot leave at message 0"),
        (Downpour(2), [("replica 1", 9, 0.0)], "replica 1 cannot leave within 0.0 s"),
        (Hogwild(2), [("replica 1", 9, 1.0)], "replica 1 cannot leave: replicas of strategy hogwild share one host's"),
    ],
)
def test_who_cannot_leave_is_told_why(strategy: Any, leaves: list[tuple[str, int, float]], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        Simulated(leaves=tuple(LeavingHost(*one) for one in leaves)).settings(Job("digits", strategy))
