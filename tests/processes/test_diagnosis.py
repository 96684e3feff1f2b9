"""What is wrong with jobs on real processes: their data, their machine, and what takes time beside the training."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest

from distbelief.cli import main
from distbelief.core import records
from distbelief.lab.watch.reading import Reading
from distbelief.places import status
from distbelief.places.compute_model import ComputeModel
from distbelief.places.processes import resources
from distbelief.places.processes.local import Local
from distbelief.record import diagnosis, limits
from distbelief.strategies import Allreduce, Downpour, Single, Synchronous

GB = 10**9
ROOMY = ((20 * GB, 32 * GB), SimpleNamespace(total=1000 * GB, used=0, free=500 * GB), 64)
"""Free and whole memory, disk, and cores."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find what is wrong in a job of seconds, on a machine that has enough of everything."""
    monkeypatch.setattr(diagnosis, "GRACE", 0.3)
    on_machine(monkeypatch, *ROOMY)


def on_machine(monkeypatch: pytest.MonkeyPatch, memory: tuple[int, int], disk: Any, cores: int) -> None:
    monkeypatch.setattr(limits, "memory", lambda: memory)
    monkeypatch.setattr(limits, "cores", lambda: cores)
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: (disk.total, disk.used, disk.free))


def found(folder: Path, strategy: Any, **options: Any) -> dict[str, dict[str, Any]]:
    """What is found at the end of a job of about two seconds."""
    often = {"evaluate_every": 0, "checkpoint_every": 0, "snapshot_every": "0", "budget": "2s", **options}
    result: Any = jobs.run(folder, strategy, epochs=jobs.MANY, **often)
    return {one["rule"]: one for one in result["diagnosis"]}


@pytest.mark.parametrize("strategy", [Downpour(1, 1), Single(), Allreduce(1)], ids=lambda one: one.name)
def test_replicas_that_wait_for_their_data_are_found(tmp_path: Path, strategy: Any) -> None:
    told = found(tmp_path / "run", strategy, task="jobs:starved")["starved"]
    assert told["level"] == "wrong"
    assert told["evidence"]["load"] >= 0.02 > told["evidence"]["compute"]
    assert "starved" not in found(tmp_path / "other", strategy)


@pytest.mark.parametrize(
    ("options", "what", "remedy"),
    [
        ({"evaluate_every": "1minibatches"}, "evaluations", "--evaluate-every 2minibatches"),
        ({"snapshot_every": "1"}, "checkpoints", "--checkpoint-every 2 or --snapshot-every 5min"),
    ],
)
def test_evaluations_and_checkpoints_that_take_long_are_found(
    tmp_path: Path, options: dict[str, Any], what: str, remedy: str
) -> None:
    told = found(tmp_path / "run", Single(), **options)["beside"]
    assert told["sentence"].startswith(f"{what} take ")
    assert told["remedy"] == remedy
    assert "beside" not in found(tmp_path / "other", Single())


def test_checkpoints_of_shards_take_their_time_and_an_evaluator_holds_nothing_up(tmp_path: Path) -> None:
    often = {"snapshot_every": "1minibatches", "evaluate_every": "1minibatches"}
    for strategy in (Downpour(2, 2), Synchronous(1, 1), Allreduce(1)):
        told = found(tmp_path / strategy.name, strategy, **often)["beside"]
        assert told["evidence"].keys() == {"checkpoints"} or strategy.name == "allreduce"


POOR = {
    "memory": (((GB, 32 * GB), *ROOMY[1:]), "memory is nearly full: 1 of 32 GB are free"),
    "disk": (
        (ROOMY[0], SimpleNamespace(total=1000 * GB, used=0, free=GB // 20), ROOMY[2]),
        "the disk of the run folder is nearly full: 0.05 GB are free",
    ),
    "cores": ((*ROOMY[:2], 1), "2 threads compute gradients on 1 cores"),
}


@pytest.mark.parametrize("rule", POOR)
def test_a_machine_that_has_too_little_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    machine, sentence = POOR[rule]
    assert POOR.keys().isdisjoint(found(tmp_path / "other", Downpour(2, 1)))
    on_machine(monkeypatch, *machine)
    told = found(tmp_path / "run", Downpour(2, 1))
    assert told[rule]["sentence"] == sentence
    assert POOR.keys() & told.keys() == {rule}


def test_memory_that_goes_while_a_job_runs_is_recorded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: jobs.Watch
) -> None:
    watch.once(records.Resources, lambda: on_machine(monkeypatch, (GB, 32 * GB), *ROOMY[1:]))
    assert "memory" in found(tmp_path / "run", Downpour(1, 1), budget="4s")
    assert [record.free_memory for record in watch.of(records.Resources)] == [20 * GB, GB]


def test_status_and_page_say_what_is_wrong_while_a_job_runs_and_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: jobs.Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine(monkeypatch, (GB, 32 * GB), *ROOMY[1:])
    run, asked = tmp_path / "run", list[Any]()

    def ask() -> None:
        try:
            jobs.wait_until(lambda: status.status(run).get("wrong"))
            asked.extend(status.lines(status.status(run)))
        finally:
            watch.interrupt()

    asker = threading.Thread(target=ask)
    watch.once(records.Resources, asker.start)
    jobs.run(run, Downpour(2, 1), Local(compute=ComputeModel(step=0.005)), epochs=jobs.MANY)
    asker.join()
    page = Reading(run).view(None)
    line = "wrong: memory is nearly full: 1 of 32 GB are free; try --replicas 1 or --batch-size 8"
    assert line in asked
    assert "memory" in page["diagnosis"]
    assert not main.run(["status", str(run)])
    assert line in capsys.readouterr().out
