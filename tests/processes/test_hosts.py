"""Several hosts as a place: their agents are subprocesses of this machine, and a script is the login."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import jobs
import pytest
from patience import SECONDS

from distbelief.errors import JobFailed, UsageError
from distbelief.places.attempt import Attempt
from distbelief.places.channel import SILENCE_SECONDS
from distbelief.places.cluster.cluster import Cluster
from distbelief.places.place import Event
from distbelief.places.processes import forkserver
from distbelief.places.processes.processes import Hooks
from distbelief.places.processes.running import Running
from distbelief.strategies import Downpour
from distbelief.testing import Site, check_place
from distbelief.transport.addresses import own_addresses

reachable = pytest.mark.skipif(
    all(name == "lo" for name in own_addresses()), reason="this machine has no address but loopback"
)


@pytest.fixture
def shell(tmp_path: Path) -> str:
    """A remote shell whose hosts are this machine: as a login does, it greets before it runs the command."""
    script = tmp_path / "shell"
    script.write_text('#!/bin/sh\necho "welcome to $1"\nHOST_NAMED=$1; export HOST_NAMED\nshift\nexec sh -c "$*"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.mark.long
def test_hosts_are_a_place(tmp_path: Path, shell: str) -> None:
    """Roles begin where the plan says, an end is told of with how it was, and nothing is left."""
    runs = 0

    def make(happens: Callable[[Event], None]) -> Site:
        nonlocal runs
        runs += 1
        cluster, job = (
            Cluster(hosts="a:1,b:1" if runs == 1 else "a:2", remote_shell=shell),
            jobs.job(tmp_path / f"run {runs}", Downpour(replicas=2)),
        )
        settings = cluster.settings(job)
        attempt = Attempt(job, settings, None, monotonic())
        running = Running(cluster, attempt, False)
        hooks = Hooks(running._spec, lambda *_: None, happens, lambda _: None, lambda *_: None, lambda *_: None, False)
        processes = running.processes = cluster.make_processes(attempt, False)(hooks)
        forkserver.start()
        woken, wake = multiprocessing.Pipe(duplex=False)
        processes.open(woken)
        assert [processes._placement.where[role] for role in ("replica 0", "replica 1")] == [0, int(runs == 1)]
        seen: dict[tuple[str, int], int] = {}

        def there() -> list[tuple[str, int]]:
            seen.update({(life.role, life.incarnation): life.pid for life in processes.children if life.pid})
            return [life for life, pid in seen.items() if not jobs.is_dead(pid)]

        def pump() -> None:
            ready = multiprocessing.connection.wait(processes.waitables, 0.01)
            processes.look(set(map(id, ready)))

        def close() -> None:
            processes.close()
            running.close()
            running.attempt.finish()
            woken.close()
            wake.close()

        return Site(
            processes, ("replica 0", "replica 1"), lambda *life: os.kill(seen[life], signal.SIGKILL), there, pump, close
        )

    check_place(make)


class Told:
    """A command that trains on hosts, and what it says, line by line."""

    def __init__(self, shell: str, out: Path, *words: str, task: str = "jobs:tiny", strategy: str = "downpour") -> None:
        self.folder = out.parent
        command = [sys.executable, "-m", "distbelief", "train", task, strategy, "--batch-size", "16", "--json"]
        command += ["--remote-shell", shlex.quote(shell), "--out", str(out), *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=jobs.environment(), cwd=self.folder
        )

    def until(self, reached: Callable[[dict[str, object]], bool]) -> dict[str, object]:
        """The first record that is so."""
        assert self.process.stdout
        for line in self.process.stdout:
            record = json.loads(line)
            if reached(record):
                return record
        raise AssertionError(f"it has ended: {self.process.communicate()}")

    def agents(self) -> list[int]:
        """The agents, in the order in which they were started."""
        return sorted(pid for pid, called in jobs.processes_in(self.folder).items() if called == "distbelief: agent")

    def pid(self, role: str) -> int:
        """The process of a role."""
        return next(pid for pid, called in jobs.processes_in(self.folder).items() if called == f"distbelief: {role}")

    def leaves_nobody(self) -> None:
        """Within seconds."""
        jobs.wait_until(lambda: not jobs.processes_in(self.folder))


@pytest.fixture
def train(tmp_path: Path, shell: str) -> Iterator[Callable[..., Told]]:
    """Starts such a command; none outlives the test."""
    started: list[Told] = []

    def start(*words: str, task: str = "jobs:tiny", strategy: str = "downpour") -> Told:
        started.append(Told(shell, tmp_path / "run", *words, task=task, strategy=strategy))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
        one.leaves_nobody()


def trains(record: dict[str, object]) -> bool:
    return record.get("event") == "Stepped" and bool(record.get("steps"))


def test_the_death_of_a_host_costs_no_more_than_its_roles(train: Callable[..., Told]) -> None:
    """Its replica goes on where a slot is left, its shard is its standby, and the job ends as it would have."""
    words = "--hosts a:2,b:2 --replicas 2 --shards 2 --standby 1 --epochs 60 --pad 10ms"
    told = train(*words.split(), task="jobs:talking")
    # a shard that dies before its standby holds what it held is begun anew instead, with all others
    told.until(lambda one: one.get("event") == "StandbyReady" and one["role"] == "standby 1")
    told.until(lambda one: trains(one) and one["role"] == "replica 1")  # it has said where it is
    _, second = told.agents()
    os.kill(second, signal.SIGKILL)
    died: set[str] = set()
    result = told.until(lambda one: "per_replica" in one or _died(one, died))
    assert result["outcome"] == "done", result
    assert {"replica 1", "shard 1"} <= died, died
    assert result["samples"] == 60 * jobs.SAMPLES
    _, printed = told.process.communicate(timeout=SECONDS)
    assert told.process.returncode == 0
    assert {"[replica 0 on a] this is a", "[replica 1 on b] this is b"} <= set(printed.splitlines()), printed
    assert "[a] welcome to a" not in printed
    told.leaves_nobody()


def _died(record: dict[str, object], died: set[str]) -> bool:
    if (record.get("event") == "Gone" and record["died"]) or record.get("event") == "Succeeded":
        died.add(str(record["role"]))
    return False


def test_an_error_of_a_role_says_on_which_host_it_was(train: Callable[..., Told]) -> None:
    told = train("--hosts", "a:1,b:1", "--shards", "1", task="jobs:absent")
    _, printed = told.process.communicate(timeout=SECONDS)
    assert told.process.returncode == 2
    assert "distbelief: host b: no data in /data" in printed


@pytest.mark.parametrize(
    ("does", "told", "names"),
    [
        (
            "echo 'me@b: Permission denied (publickey).' >&2; exit 255",
            r"host b: .*Permission denied.*ssh-copy-id b",
            "ab",
        ),
        ("exec sleep 1000", r"host b: it does not answer after", "b"),
        ("exit 0", r"host b: its agent ended, and said nothing \(status 0\)", "b"),
    ],
)
def test_a_host_that_cannot_be_used_is_told_of(
    tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch, does: str, told: str, names: str
) -> None:
    """And those that could are let go of."""
    from distbelief.places.cluster import opening
    from distbelief.places.cluster.engines import RemoteShell

    monkeypatch.setattr(opening, "START_SECONDS", SECONDS if "sleep" not in does else 0.5)
    monkeypatch.chdir(tmp_path)
    Path(shell).write_text(f'#!/bin/sh\nif [ "$1" = b ]; then {does}; fi\nshift\nexec sh -c "$*"\n')
    woken, wake = multiprocessing.Pipe(duplex=False)
    with woken, wake, pytest.raises(JobFailed, match=told):
        opening.open_hosts(RemoteShell(shell), list(names), "", "", woken)
    jobs.wait_until(lambda: not {*jobs.processes_in(tmp_path)} - {os.getpid()})


def test_a_host_of_another_version_is_refused(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from distbelief.places.cluster import opening
    from distbelief.places.cluster.engines import RemoteShell

    monkeypatch.setattr(opening, "VERSION", "0.0.1")
    woken, wake = multiprocessing.Pipe(duplex=False)
    with woken, wake, pytest.raises(UsageError, match=r"host a runs distbelief .*, this is 0\.0\.1: install the same"):
        opening.open_hosts(RemoteShell(shell), ["a"], "", "", woken)


def test_hosts_are_checked_and_what_is_wrong_with_one_keeps_nobody_from_the_others(
    tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from distbelief.cli import main

    monkeypatch.chdir(tmp_path)
    denied = "echo 'Permission denied (publickey).' >&2; exit 255"
    Path(shell).write_text(f'#!/bin/sh\nif [ "$1" = c ]; then {denied}; fi\nshift\nexec sh -c "$*"\n')
    words = ["check", "mnist", "--hosts", "a,b,c", "--remote-shell", shell, "--json"]
    assert main.run([*words, "--data-dir", str(tmp_path / "nowhere")]) == 1
    a, b, c = json.loads(capsys.readouterr().out)
    assert c["problems"] == ["Permission denied (publickey).; log in there once without a password: ssh-copy-id c"]
    for one, other in ((a, "b"), (b, "a")):
        assert one["cores"] == len(os.sched_getaffinity(0))
        assert one["memory"] > 0
        assert abs(one["clock"]) < 5
        assert 0 < one["ways"][other]["latency"] < 1
        assert one["ways"][other]["bandwidth"] > 1e6
        assert ["nowhere" in problem for problem in one["problems"]] == [True]
    jobs.wait_until(lambda: not {*jobs.processes_in(tmp_path)} - {os.getpid()})


@pytest.mark.long
def test_the_ticket_of_an_agent_is_on_no_command_line_and_in_no_environment(
    train: Callable[..., Told], shell: str, tmp_path: Path
) -> None:
    """And an agent ends with the login that has brought its ticket."""
    Path(shell).write_text('#!/bin/sh\nshift\nhead -n 1 > ticket.$$; (cat ticket.$$; exec cat) | sh -c "$*"\n')
    told = train("--hosts", "a:1,b:1", "--shards", "1", "--epochs", "10000")
    told.until(trains)
    keys = [json.loads(path.read_bytes())["identity"]["key"] for path in tmp_path.glob("ticket.*")]
    lines = [line.encode() for key in keys for line in key.splitlines()[1:-1]]
    shown = [
        Path(f"/proc/{pid}/{what}").read_bytes()
        for pid in jobs.processes_in(tmp_path)
        for what in ("cmdline", "environ")
    ]
    assert len(keys) == 2, keys
    assert len(lines) >= 2 * len(keys)
    assert len(shown) > 2 * 4, "the command, the agents, and the roles"
    assert not any(line in text for line in lines for text in shown)
    assert len(told.agents()) == 2
    os.kill(next(pid for pid, called in jobs.processes_in(tmp_path).items() if called == "cat"), signal.SIGKILL)
    closed = monotonic()
    jobs.wait_until(lambda: len(told.agents()) == 1)
    assert monotonic() - closed < SILENCE_SECONDS / 2, "an agent whose line is silent ends later"


@pytest.mark.long
def test_allreduce_goes_on_when_a_replica_and_when_a_host_dies(train: Callable[..., Told]) -> None:
    """The replica begins again there; the others regroup, what died is dealt again, and all links are encrypted."""
    told = train("--hosts", "a:1,b:1,c:1", "--pad", "10ms", "--epochs", "100", strategy="allreduce")
    told.until(trains)
    os.kill(told.pid("replica 1"), signal.SIGKILL)
    told.until(lambda one: one.get("event") == "Gone" and one["role"] == "replica 1" and bool(one["died"]))
    told.until(lambda one: one.get("event") == "Stepped" and one["role"] == "replica 1")
    os.kill(told.agents()[1], signal.SIGKILL)
    seen: list[dict[str, object]] = []
    result = told.until(lambda one: "per_replica" in one or bool(seen.append(one)))
    assert (result["outcome"], result["carrier"], result["samples"]) == ("done", "tls", 100 * jobs.SAMPLES)
    why = [str(one["reason"]).partition(":")[0] for one in seen if one.get("died")]
    assert why == ["its host b is gone, and no other has a slot left for it"], "told once"
    assert told.process.wait(SECONDS) == 0
    told.leaves_nobody()


ELSEWHERE = "from distbelief.places.cluster import network; network.network_identity = lambda: 'another'"
"""Makes an agent that of another machine than the command's."""


