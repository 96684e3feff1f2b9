"""What the steps of replicas are made of: on clusters where every part is known beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import distbelief as db
from distbelief.core.effects import Computed
from distbelief.core.records import StepsTimed
from distbelief.places.simulated.handling import Handling
from distbelief.record.metrics import read_metrics
from distbelief.runtime.player import COMPUTE, SHARE, StepTimes

STEP, LATENCY = 1e-3, 1e-4
LINE = db.NetworkModel(latency=LATENCY, bandwidth=1e12)


def times(strategy: Any, **cluster: Any) -> list[dict[str, Any]]:
    compute = db.ComputeModel(step=STEP, spread="constant", slow=cluster.pop("slow", {}))
    job = db.Job("digits", strategy, epochs=4, batch_size=72, evaluate_every=0, checkpoint_every=0, snapshot_every="0")
    place = db.Simulated(cluster.pop("network", LINE), compute, phantom=True, **{"handling": db.INSTANT, **cluster})
    found = [one["times"] for one in db.run(job, on=place)["per_replica"]]
    return [{name: one[name] / one["steps"] if name != "waits_for" else one[name] for name in one} for one in found]


def test_a_replica_waits_one_round_trip_for_its_shard() -> None:
    [one] = times(db.Downpour(replicas=1, shards=1))
    assert one["compute"] == pytest.approx(STEP)
    assert one["wait"] == pytest.approx(2 * LATENCY, rel=0.05)
    assert (one["update"], one["communicate"], one["waits_for"]) == (0.0, 0.0, "shard")


def test_in_rounds_the_fast_wait_for_the_slow() -> None:
    fast, slow = times(db.Synchronous(replicas=2, shards=1), slow={1: 3.0})
    assert slow["compute"] == pytest.approx(3 * STEP)
    assert fast["compute"] == pytest.approx(STEP)
    assert fast["wait"] - slow["wait"] == pytest.approx(2 * STEP, rel=0.05)


def test_messages_and_copies_are_work_and_no_wait() -> None:
    [idle] = times(db.Downpour(replicas=1, shards=1))
    [busy] = times(db.Downpour(replicas=1, shards=1), handling=Handling(message=1e-5, memory=1e12))
    # of a step, its replica takes one acknowledgement and one answer, and now and then word of the coordinator
    assert busy["communicate"] == pytest.approx(2e-5, rel=0.4)
    assert idle["communicate"] == 0.0


def test_those_who_share_a_memory_update_it_themselves() -> None:
    one, other = times(db.Hogwild(replicas=2), handling=Handling(message=0.0, memory=1e9))
    trained = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    for found in (one, other):
        assert found["update"] == pytest.approx(3 * trained / 1e9, rel=0.6)
        assert found["wait"] == pytest.approx(0.0, abs=1e-4)


def test_each_partition_has_times_and_the_lead_has_those_of_its_replica(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = db.Job("digits", db.Downpour(1, 2, partitions=2, split="stages"), epochs=4, out=run, evaluate_every=0)
    compute = db.ComputeModel(step=STEP, spread="constant")
    [one] = db.run(job, on=db.Simulated(LINE, compute, phantom=True))["per_replica"]
    timed = dict.fromkeys(("replica 0.0", "replica 0.1"), 0.0)
    for _, record in read_metrics(run / "metrics.jsonl"):
        if isinstance(record, StepsTimed):
            timed[record.role] += record.compute
    assert sum(timed.values()) == pytest.approx(STEP * one["steps"], rel=0.05)
    assert one["times"]["compute"] == pytest.approx(timed["replica 0.0"])
    assert one["times"]["steps"] == one["steps"] > 0
    assert min(timed.values()) > 0.0


def test_a_step_of_several_shares_counts_once_also_where_a_script_answers_it() -> None:
    noted: list[StepsTimed] = []
    times = StepTimes("replica 0.0", lambda: 0.0, noted.append)
    for begins in (True, False):
        times.begin(SHARE)
        times.share(begins)
    for _ in range(2):  # the answers of that step, and of one without a share here
        times.begin(COMPUTE)
        times.go_on(Computed(None, 1, 0.5))
    times.tell()
    assert [timed.steps for timed in noted] == [2]
