"""A job that is interrupted goes on from its checkpoint as if nothing had happened."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import jobs
import pytest
import torch

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.errors import CheckpointError, JobFailed, UsageError
from distbelief.places import status
from distbelief.places.processes.local import Local
from distbelief.places.processes.processes import Processes
from distbelief.places.processes.running import Running
from distbelief.places.simulated.simulated import Simulated
from distbelief.record.checkpoints import Checkpoints, read_manifest
from distbelief.strategies import Downpour, Single

EPOCHS = 12
ENDLESS = [sys.executable, "-m", "distbelief", "train", "jobs:tiny", "downpour", "--epochs", "100000", "--json"]


def interrupt(number: signal.Signals = signal.SIGINT) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def downpour(shards: int, optimizer: str = "adam", **options: Any) -> Downpour:
    return Downpour(replicas=1, shards=shards, optimizer=optim(optimizer, lr=0.02), **options)


def single(optimizer: str = "adam") -> Single:
    return Single(optimizer=optim(optimizer, lr=0.02))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch on two shards; tests go on with copies."""
    folder = tmp_path_factory.mktemp("done") / "run"
    jobs.run(folder, downpour(2), epochs=1)
    return folder


@pytest.fixture
def run(tmp_path: Path, done: Path) -> Path:
    return copytree(done, tmp_path / "run")


SAME = {
    "single, rmsprop": (single("rmsprop"), single("rmsprop"), signal.SIGTERM),
    "downpour, 2 shards to 3": (downpour(2), downpour(3), signal.SIGINT),
}


@pytest.mark.parametrize("name", SAME)
def test_a_resumed_job_ends_with_the_parameters_of_one_that_was_not_interrupted(
    tmp_path: Path, watch: jobs.Watch, name: str
) -> None:
    first, second, how = SAME[name]
    options: dict[str, Any] = {
        "task": "jobs:dropped", "epochs": EPOCHS, "lr_schedule": "cosine", "checkpoint_every": 10
    }  # fmt: skip
    jobs.run(tmp_path / "whole", first, **options)
    watch.once(records.EpochDone, interrupt(how), after=3)
    broken = jobs.run(tmp_path / "run", first, **options)
    assert broken["outcome"] == "interrupted"
    assert broken["samples"] < EPOCHS * jobs.SAMPLES
    manifest = read_manifest(Checkpoints(tmp_path / "run").latest())
    assert manifest.samples == broken["samples"]
    watch.rest()
    result = jobs.run(tmp_path / "run", second, **options, resume=True)
    assert result["outcome"] == "done"
    assert result["samples"] == EPOCHS * jobs.SAMPLES
    assert result["updates"] == EPOCHS * 21
    assert jobs.same(tmp_path / "whole", tmp_path / "run")


def test_several_interruptions_of_several_replicas_train_every_sample_once_an_epoch(
    tmp_path: Path, watch: jobs.Watch
) -> None:
    strategy, resume = Downpour(replicas=2, shards=2, prefetch=1, push_every=2, optimizer=optim("sgd", lr=1.0)), False
    for after in (1, 9):
        watch.once(records.Stepped, interrupt(), after=after)
        assert jobs.run(tmp_path, strategy, task="jobs:once", epochs=EPOCHS, resume=resume)["outcome"] == "interrupted"
        resume = True
    watch.rest()
    watch.records.clear()
    result = jobs.run(tmp_path, strategy, task="jobs:once", epochs=EPOCHS, resume=True)
    assert result["samples"] == EPOCHS * jobs.SAMPLES
    assert [record.samples for record in watch.accounts()] == 2 * [EPOCHS * jobs.SAMPLES]
    assert jobs.times_trained(tmp_path) == [EPOCHS] * jobs.SAMPLES


@pytest.mark.parametrize("on", [Local(), Simulated()], ids=["processes", "simulated"])
def test_a_run_that_still_runs_is_not_resumed(tmp_path: Path, watch: jobs.Watch, on: Any) -> None:
    found: list[Any] = []

    def meddle() -> None:
        with pytest.raises(UsageError, match="of a job that is running") as caught:
            jobs.run(tmp_path, downpour(1), epochs=1, resume=True)
        found.append(caught.value)
        if isinstance(on, Simulated):
            found.append(status.lines(status.status(tmp_path)))

    watch.once(records.EpochDone, meddle)
    assert jobs.run(tmp_path, downpour(1), on, epochs=2)["outcome"] == "done"
    assert found
    assert found[1:] in (
        [],
        [[f"{tmp_path}: running; it cannot be asked: it is a simulation, or a job that is just beginning or ending"]],
    )


