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
from safetensors.torch import load_file

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.errors import CheckpointError, DistbeliefError, JobFailed, UsageError
from distbelief.places import status
from distbelief.places.processes.local import Local
from distbelief.places.processes.processes import Processes
from distbelief.places.processes.running import Running
from distbelief.places.simulated.simulated import Simulated
from distbelief.record.checkpoints import Checkpoints, read_manifest
from distbelief.record.folder import RunFolder
from distbelief.record.restore import load_part
from distbelief.strategies import Downpour, Single

EPOCHS = 12
ENDLESS = [sys.executable, "-m", "distbelief", "train", "jobs:tiny", "downpour", "--epochs", "100000", "--json"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


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
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(value, whole[name]) for name, value in weights(tmp_path / "run").items())


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
    assert all(record.samples == EPOCHS * jobs.SAMPLES for record in watch.of(records.Applied))
    assert set((-weights(tmp_path)["count"]).tolist()) == {EPOCHS}


def test_a_checkpoint_goes_from_downpour_to_single_and_back(run: Path, watch: jobs.Watch) -> None:
    assert jobs.run(run, single(), epochs=2, resume=True)["samples"] == 2 * jobs.SAMPLES
    assert RunFolder.open(run).read_job()["strategy"] == "single"
    strategy = Downpour(replicas=2, shards=1, optimizer=optim("adam", lr=0.02))
    assert jobs.run(run, strategy, epochs=3, resume=True)["samples"] == 3 * jobs.SAMPLES
    assert RunFolder.open(run).read_job()["strategy"] == "downpour"
    told = [note.text for note in watch.of(records.Note)]  # of silence too, where the machine is busy
    assert told.count("this run was trained with downpour before, and goes on with single") == 1
    assert told.count("this run was trained with single before, and goes on with downpour") == 1


def test_a_split_run_goes_on_with_another_split_or_none(tmp_path: Path) -> None:
    own: dict[str, Any] = {"optimizer": optim("adam", lr=0.01), "replicas": 1, "shards": 4}
    ways: list[dict[str, Any]] = [{"partitions": 2, "split": "stages"}, {"partitions": 3, "split": "neurons"}, {}]
    plain: Any = Simulated(keep=True)
    jobs.run(tmp_path / "whole", Downpour(**own), plain, epochs=len(ways), evaluate_every=0)
    for number, way in enumerate(ways):
        options: dict[str, Any] = {"epochs": number + 1, "evaluate_every": 0, "resume": bool(number)}
        result = jobs.run(tmp_path / "run", Downpour(**own, **way), **options)
        assert (result["outcome"], result["samples"]) == ("done", (number + 1) * jobs.SAMPLES)
    whole, run = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert whole.keys() == run.keys()
    for name, value in whole.items():
        torch.testing.assert_close(run[name], value, rtol=1e-3, atol=1e-4)


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
    plain: Any = Simulated(keep=True)
    jobs.run(tmp_path / "whole", downpour(1), plain, epochs=3)
    before = weights(run)
    again = jobs.run(run, downpour(2), epochs=1, resume=True)
    assert (again["outcome"], again["samples"]) == ("done", jobs.SAMPLES)
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())
    there: list[bool] = []
    watch.once(records.Started, lambda: there.append((run / "result.json").exists()))
    assert jobs.run(run, downpour(1), epochs=3, resume=True)["epochs"] == 3
    assert there == [False]
    assert (run / "result.json").exists()
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(value, whole[name]) for name, value in weights(run).items())


def test_a_second_interruption_ends_at_once(tmp_path: Path, watch: jobs.Watch) -> None:
    watch.once(records.EpochDone, lambda: [interrupt()(), interrupt(signal.SIGTERM)()])
    with pytest.raises(JobFailed, match=r"^interrupted twice.*(go on from checkpoint|start anew)"):
        jobs.run(tmp_path, epochs=jobs.MANY)


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
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(jobs.__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        while '"event":"Checkpointed"' not in (line := process.stdout.readline()):
            assert line
        process.kill()
    assert "it was killed" in status.lines(status.status(tmp_path / "run"))[0]
    assert jobs.run(tmp_path / "run", epochs=1, resume=True)["outcome"] == "done"


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "strategy"),
    [
        ("shard-0.safetensors", _cut, downpour(2)),
        ("shard-1.safetensors", _flip, downpour(3)),
        ("shard-1.safetensors", Path.unlink, single()),
        ("manifest.json", _flip, downpour(2)),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_error(
    run: Path, file: str, damage: Callable[[Path], None], strategy: object
) -> None:
    latest = Checkpoints(run).latest()
    assert latest is not None
    damage(latest / file)
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        jobs.run(run, strategy, epochs=2, resume=True)


OTHER: dict[str, tuple[dict[str, Any], type[DistbeliefError], str]] = {
    "task": ({"task": "digits"}, CheckpointError, "trained task 'jobs:tiny'"),
    "seed": ({"seed": 3}, CheckpointError, "made with seed 0, but this job has 3"),
    "batch size": ({"batch_size": 17}, CheckpointError, "made with batch_size 16"),
    "optimizer": ({"strategy": downpour(1, "sgd")}, CheckpointError, "made by optimizer adam, but this job's is sgd"),
    "no resume": ({"resume": False}, UsageError, "is not empty.*--resume"),
    "nowhere": ({"out": "nowhere"}, UsageError, "not a run folder"),
}


def test_what_does_not_fit_the_run_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    before = Path("run/result.json").read_bytes()
    for changes, kind, words in OTHER.values():
        options = {
            "strategy": downpour(1),
            "task": "jobs:tiny",
            "out": "run",
            "resume": True,
            "epochs": 2,
            "batch_size": jobs.BATCH,
            **changes,
        }
        with pytest.raises(kind, match=f"(?s){words}"):
            Local().run(jobs.Job(**options))
        assert Path("run/result.json").read_bytes() == before


def test_a_job_that_never_reached_a_checkpoint_cannot_be_resumed(tmp_path: Path, watch: jobs.Watch) -> None:
    watch.once(records.Started, lambda: jobs.kill("shard 0"))
    with pytest.raises(JobFailed, match=r"shard 0 is gone.*start anew"):
        jobs.run(tmp_path, downpour(1), Local(path="served"), epochs=5, snapshot_every="0")
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
        jobs.run(tmp_path, downpour(1), epochs=5, resume=True)


def test_versions_and_optimizer_state_are_kept(done: Path) -> None:
    latest = Checkpoints(done).latest()
    assert latest is not None
    plan = read_manifest(latest).plan
    for shard in range(2):
        arrays, facts = load_part(latest, plan, shard)
        assert facts["updates"] == 21
        assert facts["samples"] == jobs.SAMPLES
        assert float(arrays["state.0.step"]) == 21
        assert bool(arrays["state.0.exp_avg_sq"].any())
