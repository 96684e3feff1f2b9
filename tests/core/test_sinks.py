"""Sinks: one that raises is dropped, one of another package is found, what is missing is told; the names of metrics."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import distbelief as db
from distbelief.cli import main
from distbelief.core import records as r
from distbelief.core.records import Cause, Json, Record
from distbelief.errors import UsageError
from distbelief.integrations.prometheus_answers import metrics
from distbelief.places import signals
from distbelief.places.attempt import Attempt
from distbelief.places.view import View
from distbelief.record import curves, sinks
from distbelief.record.curves import Curves, Scalar
from distbelief.record.recorder import Recorder
from distbelief.record.summary import Summary

STARTED = r.Started(replicas=2, shards=1, parameters=100, samples_per_epoch=40, batch_size=10, epochs=2)
STEP = r.Stepped("replica 0", 1, 10, 1, 2.5, 0, 1)
DONE = r.Finished.of(Cause.EPOCHS_DONE, "all epochs are done")


class Seen:
    """Sink that keeps what it gets, and raises at one record."""

    def __init__(self, bad: type[Record] | None = None) -> None:
        self.took: list[tuple[float, Record, int]] = []
        self.result: Json = {}
        self.bad = bad

    def take(self, seconds: float, record: Record, summary: Summary) -> None:
        self.took.append((seconds, record, summary.samples))
        if self.bad and isinstance(record, self.bad):
            raise LookupError("no such tool")

    def close(self, result: Json) -> None:
        self.result = result


def test_a_sink_that_raises_is_dropped_with_one_warning_and_the_others_go_on() -> None:
    told: list[str] = []
    recorder = Recorder(None, {"task": "x"}, warn=told.append)
    bad, good = Seen(r.Stepped), Seen()
    recorder.sinks += [bad, good]
    for record in (STARTED, STEP, STEP, DONE):
        recorder.take(1.0, record)
    result = recorder.finish()
    assert good.took == [(1.0, STARTED, 0), (1.0, STEP, 10), (1.0, STEP, 20), (1.0, DONE, 20)]
    assert (len(bad.took), bad.result, good.result) == (2, {}, result)
    assert told == ["Seen fails (LookupError('no such tool')); the job continues without it"]


def test_a_sink_that_cannot_be_opened_is_left_out_and_a_wrong_word_ends_the_job_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(failure: Exception) -> Attempt:
        def fails(_: sinks.ShownRun) -> sinks.Sink:
            raise failure

        monkeypatch.setattr(View, "sinks", lambda _: [fails, lambda _: seen])
        job = db.Job("digits", out=tmp_path / "run")
        return Attempt(job, job.settings(), View(track="any"), 0.0)

    seen = Seen()
    with pytest.raises(UsageError, match="no such store"):
        attempt(UsageError("no such store"))
    assert not (tmp_path / "run").exists()
    begun = attempt(LookupError("no such tool"))
    assert (
        "a sink cannot be opened (LookupError('no such tool')); the job continues without it" in capsys.readouterr().err
    )
    begun.record(1.0, "coordinator", STARTED)
    result = begun.finish()
    assert (seen.took, seen.result) == ([(1.0, STARTED, 0)], {name: result[name] for name in result if name != "run"})


class Written:
    """Writer that keeps what it gets, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.points: list[Scalar] = []
        self.result: Json | None = None
        self.fails = fails
        self.first = -1

    def __str__(self) -> str:
        return "points in a list"

    def open(self) -> None:
        assert not self.points

    def write(self, points: Any, first: int) -> None:
        if self.fails:
            raise ConnectionError("nobody listens")
        self.points += points
        self.first = first

    def close(self, result: Json) -> None:
        self.result = result


def played(writer: Written, told: list[str], *record: Record) -> None:
    sink, summary = Curves(writer, told.append), Summary({})
    for seconds, one in enumerate(record):
        summary.take(seconds, one)
        sink.take(seconds, one, summary)
    sink.close({"outcome": "done"})


