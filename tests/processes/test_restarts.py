"""Shards that die and come again: real processes, killed at chosen and at random moments, under every consistency and
over every carrier.
"""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.core.records import Record
from distbelief.errors import JobFailed
from distbelief.places.processes.local import Local
from distbelief.strategies import Bounded, Downpour, Softsync, Strategy, Synchronous

EPOCHS = 12
STRATEGIES = [
    Downpour(2, 2), Downpour(2, 2, push_every=3, fetch_every=2, prefetch=1), Synchronous(2, 2), Synchronous(3, 2,
        backup_workers=1),
    Softsync(2, 2), Bounded(2, 2, staleness=1),
]  # fmt: skip


def in_every_life(role: str, watch: jobs.Watch) -> Callable[[Record], None]:
    """Kill a role whenever there is a checkpoint to go on from."""

    def kill(record: Record) -> None:
        if isinstance(record, records.Stepped) and watch.of(records.Checkpointed) and not watch.of(records.Finished):
            jobs.kill(role)

    return kill


@pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda s: f"{s.name} {getattr(s, 'prefetch', '')}{getattr(s, 'backup_workers', '')}"
)
@pytest.mark.parametrize("role", ["shard 0", "shard 1"])
def test_a_killed_shard_comes_again_and_the_job_does_its_work(
    tmp_path: Path, watch: jobs.Watch, strategy: Strategy, role: str
) -> None:
    chance = random.Random(f"{strategy}{role}")
    reports = iter(range(10**6))
    moment = chance.randint(1, 20)

    def kill(record: Record) -> None:
        if isinstance(record, records.Stepped) and watch.of(records.Checkpointed) and next(reports) == moment:
            jobs.kill(role)

    watch.act = kill
    result = jobs.run(tmp_path, strategy, epochs=EPOCHS, snapshot_every="20")
    assert result["outcome"] == "done"
    assert result["samples"] >= EPOCHS * jobs.SAMPLES
    assert any(f"{role} is gone" in record.text for record in watch.of(records.Note)), "it died too late to be missed"
    if strategy.name == "synchronous":
        assert result["samples"] == EPOCHS * jobs.SAMPLES
        assert result["forgotten"] == 0
        assert watch.of(records.Rewound)


@pytest.mark.parametrize("place", [Local("tcp"), Local("tcp", tls=True)], ids=["tcp", "tls"])
@pytest.mark.parametrize("kind", [Downpour, Synchronous])
def test_over_a_network_too(tmp_path: Path, watch: jobs.Watch, kind: type[Strategy], place: Local) -> None:
    watch.once(records.EpochDone, lambda: jobs.kill("shard 1"), kept=True)
    result = jobs.run(tmp_path, kind(2, 2), place, epochs=EPOCHS)  # type: ignore[call-arg]
    assert result["outcome"] == "done"
    assert any("shard 1 is gone" in record.text for record in watch.of(records.Note))


def test_a_shard_that_dies_in_every_life_ends_the_job_with_the_remedy(tmp_path: Path, watch: jobs.Watch) -> None:
    watch.act = in_every_life("shard 0", watch)
    with pytest.raises(
        JobFailed, match=r"^shard 0 is gone: its process was killed by SIGKILL; go on from checkpoint \d+ with --resume"
    ):
        jobs.run(tmp_path, Downpour(2, 2, restarts=1), epochs=jobs.MANY)


@pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda s: f"{s.name} {getattr(s, 'prefetch', '')}{getattr(s, 'backup_workers', '')}"
)
def test_a_killed_coordinator_goes_on_by_its_journal_and_nothing_is_lost(
    tmp_path: Path, watch: jobs.Watch, strategy: Strategy
) -> None:
    watch.once(records.EpochDone, lambda: jobs.kill("coordinator"), after=3)
    once = strategy.name in ("downpour", "bounded")  # the others average, which tells nothing of counts
    told = {"task": "jobs:once"} if once else {}
    result = jobs.run(
        tmp_path,
        dataclasses.replace(strategy, optimizer=optim("sgd", lr=1.0)) if once else strategy,
        epochs=EPOCHS,
        **told,
    )
    assert result["outcome"] == "done"
    assert not once or jobs.times_trained(tmp_path) == [EPOCHS] * jobs.SAMPLES
    assert result["samples"] == EPOCHS * jobs.SAMPLES
    assert result["epochs"] == EPOCHS
    assert not watch.of(records.Rewound)
    assert not any(record.died for record in watch.of(records.Gone)), "the others did not notice"
    [told] = [record.text for record in watch.of(records.Note) if "coordinator" in record.text]
    assert (
        told
        == "coordinator is gone: its process was killed by SIGKILL; another takes its place, and goes on by its journal"
    )


def test_a_coordinator_that_dies_in_every_life_ends_the_job_with_the_remedy(tmp_path: Path, watch: jobs.Watch) -> None:
    watch.act = in_every_life("coordinator", watch)
    with pytest.raises(
        JobFailed,
        match=r"^coordinator is gone: its process was killed by SIGKILL; go on from checkpoint \d+ with --resume",
    ):
        jobs.run(tmp_path, Downpour(2, 2, restarts=1), epochs=jobs.MANY)
    assert len(watch.of(records.Started)) == 1
    assert sum("another takes its place" in record.text for record in watch.of(records.Note)) == 1
