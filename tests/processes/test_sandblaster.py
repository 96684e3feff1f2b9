"""Sandblaster in real processes: whoever is killed, it ends with the bits of a run that nobody disturbed."""

import json
from pathlib import Path
from typing import Any

import jobs
import pytest

from distbelief.core import records
from distbelief.core.records import Record
from distbelief.errors import CheckpointError
from distbelief.job import Job
from distbelief.places.evaluate import evaluate
from distbelief.places.processes.local import Local
from distbelief.strategies import Downpour, Sandblaster

ITERATIONS = 12
SAME = {"iterations": ITERATIONS, "portion_size": 16, "send_every": 2, "deterministic": True, "tolerance": 0.0}


def job(out: Path, resume: bool = False, **options: Any) -> Job:
    strategy = Sandblaster(**{"replicas": 2, "shards": 2, **SAME, **options})
    return Job("jobs:tiny", strategy, out=str(out), resume=resume, checkpoint_every=3)


def run(out: Path, place: Local | None = None, resume: bool = False, **options: Any) -> dict[str, Any]:
    return (place or Local()).run(job(out, resume, **options))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    result = jobs.PLAIN.run(job(folder, replicas=1))
    assert (result["outcome"], result["epochs"]) == ("done", ITERATIONS)
    return folder


def test_processes_end_with_the_bits_of_a_simulation(tmp_path: Path, calm: Path) -> None:
    result = run(tmp_path / "run", Local("tcp"), replicas=3)
    assert result["outcome"] == "done"
    assert jobs.same(calm, tmp_path / "run")
    assert evaluate(tmp_path / "run")["test_accuracy"] == result["test_accuracy"]
    assert result["history"][-1]["epoch"] == ITERATIONS


def killer(watch: jobs.Watch, *victims: str) -> list[str]:
    """Kills one role after another, each some iterations after the last, once there is a checkpoint; who was killed."""
    killed: list[str] = []

    def kill(record: Record) -> None:
        if isinstance(record, records.EpochDone) and record.epoch > 3 + 2 * len(killed) and len(killed) < len(victims):
            assert jobs.kill(victims[len(killed)])
            killed.append(victims[len(killed)])

    watch.act = kill
    return killed


def test_split_replicas_end_with_the_bits_of_a_simulation_whoever_is_killed(tmp_path: Path, watch: jobs.Watch) -> None:
    """In stages, of which each sends its part to shards of its own."""
    split: dict[str, Any] = {"partitions": 2, "split": "stages"}
    jobs.PLAIN.run(job(tmp_path / "simulated", replicas=1, **split))
    killed = killer(watch, "replica 1.1")
    assert run(tmp_path / "run", **split)["outcome"] == "done"
    assert killed == ["replica 1.1"]
    assert jobs.same(tmp_path / "simulated", tmp_path / "run")


def test_whoever_is_killed_the_bits_are_the_same(tmp_path: Path, watch: jobs.Watch, calm: Path) -> None:
    """A coordinator goes on by its journal."""
    killed = killer(watch, "replica 0", "shard 0", "coordinator")
    result = run(tmp_path / "run")
    assert (result["outcome"], result["epochs"], len(killed)) == ("done", ITERATIONS, 3)
    assert jobs.same(calm, tmp_path / "run")


def test_a_standby_takes_the_place_of_a_killed_shard_and_nobody_goes_back(
    tmp_path: Path, watch: jobs.Watch, calm: Path
) -> None:
    killed: list[str] = []

    def act(record: Record) -> None:
        ready = watch.of(records.StandbyReady)
        if isinstance(record, records.Stepped) and len(ready) >= 2 + len(killed) and len(killed) < 2:
            killed.append(f"shard {len(killed)}")
            jobs.kill(killed[-1])

    watch.act = act
    result = run(tmp_path / "run", Local("tcp", tls=True), standby=1)
    assert (result["outcome"], result["epochs"], result["forgotten"]) == ("done", ITERATIONS, 0)
    assert [record.role for record in watch.of(records.Succeeded)] == killed == ["shard 0", "shard 1"]
    assert not watch.of(records.Rewound)
    assert not any(record.died for record in watch.of(records.Gone)), "a replica did not outlive its shard"
    assert jobs.same(calm, tmp_path / "run")
    assert [record.iteration for record in watch.of(records.Iterated)] == list(range(1, ITERATIONS + 1))
    assert result["descent"]["loss"] == json.loads((calm / "result.json").read_text())["descent"]["loss"]


@pytest.mark.parametrize("options", [{}, {"method": "cg"}, {"batch_size": 160}], ids=str)
def test_a_resumed_job_ends_with_the_bits_of_one_that_was_not_interrupted(
    tmp_path: Path, watch: jobs.Watch, calm: Path, options: dict[str, Any]
) -> None:
    """What each method goes on with is in its checkpoints, for other numbers of replicas and shards too."""
    if options:
        calm = tmp_path / "calm"
        jobs.PLAIN.run(job(calm, **options))
    watch.once(records.EpochDone, watch.interrupt, after=3)
    broken = run(tmp_path / "run", **options)
    assert broken["outcome"] == "interrupted"
    assert 0 < broken["epochs"] < ITERATIONS
    watch.rest()
    result = run(tmp_path / "run", resume=True, replicas=1, shards=3, **options)
    assert (result["outcome"], result["epochs"]) == ("done", ITERATIONS)
    assert jobs.same(calm, tmp_path / "run")


def test_a_run_of_another_kind_is_not_resumed_but_begun_from(tmp_path: Path) -> None:
    jobs.PLAIN.run(jobs.job(tmp_path / "run", Downpour(1, 1)))
    with pytest.raises(
        CheckpointError, match=r"was trained with downpour, and sandblaster counts its data differently: .* --init-from"
    ):
        run(tmp_path / "run", resume=True)
    strategy, begin = Sandblaster(2, 2, 1, portion_size=16), str(tmp_path / "run")
    begun = jobs.PLAIN.run(Job("jobs:tiny", strategy, out=str(tmp_path / "next"), init_from=begin))
    assert begun["outcome"] == "done"