def test_a_writer_gets_the_points_and_the_result_and_one_that_fails_is_told_once() -> None:
    told: list[str] = []
    played(writer := Written(), told, STARTED, STEP)
    assert [point[:3] for point in writer.points] == [("train/loss", 2.5, 10), ("samples_per_second", 10.0, 10)]
    assert (writer.result, writer.first, told) == ({"outcome": "done"}, 0, [])
    played(Written(fails=True), told, STARTED, STEP, STEP)
    assert told == ["points in a list cannot be written: nobody listens; the curves are in metrics.jsonl too"]
    played(never := Written(), told)
    assert never.result is None, "nothing is shown of a job that never began"


def test_a_job_does_not_wait_for_a_writer_that_waits() -> None:
    told: list[str] = []
    writer, stuck = Written(), threading.Event()
    take = writer.write
    writer.write = lambda points, first: (stuck.wait(6), stuck.set(), take(points, first))  # type: ignore[method-assign]
    sink, began = Curves(writer, told.append, period=0.0), time.monotonic()
    for record in (STARTED, *[r.Tested(1, float(at), None) for at in range(9)]):
        sink.take(1.0, record, Summary({}))
    assert time.monotonic() < began + 5
    stuck.set()
    sink.close({"outcome": "done"})
    assert [point[1] for point in writer.points] == [float(at) for at in range(9)]
    assert (writer.result, told) == ({"outcome": "done"}, [])


def test_the_end_of_a_job_does_not_wait_for_a_writer_that_fails_late() -> None:
    told: list[str] = []
    writer, begun, stuck = Written(fails=True), threading.Event(), threading.Event()
    fail = writer.write
    writer.write = lambda points, first: (begun.set(), stuck.wait(6), fail(points, first))  # type: ignore[method-assign]
    sink = Curves(writer, told.append, period=0.0)
    sink.take(0.0, STARTED, Summary({}))
    sink.take(1.0, r.Tested(1, 1.0, None), Summary({}))
    assert begun.wait(6)
    sink.take(2.0, r.Tested(1, 2.0, None), Summary({}))  # it waits until the first is written
    began = time.monotonic()
    threading.Timer(0.2, stuck.set).start()
    sink.close({"outcome": "done"})
    assert time.monotonic() < began + curves.CLOSE_SECONDS / 2
    assert len(told) == 1


def test_ctrl_c_ends_the_wait_for_a_tool_once_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer, over, written = Written(), threading.Event(), list[bool]()

    def close(_: Json) -> None:
        written.append((tmp_path / "run" / "result.json").exists())
        os.kill(os.getpid(), signal.SIGINT)
        over.wait()

    monkeypatch.setattr(writer, "close", close)
    monkeypatch.setattr(View, "sinks", lambda _: [lambda run: Curves(writer, run.warn), lambda _: seen])
    job, seen = db.Job("digits", out=tmp_path / "run"), Seen()
    with signals.waitable():
        attempt = Attempt(job, job.settings(), View(track="any"), 0.0)
        attempt.record(1.0, "coordinator", STARTED)
        result = attempt.finish()
    over.set()
    assert "points in a list were not written before Ctrl-C came; the curves are in" in capsys.readouterr().err
    assert written == [True]
    assert seen.result == {name: result[name] for name in result if name != "run"}, "the next sink is closed too"


def test_points_that_a_writer_does_not_take_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "WAITING", 3)
    played(writer := Written(), [], STARTED, *[r.Tested(1, float(at), None) for at in range(9)])
    assert [point[1] for point in writer.points] == [6.0, 7.0, 8.0]


