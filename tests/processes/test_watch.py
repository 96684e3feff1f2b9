"""The page of a run as a process of its own: where it serves, whom, until when, and what its buttons do."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jobs
import pytest
from patience import SECONDS, SLOWNESS
from test_status import STEADY, asked_while_it_runs

from distbelief.core import records
from distbelief.errors import UsageError
from distbelief.lab.watch import control, serving
from distbelief.lab.watch.control import press
from distbelief.places import signals
from distbelief.places.processes.local import Local
from distbelief.strategies import Downpour

COMMAND = [sys.executable, "-m", "distbelief"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    run = tmp_path_factory.mktemp("ended") / "run"
    jobs.run(run, on=jobs.PLAIN)
    return run


@contextmanager
def watching(run: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a page, and its address."""
    process = subprocess.Popen([*COMMAND, "watch", str(run), *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().removeprefix("page: ").strip()
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def get(address: str, path: str = "state", trust: ssl.SSLContext | None = None) -> Any:
    where = urlsplit(address)
    kind = http.client.HTTPSConnection if trust else http.client.HTTPConnection
    more = {"context": trust} if trust else {}
    connection = kind(str(where.hostname), where.port, timeout=SECONDS, **more)  # type: ignore[arg-type]
    try:
        connection.request("GET", f"/{path}?{where.query}")
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return json.loads(data)[0][2] if path == "state" else data
    finally:
        connection.close()


def test_a_page_is_there_within_a_second_and_without_torch(ended: Path) -> None:
    with watching(ended) as (process, address):
        took = signals.processor_seconds(process.pid)
        assert address.startswith("http://127.0.0.1:")
        assert b"libtorch" not in Path(f"/proc/{process.pid}/maps").read_bytes()
        assert get(address)["run"]["outcome"] == "done"
        assert b"<!doctype html>" in get(address, "")
        assert b"libtorch" not in Path(f"/proc/{process.pid}/maps").read_bytes()
    assert took < 1.0 * SLOWNESS, took


def test_the_newest_run_is_the_one_that_is_meant(ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([*COMMAND, "watch"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2, "distbelief: there is no run under runs/: name its folder, distbelief watch [RUN]\n",
    )  # fmt: skip
    for name, age in (("newer", 10), ("older", 1000)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_text("{}")
        os.utime(folder / "job.json", (ended.stat().st_mtime - age,) * 2)
    with watching(Path("--stay=0")) as (process, address):
        assert get(address)["run"]["folder"] == "runs/newer"
        assert process.wait(SECONDS) == 0, "after a job it ends by itself"


def test_a_page_that_is_started_again_keeps_its_token(ended: Path) -> None:
    with watching(ended) as (process, address):
        process.kill()
    key = ended / serving.KEY
    assert key.stat().st_mode & 0o777 == 0o600
    with watching(ended, "--bind", urlsplit(address).netloc) as (_, again):
        assert again == address
    key.chmod(0o640)
    with watching(ended) as (_, other):
        assert urlsplit(other).query != urlsplit(address).query, "others could have read it"
    assert key.stat().st_mode & 0o777 == 0o600


def test_elsewhere_a_page_is_encrypted_and_certified(ended: Path) -> None:
    with watching(ended, "--bind", "0.0.0.0") as (_, told):
        address, _, authority = told.partition(", certified by ")
        trust = ssl.create_default_context(cafile=authority)
        assert address.startswith("https://")
        assert get(address.replace("0.0.0.0", "127.0.0.1"), trust=trust)["run"]["outcome"] == "done"
    with watching(ended, "--bind", "127.0.0.2") as (_, address):
        assert get(address)["run"]["outcome"] == "done", "which is loopback"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--bind 127.0.0.1:99999", "--bind 127.0.0.1:99999: "),
        ("--bind 8000", "--bind '8000': write HOST or HOST:PORT"),
        ("--control", "no job of yours runs in"),
        ("other", "'other' is one word too many"),
    ],
)
def test_what_cannot_be_is_refused(words: str, told: str, ended: Path) -> None:
    done = subprocess.run([*COMMAND, "watch", str(ended), *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_job_shows_its_page_and_does_not_wait_for_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "jobs:tiny", "downpour", "--epochs", str(jobs.MANY), "--page", "--json", "--out", str(run)]
    with (tmp_path / "told").open("w") as told_to:  # a pipe that nobody reads would hold up the job
        job = subprocess.Popen(
            [*COMMAND, *words], stdout=told_to, stderr=subprocess.PIPE, text=True, env=jobs.environment()
        )
    assert job.stderr is not None
    address = job.stderr.readline().removeprefix("page: ").strip()
    [page] = [pid for pid, title in jobs.descendants(job.pid).items() if "--stay" in title]
    try:
        # a job that begins on a busy machine may not answer yet, which the page says
        jobs.wait_until(lambda: get(address).get("numbers", {}).get("samples"))
        assert get(address)["run"]["running"]
        os.kill(page, signal.SIGSTOP)
        job.terminate()
        _, errors = job.communicate(timeout=SECONDS)
        assert json.loads((tmp_path / "told").read_text().splitlines()[-1])["outcome"] == "interrupted"
        assert errors.startswith("distbelief: interrupted; go on with:")
        os.kill(page, signal.SIGCONT)
        jobs.wait_until(lambda: get(address)["run"]["outcome"] == "interrupted")  # it outlives the job for a while
    finally:
        os.kill(page, signal.SIGKILL)
        job.kill()
        job.communicate(timeout=SECONDS)


def test_connections_that_ask_for_nothing_do_not_keep_others_out(ended: Path) -> None:
    with watching(ended) as (_, address), contextlib.ExitStack() as crowd:
        where = urlsplit(address)
        for sent in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HT"):
            for _ in range(serving.CONNECTIONS // 2):
                one = crowd.enter_context(socket.create_connection((str(where.hostname), where.port), SECONDS))
                one.sendall(sent)
            while one.recv(1 << 16):
                pass
        assert get(address)["run"]["outcome"] == "done"


def test_a_port_that_is_taken_is_refused_before_the_job(ended: Path) -> None:
    with watching(ended) as (_, address):
        port = str(urlsplit(address).port)
        words = ["train", "digits", "single", "--page", port]
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(rf"distbelief: --page {port}: cannot be used \(.*in use.*\); name another port", done.stderr)


def test_buttons_kill_a_replica_which_comes_back_and_stop_the_job(tmp_path: Path, watch: jobs.Watch) -> None:
    run, back = tmp_path / "run", threading.Event()
    told = list[str]()

    def look(_: Path) -> None:
        watch.once(records.Gone, lambda: watch.once(records.Joined, back.set))
        for wrong in (("kill", "shard 0"), ("kill", "replica 7"), ("erase", "replica 1"), ("kill", "")):
            with pytest.raises(UsageError, match="no button does that"):
                press(run, *wrong)
        told.append(press(run, "kill", "replica 1"))
        assert back.wait(SECONDS)
        told.extend(press(run, "stop", "job") for _ in range(2))
        watch.interrupted = True

    _, result = asked_while_it_runs(run, watch, look, Downpour(replicas=2, restarts=2), Local(compute=STEADY))
    assert told == [
        "replica 1 was killed; with --restarts it comes back",
        "The job ends, and keeps a checkpoint",
        "The job is ending already",
    ]
    assert result["outcome"] == "interrupted"
    assert any((run / "checkpoints").iterdir())
    with pytest.raises(UsageError, match="no job of yours runs in"):
        press(run, "stop", "job")


def test_only_a_process_of_this_job_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that the status gives may be that of another machine's process."""
    title = "import sys, setproctitle; setproctitle.setproctitle('{}'); print(flush=True); sys.stdin.read()"
    for name, above in (("distbelief: replica 0", 1 << 30), ("distbelief: replica 1", os.getpid())):
        other = subprocess.Popen(
            [sys.executable, "-c", title.format(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert other.stdout is not None
        other.stdout.readline()
        monkeypatch.setattr(control, "supervisor", lambda _, above=above: above)
        found = {"members": [{"role": "replica 0", "pid": other.pid}]}
        monkeypatch.setattr(control, "status", lambda _, found=found: found)
        with pytest.raises(UsageError, match=f"process {other.pid} is not replica 0 of this job"):
            press(tmp_path, "kill", "replica 0")
        other.communicate(timeout=SECONDS)
        assert other.returncode == 0