def test_a_finished_run_ends_again_at_once_and_goes_on_with_more_epochs(
    tmp_path: Path, run: Path, watch: jobs.Watch
) -> None:
    """And has no result while it does."""
    jobs.run(tmp_path / "whole", downpour(1), jobs.PLAIN, epochs=3)
    before = jobs.weights(run)
    again = jobs.run(run, downpour(2), epochs=1, resume=True)
    assert (again["outcome"], again["samples"]) == ("done", jobs.SAMPLES)
    assert all(torch.equal(value, before[name]) for name, value in jobs.weights(run).items())
    there: list[bool] = []
    watch.once(records.Started, lambda: there.append((run / "result.json").exists()))
    assert jobs.run(run, downpour(1), epochs=3, resume=True)["epochs"] == 3
    assert there == [False]
    assert (run / "result.json").exists()
    assert jobs.same(run, tmp_path / "whole")


@pytest.mark.parametrize(
    ("before", "strategy"),
    [("_start", Downpour()), ("_watch", Single()), ("_take", Downpour()), ("_take", Single())],
    ids=["start", "watch", "take", "take, single"],
)
def test_an_interruption_before_the_job_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, strategy: object
) -> None:
    method, done = getattr(Running, before), []

    def interrupted(self: Running, *rest: object) -> object:
        if not done:
            done.append(interrupt()())
        return method(self, *rest)

    monkeypatch.setattr(Running, before, interrupted)
    if before == "_take" and isinstance(strategy, Single):
        assert jobs.run(tmp_path, strategy, epochs=jobs.MANY)["outcome"] == "interrupted"
    else:
        with pytest.raises(JobFailed, match=r"^interrupted before the job began"):
            jobs.run(tmp_path, strategy, epochs=jobs.MANY)


def test_an_interruption_while_processes_are_started_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = Processes.start, []

    def interrupted(self: Processes, role: str, incarnation: int) -> None:
        started.append(role)
        start(self, role, incarnation)
        interrupt()()

    monkeypatch.setattr(Processes, "start", interrupted)
    with pytest.raises(JobFailed, match=r"^interrupted before the job began"):
        jobs.run(tmp_path, Downpour())
    assert len(started) == 1


def test_a_supervisor_that_is_killed_leaves_a_run_that_can_be_resumed_at_once(tmp_path: Path) -> None:
    command = [*ENDLESS, "--batch-size", "16", "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=jobs.environment()) as process:
        while '"event":"Checkpointed"' not in (line := process.stdout.readline()):
            assert line
        process.kill()
    assert "it was killed" in status.lines(status.status(tmp_path / "run"))[0]
    assert jobs.run(tmp_path / "run", epochs=1, resume=True)["outcome"] == "done"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "digits"}, "trained task 'jobs:tiny'"),
        ({"seed": 3}, "made with seed 0, but this job has 3"),
        ({"batch_size": 17}, "made with batch_size 16"),
        ({"strategy": downpour(1, "sgd")}, "made by optimizer adam, but this job's is sgd"),
    ],
    ids=["task", "seed", "batch size", "optimizer"],
)
def test_what_does_not_fit_the_run_is_refused(run: Path, changes: dict[str, Any], words: str) -> None:
    before = (run / "result.json").read_bytes()
    with pytest.raises(CheckpointError, match=words):
        jobs.run(**{"strategy": downpour(1), "out": run, "resume": True, "epochs": 2, **changes})
    assert (run / "result.json").read_bytes() == before


def test_a_job_that_never_reached_a_checkpoint_cannot_be_resumed(tmp_path: Path, watch: jobs.Watch) -> None:
    watch.once(records.Started, lambda: jobs.kill("shard 0"))
    with pytest.raises(JobFailed, match=r"shard 0 is gone.*start anew"):
        jobs.run(tmp_path, downpour(1), Local(path="served"), epochs=5, snapshot_every="0")
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
        jobs.run(tmp_path, downpour(1), epochs=5, resume=True)
