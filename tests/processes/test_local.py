"""Downpour on processes of this machine: every way to run it, and what may go wrong around it."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import save_file

from distbelief import errors
from distbelief.core import records
from distbelief.core.optimizer import LEARNING_RATES, OUTER, optim
from distbelief.places.processes import forkserver, running
from distbelief.places.processes.local import TRANSPORTS, Local
from distbelief.record.checkpoints import Checkpoints
from distbelief.record.metrics import read_metrics
from distbelief.strategies import Downpour, Single
from distbelief.tasks import Task

EPOCHS = 4


WAYS: dict[str, tuple[dict[str, Any], Local]] = {
    "seldom, prefetch": ({"push_every": 2, "fetch_every": 3, "prefetch": 1, "shards": 3}, Local("tcp")),
    "local steps": ({"push_every": 3, "fetch_every": 3, "local_lr": 0.05, "warm_start_steps": 30}, Local()),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_sample_is_trained_once_an_epoch(tmp_path: Path, watch: jobs.Watch, way: str) -> None:
    (options, place), steps = WAYS[way], 21 * EPOCHS
    strategy = Downpour(**{"replicas": 2, "shards": 1, "optimizer": optim("sgd", lr=1.0), **options})
    result = jobs.run(tmp_path, strategy, place, task="jobs:once", epochs=EPOCHS)
    assert (result["outcome"], result["epochs"]) == ("done", EPOCHS)
    assert (result["samples"], result["steps"]) == (EPOCHS * jobs.SAMPLES, steps)
    assert result["pushes"] == result["updates"] >= steps / options["push_every"]
    assert sum(one["steps"] for one in result["per_replica"]) == steps
    assert [record.samples for record in watch.accounts()] == [EPOCHS * jobs.SAMPLES] * strategy.shards
    assert not [record for record in watch.of(records.Gone) if record.died or record.lost]
    assert jobs.times_trained(tmp_path) == [EPOCHS] * jobs.SAMPLES
    if "warm_start_steps" in options:
        assert max(one["steps"] for one in result["per_replica"]) >= 30


@pytest.mark.parametrize("strategy", [Downpour(), Single()], ids=lambda strategy: strategy.name)
def test_every_process_has_the_threads_and_the_folder_of_data_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    monkeypatch.setenv("THREADS", "2")
    monkeypatch.setenv("JOBS_FOLDER", str(tmp_path))
    result = jobs.run(tmp_path / "run", strategy, task="jobs:particular", threads=2, data_dir=str(tmp_path), epochs=1)
    assert result["samples"] == jobs.SAMPLES


CARRIERS = {"shared": Local(), "tcp": Local(transport="tcp"), "tls": Local(transport="tcp", tls=True)}


def test_the_same_job_with_one_replica_gives_the_same_parameters_over_every_carrier(tmp_path: Path) -> None:
    assert {carrier.transport for carrier in CARRIERS.values()} == set(TRANSPORTS)
    for shards, (name, carrier) in enumerate(CARRIERS.items(), 1):
        strategy = Downpour(replicas=1, shards=shards, prefetch=1, push_every=2, optimizer=optim("adam", lr=0.01))
        jobs.run(tmp_path / name, strategy, carrier, epochs=2)
    assert all(jobs.same(tmp_path / "shared", tmp_path / name) for name in CARRIERS)


def test_a_job_sees_the_folder_and_the_environment_of_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("JOBS_FOLDER", str(folder))
        assert jobs.run("here", task="jobs:placed", epochs=1)["outcome"] == "done"
        assert (folder / "here" / "model.safetensors").exists()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True, check=False
    ).returncode:
        pytest.skip("may not mount a tmpfs here (needs root)")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_on_a_full_disk_a_job_trains_on_and_fails_in_the_end_since_its_model_is_not_kept(
    tiny_disk: Path, watch: jobs.Watch
) -> None:
    strategy = Downpour(replicas=1, shards=2)

    def fill() -> None:
        with (tiny_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass

    watch.once(records.Checkpointed, fill)
    with pytest.raises(errors.JobFailed, match=r"all epochs are done; checkpoint \d+ was not written.*No space left"):
        jobs.run(tiny_disk / "run", strategy, epochs=EPOCHS)
    assert max(record.epoch for record in watch.of(records.EpochDone)) == EPOCHS
    first, *others = watch.of(records.Checkpointed)
    assert not first.error
    assert others
    assert all(
        "No space left" in record.error and "000001 stays the last good one" in record.error for record in others
    )
    assert [path.name for path in Checkpoints(tiny_disk / "run").folder.iterdir()] == ["000001"]
    (tiny_disk / "filler").unlink()
    watch.rest()
    assert jobs.run(tiny_disk / "run", strategy, epochs=EPOCHS, resume=True)["samples"] == EPOCHS * jobs.SAMPLES


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more shards than there are processes": (
        {"strategy": Downpour(shards=4097)},
        "--shards 4097: must be at most 4096 on one machine",
    ),
    "more replicas than there are processes": (
        {"strategy": Downpour(replicas=4097)},
        "--replicas 4097: must be at most 4096 on one machine",
    ),
    "a task without a name": ({"task": Task(model=jobs.net, train=jobs.data)}, "module:function"),
    "a carrier nobody knows": ({"on": Local(transport="tpc")}, "did you mean 'tcp'"),
    "an address of somebody else": ({"on": Local(transport="tcp", bind="192.0.2.1", insecure=True)}, "192.0.2.1"),
    "weights of another model": ({"init_from": "wrong.safetensors"}, "wrong.safetensors"),
}


def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"weight": torch.zeros(3)}, "wrong.safetensors")
    for name, (changes, words) in REFUSED.items():
        options = {"out": "run", **changes}
        with pytest.raises(errors.DistbeliefError) as caught:
            jobs.run(options.pop("out"), **options)
        assert re.search(f"(?s){words}", str(caught.value)), name
        assert type(caught.value) in (errors.UsageError, errors.CheckpointError, errors.LayoutError), name
        assert "\n" not in str(caught.value), name


def test_a_machine_that_allows_no_more_processes_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    start = forkserver.context().Process.start

    def refuse(process: Any) -> None:
        began.append(process.name)
        if len(began) > 2:
            raise OSError(errno.EMFILE, "Too many open files")
        start(process)

    monkeypatch.setattr(forkserver.context().Process, "start", refuse)
    with pytest.raises(
        errors.JobFailed,
        match=r"coordinator: its process cannot be started beside 2 others \(.*open files\); .*fewer --replicas",
    ) as caught:
        jobs.run(tmp_path / "run")
    assert "ulimit -n" in str(caught.value)
    assert began == ["replica 0", "replica 1", "coordinator"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("strategy", "how"),
    [(Downpour(replicas=2), "moved"), (Single(), "deleted")],
    ids=["downpour-moved", "single-deleted"],
)
def test_a_run_folder_that_is_deleted_is_told_and_written_again(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch, strategy: Any, how: str
) -> None:
    """The job was done with status 0, and left a folder that nothing could read."""
    monkeypatch.setattr(running, "TICK", 0.01)
    run = tmp_path / "run"

    def lose() -> None:
        run.rename(tmp_path / "elsewhere")  # at once, whatever is being written there
        if how == "deleted":
            shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)

    watch.once(records.EpochDone, lose, after=2)
    assert jobs.run(run, strategy, epochs=15)["outcome"] == "done"
    assert any("was deleted or moved away" in record.text for record in watch.of(records.Note))
    assert [record for _, record in read_metrics(run / "metrics.jsonl")] == watch.records
    assert json.loads((run / "result.json").read_text())["epochs"] == 15
    assert jobs.run(run, strategy, epochs=16, resume=True)["epochs"] == 16


def test_a_run_folder_that_cannot_be_made_again_fails_the_job(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "TICK", 0.01)
    (tmp_path / "runs").mkdir()

    def spoil() -> None:
        (tmp_path / "runs").rename(tmp_path / "moved")
        (tmp_path / "runs").write_text("a file")

    watch.once(records.EpochDone, spoil)
    with pytest.raises(
        errors.UsageError, match=r"^the run folder \S+/runs/run was deleted, and cannot be created again: Not a"
    ):
        jobs.run(tmp_path / "runs" / "run", epochs=jobs.MANY)


SPARED = """
import sys
import distbelief as db
from distbelief.places.processes import process  # all that the processes of a job are forked with
from distbelief.runtime.server_optimizer import ServerOptimizer
from distbelief.strategies.context import LoopContext
from distbelief.strategies.single.loop import SingleLoop
from distbelief.tasks.flat import FlatModule
import jobs
assert "torch._dynamo" not in sys.modules, "imported before anything is trained"
for name in {optimizers}:
    job = db.Job(jobs.tiny().named("jobs:tiny"), db.Downpour(shards=1, optimizer=db.optim(name)), epochs=1)
    assert db.run(job, on=db.Simulated())["outcome"] == "done"
    assert "torch._dynamo" not in sys.modules, name
    SingleLoop(LoopContext(jobs.tiny(), jobs.net(), job.settings(), lambda record: None, lambda: None)).run()
    assert "torch._dynamo" not in sys.modules, name + ", single"
script = ServerOptimizer(FlatModule(jobs.net()), None, job.settings(), dict(lr=0.1), lambda: None)
script.zero_grad(), script.load_state_dict(script.state_dict())
assert "torch._dynamo" not in sys.modules, "the optimizer of a script"
"""


def test_no_process_of_a_job_imports_dynamo() -> None:
    """It would take more than a second and 70 MB of each: this runs what they all run."""
    command = [sys.executable, "-c", SPARED.format(optimizers=sorted(LEARNING_RATES.keys() - {*OUTER}))]
    done = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_ctrl_c_while_the_forkserver_starts_is_kept(monkeypatch):
    """It was ignored for as long as that takes, and the job trained on."""
    monkeypatch.setattr(forkserver, "_ensure_running", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        forkserver.start()