def test_what_is_missing_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    absent = "distbelief.integrations.absent:sink"
    monkeypatch.setattr(sinks, "entry_points", lambda group: [EntryPoint("prometheus", absent, group)])
    for words, told in {
        "--metrics 9400": "--metrics 9400: No module named 'distbelief.integrations.absent': pip install "
        "'distbelief[prometheus]'",
        "--track promethius": "--track promethius: unknown sink 'promethius'; did you mean 'prometheus'?",
    }.items():
        assert main.run(["train", "digits", "downpour", *words.split()]) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for words, told in {
        "--metrics 70000": "--metrics 70000: port 70000 is too high; choose one up to 65535",
        "--metrics here:x": "--metrics here:x: PORT or HOST:PORT 'here:x': write HOST or HOST:PORT",
    }.items():
        assert main.run(["train", "digits", "downpour", *words.split()]) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    assert not [*tmp_path.iterdir()]
    assert main.run(["simulate", "digits", "downpour", "--metrics", "9400"]) == 2
    assert "--metrics" in capsys.readouterr().err
    with pytest.raises(UsageError, match="which a simulation has not"):
        db.run(db.Job("digits"), on=db.Simulated(), view=db.View(metrics="9400"))


NAMES = {
    "distbelief_job": (),
    "distbelief_model_samples": (),
    "distbelief_epochs": (),
    "distbelief_train_loss": (),
    "distbelief_test_loss": (),
    "distbelief_test_accuracy_ratio": (),
    "distbelief_replicas": (),
    "distbelief_standbys": (),
    "distbelief_last_step_timestamp_seconds": (),
    "distbelief_last_checkpoint_timestamp_seconds": (),
    "distbelief_samples_total": ("replica",),
    "distbelief_steps_total": ("replica",),
    "distbelief_pushes_total": ("replica",),
    "distbelief_replica_seconds_total": ("kind", "replica"),
    "distbelief_waiting_seconds_total": ("kind", "replica"),
    "distbelief_bytes_total": ("direction", "kind"),
    "distbelief_dropped_pushes_total": (),
    "distbelief_evaluation_seconds_total": (),
    "distbelief_failures_total": ("kind",),
    "distbelief_staleness_updates": ("le",),
}
"""The names of all metrics and their labels: an interface, to which names may be added, and none renamed."""


def test_a_tool_knows_a_run_by_one_name_at_one_place(tmp_path: Path) -> None:
    job = {"task": "digits", "settings": {"replicas": 2, "clip_norm": None}, "options": {"threads": 1}, "seed": 3}
    run = sinks.ShownRun(tmp_path, job, print, print)
    asked = [run.identity(tool, iter("abc").__next__) for tool in ("mlflow:here", "mlflow:here", "wandb")]
    assert asked == ["a", "a", "a"]
    assert run.identity("mlflow:there", lambda: "d") == "d"
    assert sinks.ShownRun(tmp_path, {}, print, print).identity("mlflow:there", lambda: "e") == "d"
    assert run.parameters == {"task": "digits", "seed": 3, "replicas": 2, "threads": 1}


def test_a_run_that_its_tool_has_lost_is_begun_anew_and_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    run = sinks.ShownRun(tmp_path, {}, print, told.append)
    names = [run.identity("mlflow:x", iter(new).__next__, {"b"}.__contains__) for new in "abc"]
    assert (names, run.identity("mlflow:x", str)) == (["a", "b", "b"], "b")
    path = tmp_path / "mlflow.id"
    assert told == [f"{path} names run a, which mlflow does not have any longer: another one begins"]


