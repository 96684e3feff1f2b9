"""Shards and coordinators that die and come again: real processes, over every carrier."""

import dataclasses
from pathlib import Path

import jobs
import pytest

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.places.compute_model import ComputeModel
from distbelief.places.processes.local import Local
from distbelief.strategies import Bounded, Downpour, Strategy, Synchronous

EPOCHS = 12


@pytest.mark.parametrize(
    ("strategy", "place", "role"),
    [
        (Downpour(2, 2, push_every=3, fetch_every=2, prefetch=1), Local(path="served"), "shard 0"),
        (Synchronous(2, 2), Local("tcp", tls=True), "shard 1"),
        (Bounded(2, 2, staleness=1), Local("tcp"), "shard 0"),
    ],
    ids=["downpour", "synchronous", "bounded"],
)
def test_a_killed_shard_comes_again_and_the_job_does_its_work(
    tmp_path: Path, watch: jobs.Watch, strategy: Strategy, place: Local, role: str
) -> None:
    watch.once(records.EpochDone, lambda: jobs.kill(role), kept=True)
    result = jobs.run(tmp_path, strategy, place, epochs=EPOCHS, evaluate_every=0, snapshot_every="20")
    assert result["outcome"] == "done"
    assert result["samples"] >= EPOCHS * jobs.SAMPLES  # type: ignore[operator]
    assert any(f"{role} is gone" in record.text for record in watch.of(records.Note)), "it died too late to be missed"
    if strategy.name == "synchronous":
        assert result["samples"] == EPOCHS * jobs.SAMPLES
        assert result["forgotten"] == 0
        assert watch.of(records.Rewound)


@pytest.mark.parametrize("strategy", [Downpour(2, 2), Synchronous(2, 2)], ids=lambda one: one.name)
def test_a_killed_coordinator_goes_on_by_its_journal_and_nothing_is_lost(
    tmp_path: Path, watch: jobs.Watch, strategy: Strategy
) -> None:
    watch.once(records.EpochDone, lambda: jobs.kill("coordinator"), after=3)
    once = strategy.name == "downpour"  # the other averages, which tells nothing of counts
    told = {"task": "jobs:once"} if once else {}
    result = jobs.run(
        tmp_path,
        dataclasses.replace(strategy, optimizer=optim("sgd", lr=1.0)) if once else strategy,
        epochs=EPOCHS,
        evaluate_every=0,
        **told,
    )
    assert result["outcome"] == "done"
    assert not once or jobs.times_trained(tmp_path) == [EPOCHS] * jobs.SAMPLES
    assert result["samples"] == EPOCHS * jobs.SAMPLES
    assert result["epochs"] == EPOCHS
    assert not watch.of(records.Rewound)
    assert not any(record.died for record in watch.of(records.Gone)), "the others did not notice"
    gone = "coordinator is gone: its process was killed by SIGKILL"
    said = f"{gone}; another takes its place, and continues from its journal"
    assert [note.text for note in watch.of(records.Note)].count(said) == 1


def test_a_coordinator_that_has_counted_its_bytes_leaves_out_no_record_in_its_next_life(
    tmp_path: Path, watch: jobs.Watch
) -> None:
    """Such a count is no record of its journal."""
    watch.once(records.BytesCounted, lambda: jobs.kill("coordinator"), role="coordinator")
    steady = Local(compute=ComputeModel(step=0.03, spread="constant"))
    result = jobs.run(tmp_path, Downpour(2, 2), steady, epochs=EPOCHS, evaluate_every=0)
    assert any("coordinator is gone" in note.text for note in watch.of(records.Note)), "the job ended too early"
    assert result["samples"] == EPOCHS * jobs.SAMPLES
