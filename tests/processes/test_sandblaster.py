"""Sandblaster in real processes: whoever is killed, and wherever it is resumed, it ends with the bits of a run that
nobody disturbed.
"""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import load_file

from distbelief.core import records
from distbelief.core.records import Record
from distbelief.errors import CheckpointError, UsageError
from distbelief.job import Job
from distbelief.places.evaluate import evaluate
from distbelief.places.processes.local import Local
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Downpour, Sandblaster

ITERATIONS = 25
SAME: dict[str, Any] = {
    "iterations": ITERATIONS,
    "portion_size": 16,
    "send_every": 2,
    "deterministic": True,
    "tolerance": 0.0,
}


def run(
    out: Path, place: Local | None = None, task: str = "jobs:tiny", resume: bool = False, **options: Any
) -> dict[str, Any]:
    strategy = Sandblaster(**{"replicas": 2, "shards": 2, **SAME, **options})
    return (place or Local()).run(Job(task, strategy, out=str(out), resume=resume, checkpoint_every=3))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    whole = weights(one)
    return all(torch.equal(value, whole[name]) for name, value in weights(other).items())


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    strategy = Sandblaster(replicas=1, shards=2, **SAME)
    result = Simulated(keep=True).run(Job("jobs:tiny", strategy, out=str(folder), checkpoint_every=3))
    assert (result["outcome"], result["epochs"]) == ("done", ITERATIONS)
    assert result["test_accuracy"] > 0.9
    return folder


@pytest.mark.parametrize("place", [Local(), Local("tcp"), Local("tcp", tls=True)], ids=["shared", "tcp", "tls"])
def test_processes_end_with_the_bits_of_a_simulation(tmp_path: Path, calm: Path, place: Local) -> None:
    result = run(tmp_path / "run", place, replicas=3)
    assert result["outcome"] == "done"
    assert same(calm, tmp_path / "run")
    assert evaluate(tmp_path / "run")["test_accuracy"] == result["test_accuracy"]
    assert result["history"][-1]["epoch"] == ITERATIONS


@pytest.mark.parametrize("victim", ["", "replica 0.0", "replica 1.1", "shard 1"])
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_split_replicas_end_with_the_bits_of_a_simulation_whoever_is_killed(
    tmp_path: Path, watch: jobs.Watch, victim: str, transport: str
) -> None:
    """One is split in stages, of which each sends its part to shards of its own."""
    split: dict[str, Any] = {"partitions": 2, "split": "stages"}
    strategy = Sandblaster(replicas=1, shards=2, **SAME, **split)
    Simulated(keep=True).run(Job("jobs:tiny", strategy, out=str(tmp_path / "simulated"), checkpoint_every=3))
    killed: list[int] = []

    def kill(record: Record) -> None:
        if isinstance(record, records.EpochDone) and record.epoch > 3 and victim and not killed:
            killed.append(jobs.kill(victim))

    watch.act = kill
    result = run(tmp_path / "run", Local(transport), **split)
    assert (result["outcome"], bool(killed)) == ("done", bool(victim))
    assert same(tmp_path / "simulated", tmp_path / "run")


@pytest.mark.parametrize("role", ["replica 0", "replica 1", "shard 0", "shard 1"])
@pytest.mark.parametrize("times", [1, 3])
def test_whoever_is_killed_the_bits_are_the_same(
    tmp_path: Path, watch: jobs.Watch, calm: Path, role: str, times: int
) -> None:
    chance = random.Random(f"{role}{times}")
    reports = iter(range(10**6))
    moments = {chance.randint(30, 200) for _ in range(times)}

    def kill(record: Record) -> None:
        if isinstance(record, records.Stepped) and next(reports) in moments:
            jobs.kill(role)

    watch.act = kill
    result = run(tmp_path / "run")
    assert result["outcome"] == "done"
    assert any(role in one.text for one in watch.of(records.Note)) or any(
        one.role == role and one.died for one in watch.of(records.Gone)
    )
    assert same(calm, tmp_path / "run")