def on_b(shell: str, first: str) -> None:
    """Have the agent of host b do something before it begins."""
    Path(shell).write_text(
        f'#!/bin/sh\nname=$1; shift; command="$*"\n[ $name = a ] || command=$(printf %s "$*" | sed "s/-m '
        f'distbelief agent/-c \\"{first}; from distbelief.cli.main import main; main()\\" agent/")\n'
        'exec sh -c "$command"\n'
    )


@reachable
def test_a_host_that_is_told_to_go_leaves_and_the_job_goes_on(train: Callable[..., Told], shell: str) -> None:
    """Its shard is its standby; its agent ends before the job does, which makes every sample once."""
    on_b(shell, ELSEWHERE)
    words = "--hosts a:1,b:1 --shards 2 --standby 1 --pad 10ms --leave-within 60 --epochs 60"
    told = train(*words.split())
    told.until(lambda one: one.get("event") == "StandbyReady" and one["role"] == "standby 1")
    told.until(trains)
    _, second = told.agents()
    os.kill(second, signal.SIGTERM)
    died: set[str] = set()
    gone = told.until(lambda one: one.get("event") == "Gone" or _died(one, died))
    assert (gone["role"], gone["died"]) == ("replica 1", False), gone
    jobs.wait_until(lambda: jobs.is_dead(second))
    result = told.until(lambda one: "per_replica" in one or _died(one, died))
    assert died == {"shard 1"}
    assert (result["outcome"], result["samples"]) == ("done", 60 * jobs.SAMPLES)
    assert told.process.wait(SECONDS) == 0


def catches_sigterm(process: int) -> bool:
    """Whether it has come so far that the signal does not just end it."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.long
def test_a_host_that_is_told_to_go_before_the_job_has_begun_ends_it(shell: str, tmp_path: Path, train: Any) -> None:
    """While another is still to come."""
    (tmp_path / "held").touch()
    Path(shell).write_text(
        f'#!/bin/sh\n[ $1 = a ] || while [ -e {tmp_path}/held ]; do sleep 0.1; done\nshift\nexec sh -c "$*"\n'
    )
    told = train("--hosts", "a:1,b:1", "--shards", "1")
    jobs.wait_until(lambda: any(map(catches_sigterm, told.agents())))
    os.kill(told.agents()[0], signal.SIGTERM)
    _, printed = told.process.communicate(timeout=SECONDS)
    assert told.process.returncode == 130
    assert "SIGTERM on host a, before the job began" in printed
    (tmp_path / "held").unlink()
