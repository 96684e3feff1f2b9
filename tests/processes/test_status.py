"""`distbelief status`: of running jobs, of ended ones, and of folders that are none."""

import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest

from distbelief.cli import main
from distbelief.core import records
from distbelief.errors import JobFailed, UsageError
from distbelief.places import status
from distbelief.places.compute_model import ComputeModel
from distbelief.places.processes.local import Local
from distbelief.strategies import Downpour, Single

STEADY = ComputeModel(step=0.005, spread="constant")


def asked_while_it_runs(
    run: Path, watch: jobs.Watch, ask: Any, strategy: Any, on: Local, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """What `ask` finds in the middle of a job, which goes on meanwhile and is then interrupted, and its result."""
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(ask(run))
        finally:
            watch.interrupt()

    asker = threading.Thread(target=look)
    watch.once(records.EpochDone, asker.start)
    result = jobs.run(run, strategy, on, epochs=jobs.MANY, **options)
    asker.join()
    return found[0], result


def members(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["role"]: one for one in found["members"]}


def test_a_running_job_tells_of_every_member_whoever_asks(
    tmp_path: Path, watch: jobs.Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where several ask at once, and some leave without an answer; and of an ended one how it ended."""
    run = tmp_path / "run"

    def ask(run: Path) -> tuple[dict[str, Any], list[bool], int]:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as rude:
                rude.connect(status._address(run))
        at_once: list[dict[str, Any]] = []
        several = [threading.Thread(target=lambda: at_once.append(status.status(run))) for _ in range(4)]
        for one in several:
            one.start()
        for one in several:
            one.join()
        found = status.status(run)
        while members(found)["shard 0"]["version"] <= 20 or members(found)["replica 0"]["rate"] is None:
            found = status.status(run)
        return found, [one["running"] for one in at_once], main.run(["status", str(run), "--json"])

    local = Local(compute=STEADY)
    (found, at_once, ended), result = asked_while_it_runs(run, watch, ask, Downpour(replicas=2), local)
    assert (found["running"], at_once, ended) == (True, [True] * 4, 0)
    assert json.loads(capsys.readouterr().out)["running"]
    assert 0 < found["samples"] < found["of_samples"] == jobs.MANY * jobs.SAMPLES
    assert min(found["bytes"]["sent"]["control"], found["bytes"]["shared_memory"]["push"]) > 0
    told = members(found)
    assert set(told) == {"replica 0", "replica 1", "coordinator", "shard 0", "shard 1", "evaluator"}
    assert told["coordinator"]["waits_for"].startswith("training: deals portions")
    assert told["replica 0"]["clock"] + told["replica 1"]["clock"] >= told["shard 0"]["version"] - 2
    assert all(one["pid"] != os.getpid() and one["incarnation"] == 0 for one in told.values())
    assert told["replica 0"]["version"] <= told["shard 0"]["version"]
    assert 0 <= told["replica 0"]["staleness"] < 20
    assert told["evaluator"]["state"] in ("waiting", "busy")
    assert told["replica 0"]["minibatches"] is not None
    [head, columns, *rows] = status.lines(found)
    assert "running" in head
    assert columns.split()[:3] == ["state", "clock", "version"]
    assert [row.partition(" (")[0] for row in rows] == list(told)

    over = status.status(run)
    assert (over["running"], over["outcome"], result["outcome"]) == (False, "interrupted", "interrupted")
    assert status.lines(over)[0].startswith(f"{run}: not running; interrupted: ")
    assert main.run(["status", str(run), "--watch"]) == 0
    assert "not running; interrupted" in capsys.readouterr().out
    for line in (["status"], ["status", "--json"], ["status", str(tmp_path)], ["status", str(run), "--wach"]):
        assert main.run(line) == 2
    assert "did you mean --watch" in capsys.readouterr().err
    for spoilt in (
        b'{"outcome": "do',
        b"[3]",
        b"[" * 9999,
        b'{"diagnosis": [3]}',
        b'{"diagnosis": [{"level": "wrong"}]}',
    ):
        (run / "result.json").write_bytes(spoilt)
        assert f"{run / 'result.json'} is corrupt" in status.status(run)["reason"]
    (run / "result.json").unlink()
    assert "has left no result" in status.status(run)["reason"]


def test_why_a_replica_waits_and_for_how_long(tmp_path: Path, watch: jobs.Watch) -> None:
    def ask(run: Path) -> list[str]:
        jobs.kill("shard 0", jobs.signal.SIGSTOP)
        try:
            while not (
                waiting := [
                    one["waits_for"]
                    for one in status.status(run)["members"]
                    if one["state"] == "waiting" and one["clock"]
                ]
            ):
                pass
            return waiting
        finally:
            jobs.kill("shard 0", jobs.signal.SIGCONT)

    options = {"checkpoint_every": 0, "snapshot_every": "0", "evaluate_every": 0}  # for which they would wait too
    served = Local(compute=STEADY, path="served")  # on the direct path nobody waits for a shard's process
    told, _ = asked_while_it_runs(tmp_path / "run", watch, ask, Downpour(replicas=2), served, **options)
    assert any("parameters from shard 0" in why for why in told)


def test_of_a_single_process_too(tmp_path: Path, watch: jobs.Watch) -> None:
    found, _ = asked_while_it_runs(tmp_path / "run", watch, status.status, Single(), Local(), evaluate_every=0)
    assert (found["running"], [one["role"] for one in found["members"]]) == (True, ["single"])


def test_who_reads_slowly_holds_nobody_up_and_is_dropped_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: now[0]))
    status_server = status.StatusServer(tmp_path, lambda: 0, lambda _: {"much": "x" * (1 << 20)})
    assert status_server.listener is not None
    found = []
    with socket.socket(socket.AF_UNIX) as slow, socket.socket(socket.AF_UNIX) as deaf:
        for client in (slow, deaf):
            client.connect(status._address(tmp_path))
            status_server.serve(True)
        assert status_server.due == status.READING_SECONDS
        while chunk := slow.recv(1 << 16):
            found.append(chunk)
            status_server.serve(False)
        assert status_server.due == status.READING_SECONDS, "the other has not been dropped yet"
        now[0] += 2 * status.ANSWER_SECONDS
        status_server.serve(False)
        assert status_server.due == float("inf")
    assert len(json.loads(b"".join(found))["much"]) == 1 << 20
    status_server.close()


def test_nobody_but_the_same_user_asks_and_nobody_else_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.json").write_text("{}")
    server, own = status.StatusServer(tmp_path, lambda: 0, lambda _: {}), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    monkeypatch.setattr(status, "ASK_SECONDS", 0.1)
    with pytest.raises(JobFailed, match=f"runs as user {own}, this one as {own + 1}; run both as one user$"):
        status.status(tmp_path)
    server.serve(ready=True)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(status._address(tmp_path))
        server.serve(ready=True)
        other.setblocking(False)
        assert other.recv(1) == b""
    server.close()


def test_a_job_that_hangs_does_not_answer_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text("{}")
    server = status.StatusServer(tmp_path, lambda: 0, lambda _: {})
    monkeypatch.setattr(status, "ASK_SECONDS", 0.01)
    for _ in range(2 * status.CLIENTS):  # in the end as many have given up waiting as may wait
        with pytest.raises(JobFailed, match="does not answer"):
            status.status(tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: server.close())
    assert main.run(["status", str(tmp_path), "--watch"]) == 0
    out, err = capsys.readouterr()
    assert "does not answer" in err
    assert "not running" in out


def test_a_job_that_was_killed_says_so(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    assert "it was killed" in status.lines(status.status(tmp_path))[0]
    with pytest.raises(UsageError, match="no such folder"):
        status.status(tmp_path / "nowhere")