@pytest.mark.parametrize("place", [Local(), Local("tcp", tls=True)], ids=["shared", "tls"])
def test_a_standby_takes_the_place_of_a_killed_shard_and_nobody_goes_back(
    tmp_path: Path, watch: jobs.Watch, calm: Path, place: Local
) -> None:
    killed: list[str] = []

    def act(record: Record) -> None:
        ready = watch.of(records.StandbyReady)
        if isinstance(record, records.Stepped) and len(ready) >= 2 + len(killed) and len(killed) < 2:
            killed.append(f"shard {len(killed)}")
            jobs.kill(killed[-1])

    watch.act = act
    result = run(tmp_path / "run", place, standby=1)
    assert (result["outcome"], result["epochs"], result["forgotten"]) == ("done", ITERATIONS, 0)
    assert [record.role for record in watch.of(records.Succeeded)] == killed == ["shard 0", "shard 1"]
    assert not watch.of(records.Rewound)
    assert not any(record.died for record in watch.of(records.Gone)), "a replica did not outlive its shard"
    assert same(calm, tmp_path / "run")
    assert [record.iteration for record in watch.of(records.Iterated)] == list(range(1, ITERATIONS + 1))
    assert result["descent"]["loss"] == json.loads((calm / "result.json").read_text())["descent"]["loss"]


def test_a_coordinator_that_is_killed_goes_on_by_its_journal(tmp_path: Path, watch: jobs.Watch, calm: Path) -> None:
    watch.once(records.EpochDone, lambda: jobs.kill("coordinator"), after=8)
    result = run(tmp_path / "run")
    assert (result["outcome"], result["epochs"]) == ("done", ITERATIONS)
    assert same(calm, tmp_path / "run")


def interrupt(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_resumed_job_ends_with_the_bits_of_one_that_was_not_interrupted(
    tmp_path: Path, watch: jobs.Watch, calm: Path, how: signal.Signals
) -> None:
    watch.once(records.Stepped, interrupt(how), after=150)
    broken = run(tmp_path / "run")
    assert broken["outcome"] == "interrupted"
    assert 0 < broken["epochs"] < ITERATIONS
    watch.rest()
    result = run(tmp_path / "run", resume=True)
    assert (result["outcome"], result["epochs"]) == ("done", ITERATIONS)
    assert same(calm, tmp_path / "run")


@pytest.mark.parametrize(
    "options", [{"method": "cg"}, {"method": "gradient"}, {"batch_size": 160}, {"damping": True}], ids=str
)
def test_what_each_method_goes_on_with_is_in_its_checkpoints(
    tmp_path: Path, watch: jobs.Watch, options: dict[str, Any]
) -> None:
    run(tmp_path / "whole", **options)
    watch.once(records.EpochDone, interrupt(signal.SIGINT), after=7)
    assert run(tmp_path / "run", **options)["outcome"] == "interrupted"
    watch.rest()
    assert run(tmp_path / "run", resume=True, **options)["outcome"] == "done"
    assert same(tmp_path / "whole", tmp_path / "run")


def test_it_is_resumed_with_other_shards(tmp_path: Path, watch: jobs.Watch, calm: Path) -> None:
    watch.once(records.EpochDone, interrupt(signal.SIGINT), after=5)
    run(tmp_path / "run", shards=3)
    watch.rest()
    assert run(tmp_path / "run", resume=True, shards=1)["outcome"] == "done"
    whole = weights(calm)
    for name, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, whole[name], rtol=2e-2, atol=2e-2)


def test_batch_norm_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="BatchNorm1d '1'"):
        run(tmp_path / "run", task="jobs:dropped")


def test_a_run_of_another_kind_is_not_resumed_but_begun_from(tmp_path: Path) -> None:
    jobs.run(tmp_path / "run", Downpour(1, 1), epochs=1)
    with pytest.raises(
        CheckpointError, match=r"was trained with downpour, and sandblaster counts its data otherwise: .* --init-from"
    ):
        run(tmp_path / "run", resume=True)
    begun = Local().run(
        Job(
            "jobs:tiny",
            Sandblaster(2, 2, 1, portion_size=16),
            out=str(tmp_path / "next"),
            init_from=str(tmp_path / "run"),
        )
    )
    assert begun["outcome"] == "done"
