"""`--metrics`: a real job, scraped while it runs, as Prometheus's own client reads it; also by TLS beyond loopback."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import patience
import pytest
from prometheus_client.parser import text_string_to_metric_families

import distbelief as db
from distbelief.core import records
from distbelief.errors import UsageError
from distbelief.integrations import prometheus
from distbelief.integrations.prometheus import PrometheusSink
from distbelief.record.metrics import read_metrics
from distbelief.record.sinks import ShownRun
from distbelief.record.summary import Summary
from distbelief.transport.addresses import cut, joined, own_addresses

STEADY = db.ComputeModel(step=0.005, spread="constant")


def noted(run: Path) -> str:
    """The address of the metrics, as the job has noted it."""
    notes = [record.text for _, record in read_metrics(run / "metrics.jsonl") if isinstance(record, records.Note)]
    return next(text.split()[1].rstrip(",") for text in notes if text.startswith("metrics: "))


def address_of(run: Path) -> tuple[str, int]:
    """The host and the port of the metrics."""
    return cut(noted(run).split("/")[2])


def scraped(run: Path, path: str = "/metrics", **more: Any) -> str:
    """What the server of the metrics answers."""
    with urllib.request.urlopen(noted(run).replace("/metrics", path), timeout=30, **more) as answer:
        return str(answer.read().decode())


def values(text: str) -> dict[str, float]:
    """The sum of each sample's values by its name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for name, _, value, *_ in family.samples:
            found[name] = found.get(name, 0.0) + value
    return found


def run_job(run: Path, watch: jobs.Watch, metrics: str, look: Callable[[], object]) -> dict[str, Any]:
    """Run a job until its second epoch is done; look at it then, while it goes on."""

    def then() -> None:
        try:
            look()
        finally:
            watch.interrupt()

    watch.once(records.EpochDone, then, after=1)
    job = jobs.job(run, db.Downpour(2), epochs=jobs.MANY)
    return db.run(job, db.Local(compute=STEADY), db.View(metrics=metrics))


def test_a_running_job_is_scraped_and_says_that_it_runs(tmp_path: Path, watch: jobs.Watch) -> None:
    run, found = tmp_path / "run", list[Any]()

    def look() -> None:
        with socket.create_connection(address_of(run)):  # one that says nothing holds up nobody
            found.extend([values(scraped(run)), scraped(run, "/health")])
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scraped(run, "/secret")

    result = run_job(run, watch, "0", look)
    numbers, health = found
    assert health == "the job runs\n"
    assert numbers["distbelief_replicas"] == 2.0
    assert 0 < numbers["distbelief_model_samples"] <= numbers["distbelief_samples_total"] <= result["samples"]
    assert abs(numbers["distbelief_last_step_timestamp_seconds"] - time.time()) < patience.SECONDS
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address_of(run))


def test_beyond_loopback_metrics_are_encrypted_and_certified(tmp_path: Path, watch: jobs.Watch) -> None:
    run, found = tmp_path / "run", list[dict[str, float]]()
    host = next((own[0] for name, own in own_addresses().items() if name != "lo"), "")
    if not host:
        pytest.skip("this machine has no address but loopback")

    def look() -> None:
        known = ssl.create_default_context(cafile=run / "metrics-authority.pem")
        found.append(values(scraped(run, context=known)))
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            scraped(run, context=ssl.create_default_context())
        with pytest.raises(OSError):  # noqa: PT011  # as plain text
            urllib.request.urlopen(f"http://{joined(*address_of(run))}/metrics", timeout=30)

    run_job(run, watch, f"{host}:0", look)
    assert found[0]["distbelief_replicas"] == 2.0


def test_a_snapshot_is_a_second_old_at_most_and_shows_what_is_rare_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    sink, summary = PrometheusSink(ShownRun(tmp_path, {}, noted.append, print), "127.0.0.1", 0), Summary({})

    def seen(now: float, record: records.Record) -> tuple[float, float]:
        monkeypatch.setattr(prometheus.time, "monotonic", lambda: now)
        summary.take(now, record)
        sink.take(now, record, summary)
        with urllib.request.urlopen(noted[0].split()[1], timeout=30) as answer:
            found = values(answer.read().decode())
        return found["distbelief_steps_total"], found.get("distbelief_test_loss", 0.0)

    step = records.Stepped("replica 0", 1, 10, 1, 2.5, 0, 1)
    assert [seen(now, step)[0] for now in (100.0, 100.3, 100.9, 101.1, 101.5)] == [1.0, 1.0, 1.0, 4.0, 4.0]
    assert seen(101.6, records.Tested(1, 0.7, None)) == (5.0, 0.7)
    sink.close({})


def test_the_loss_and_the_moments_of_steps_and_checkpoints_are_the_last_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, summary = PrometheusSink(ShownRun(tmp_path, {}, [].append, print), "127.0.0.1", 0), Summary({})

    def seen(now: float, *came: records.Record) -> list[float]:
        monkeypatch.setattr(prometheus.time, "time", lambda: now)
        for record in came:
            sink.take(now, record, summary)
        shown = {sample.name: sample.value for family in sink.collect() for sample in family.samples}
        names = ("train_loss", "last_step_timestamp_seconds", "last_checkpoint_timestamp_seconds")
        return [shown.get(f"distbelief_{name}", 0.0) for name in names]

    saved, failed = records.Checkpointed(1, ""), records.Checkpointed(2, "the disk is full")
    steps = [records.Stepped("replica 0", 1, 10, 1, loss, 0, weight) for loss, weight in ((2.5, 1), (1.0, 2))]
    assert seen(1000.0, failed) == [0.0, 0.0, 0.0]
    assert seen(1001.0, *steps, saved) == [1.5, 1001.0, 1001.0]
    assert seen(1002.0, failed) == [1.5, 1001.0, 1001.0]
    assert seen(1003.0, records.Stepped("replica 0", 1, 10, 1, None), failed) == [1.5, 1003.0, 1001.0]
    sink.close({})


def test_a_crowd_that_says_nothing_has_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus.MetricsAnswer, "timeout", 2 * patience.SECONDS)
    sink = PrometheusSink(ShownRun(tmp_path, {}, [].append, print), "127.0.0.1", 0)
    monkeypatch.setattr(prometheus, "THREADS", threading.active_count() + 2)
    with contextlib.ExitStack() as crowd:
        where = sink.server_address[:2]
        silent = [crowd.enter_context(socket.create_connection(where, patience.SECONDS)) for _ in range(6)]  # type: ignore[arg-type]
        assert [one.recv(1) for one in silent[3:]] == 3 * [b""]
    sink.close({})


def test_an_address_that_is_taken_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--metrics 127.0.0.1:{port}: Address already in use; choose another"):
            db.run(jobs.job(tmp_path / "run", db.Downpour(2)), view=db.View(metrics=str(port)))
    assert not (tmp_path / "run").exists()


def test_a_crowd_that_comes_at_once_is_let_in() -> None:
    with (
        contextlib.ExitStack() as crowd,
        socket.create_server(("127.0.0.1", 0), backlog=PrometheusSink.request_queue_size) as server,
    ):
        for _ in range(100):  # nobody accepts them yet
            crowd.enter_context(socket.create_connection(server.getsockname(), timeout=0.9))