def metrics_of(*record: Record) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples of all metrics after some records, as Prometheus's own client reads them, by their labels' values."""
    summary, registry = Summary({"task": "digits", "strategy": "downpour"}), CollectorRegistry()
    for seconds, one in enumerate(record):
        summary.take(seconds, one)
    times: dict[type[Record], float] = {r.Stepped: 1000.5, r.Checkpointed: 1001.5}
    registry.register(type("Collected", (), {"collect": lambda _: metrics(summary, 1.5, times)})())
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for name, labels, value, *_ in family.samples:
            found.setdefault(name, {})[tuple(labels[label] for label in sorted(labels))] = value
    return found


def test_the_names_and_labels_of_the_metrics_are_frozen() -> None:
    found = {}
    for family in metrics(Summary({}), None, {}):
        labels = {label for one in family.samples for label in one.labels}
        found[f"{family.name}_total" if family.type == "counter" else family.name] = (family.type, labels)
    assert found.keys() == NAMES.keys()
    assert all(labels <= set(NAMES[name]) for name, (kind, labels) in found.items() if kind != "info")


def test_metrics_count_what_the_records_say() -> None:
    found = metrics_of(
        STARTED,
        *[r.Joined(f"replica {index}") for index in range(3)],
        r.StandbyReady("standby 0"),
        STEP,
        r.Stepped("replica 1", 2, 20, 2, 1.0, 3, 2),
        r.EpochDone(1),
        r.Tested(1, 0.7, 0.85, {}, 0.25),
        r.Gone("replica 1", 2, "killed", True),
        r.Gone("replica 2", 0, "it was done", False),
        r.Vacant("shard 1", 1),
        r.Succeeded("shard 0", 1, "standby 0"),
        r.Vacant("standby 0", 1),
        r.StandbyReady("standby 0"),
        r.Vacant("standby 0", 2),
        r.Checkpointed(1, ""),
        r.Checkpointed(2, "the disk is full"),
        r.BytesCounted("replica 0", {"push": 800}, {"fetch": 90}, {}),
        r.Applied("shard 0", 4, 30, {0: 2, 3: 1, 500: 1}),
        r.StepsTimed("replica 0", 7, 1.0, 0.0, 0.5, 1.5, 0.25, {"shard 0": 0.5, "shard 1": 0.75, "coordinator": 0.25}),
    )
    expected: dict[str, Any] = {
        "job_info": {("downpour", "digits"): 1.0}, "model_samples": 30.0, "epochs": 1.0, "train_loss": 1.5,
        "test_loss": 0.7, "test_accuracy_ratio": 0.85, "replicas": 1.0, "standbys": 0.0,
        "last_step_timestamp_seconds": 1000.5, "last_checkpoint_timestamp_seconds": 1001.5,
        "samples_total": {("0",): 10.0, ("1",): 20.0, ("2",): 0.0},
        "steps_total": {("0",): 1.0, ("1",): 2.0, ("2",): 0.0},
        "pushes_total": {("0",): 1.0, ("1",): 2.0, ("2",): 0.0},
        "replica_seconds_total": {("compute", "0"): 1.0, ("update", "0"): 0.0, ("communicate", "0"): 0.5,
            ("wait", "0"): 1.5, ("load", "0"): 0.25},
        "waiting_seconds_total": {("shard", "0"): 1.25, ("coordinator", "0"): 0.25},
        "dropped_pushes_total": 3.0, "evaluation_seconds_total": 0.25,
        "failures_total": {("replica",): 1.0, ("shard",): 2.0, ("standby",): 1.0, ("checkpoint",): 1.0},
        "staleness_updates_count": 4.0, "staleness_updates_sum": 503.0,
    }  # fmt: skip
    assert {name: found[f"distbelief_{name}"] for name in expected} == {
        name: value if isinstance(value, dict) else {(): value} for name, value in expected.items()
    }
    moved = found["distbelief_bytes_total"]
    assert (moved["sent", "push"], moved["received", "fetch"], sum(moved.values())) == (800.0, 90.0, 890.0)
    buckets = found["distbelief_staleness_updates_bucket"]
    assert [buckets[le,] for le in ("0", "2", "4", "128", "+Inf")] == [2.0, 2.0, 3.0, 3.0, 4.0]


@pytest.mark.long
def test_a_sink_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{sinks.GROUP}]\ntheirs = theirs:make\n")
    (tmp_path / "theirs.py").write_text("def make(argument):\n    return lambda run: print(argument, run)\n")
    code = "from distbelief.places.view import View; View(track='theirs:a:b').sinks()[0]('a run')"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout == "a:b a run\n", done.stderr
