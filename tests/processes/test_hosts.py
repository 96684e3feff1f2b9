"""Several hosts as a place: their agents are subprocesses of this machine, and a script is the login."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import jobs
import msgspec
import pytest
import torch
from patience import SECONDS

from distbelief.errors import JobFailed, UsageError
from distbelief.places import signals
from distbelief.places.attempt import Attempt
from distbelief.places.cluster import shipping
from distbelief.places.cluster.cluster import Cluster
from distbelief.places.cluster.words import DataFile, DataPiece, DataTaken, OfferData
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


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def processes_in(folder: Path) -> dict[int, str]:
    """The processes of this machine whose working directory is a folder, and what they are called."""
    found = {}
    for one in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(one / "cwd") == str(folder) and not _is_dead(int(one.name)):
                found[int(one.name)] = (one / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
    return found


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
        running = Running(cluster, job, settings, attempt, False)
        hooks = Hooks(running._spec, lambda *_: None, happens, lambda _: None, lambda *_: None, lambda *_: None, False)
        processes = running.processes = cluster.make_processes(job, settings, False, attempt)(hooks)
        forkserver.start()
        woken, wake = multiprocessing.Pipe(duplex=False)
        processes.open(woken)
        assert processes._placement is not None
        assert [processes._placement.where[role] for role in ("replica 0", "replica 1")] == [0, int(runs == 1)]
        seen: dict[tuple[str, int], int] = {}

        def there() -> list[tuple[str, int]]:
            seen.update({(life.role, life.incarnation): life.pid for life in processes.children if life.pid})
            return [life for life, pid in seen.items() if not _is_dead(pid)]

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
        path = os.pathsep.join([str(Path(jobs.__file__).parent), *sys.path])
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path}, cwd=self.folder,
        )  # fmt: skip

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
        return sorted(pid for pid, called in processes_in(self.folder).items() if called == "distbelief: agent")

    def pid(self, role: str) -> int:
        """The process of a role."""
        return next(pid for pid, called in processes_in(self.folder).items() if called == f"distbelief: {role}")

    def leaves_nobody(self) -> None:
        """Within seconds."""
        end = monotonic() + SECONDS
        while left := processes_in(self.folder):
            assert monotonic() < end, left
            sleep(0.05)


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
    """Its replica goes on where a slot is left, its shard is its standby, and the job ends as it would have. What a
    role prints comes back with its name and its host.
    """
    words = "--hosts a:2,b:2 --replicas 2 --shards 2 --standby 1 --epochs 60 --pad 10ms"
    told = train(*words.split(), task="jobs:talking")
    told.until(trains)
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
    assert not {*processes_in(tmp_path)} - {os.getpid()}


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
    end = monotonic() + SECONDS
    while left := {*processes_in(tmp_path)} - {os.getpid()}:
        assert monotonic() < end, left
        sleep(0.05)


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


ELSEWHERE = "from distbelief.places.cluster import agent, network; network.network_identity = lambda: 'another'"
"""Makes an agent that of another machine than the command's."""


def on_b(shell: str, first: str) -> None:
    """Have the agent of host b do something before it begins."""
    Path(shell).write_text(
        f'#!/bin/sh\nname=$1; shift; command="$*"\n[ $name = a ] || command=$(printf %s "$*" | sed "s/-m '
        f'distbelief.places.cluster.agent/-c \\"{first}; agent.main()\\"/")\nexec sh -c "$command"\n'
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
    result = told.until(lambda one: "per_replica" in one or (_agent_is_gone(second) and _died(one, died)))
    assert _is_dead(second)
    assert died == {"shard 1"}
    assert (result["outcome"], result["samples"]) == ("done", 60 * jobs.SAMPLES)
    assert told.process.wait(SECONDS) == 0


def _agent_is_gone(agent: int) -> bool:
    """Wait for its end."""
    wait_until(lambda: _is_dead(agent))
    return True


def wait_until(reached: Callable[[], bool]) -> None:
    """Within seconds."""
    end = monotonic() + SECONDS
    while not reached():
        assert monotonic() < end
        sleep(0.05)


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
    wait_until(lambda: any(map(catches_sigterm, told.agents())))
    os.kill(told.agents()[0], signal.SIGTERM)
    _, printed = told.process.communicate(timeout=SECONDS)
    assert told.process.returncode == 130
    assert "SIGTERM on host a, before the job began" in printed
    (tmp_path / "held").unlink()


# data that are sent

LACKS = (
    "from distbelief.places.cluster import agent, shipping; has = shipping._has; "
    "shipping._has = lambda folder, file: 'distbelief-data-' in str(folder) and has(folder, file)"
)
"""Runs an agent as one on a host where nothing of the data is at the path that it has here."""


@pytest.fixture
def stored(tmp_path: Path, shell: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data of `jobs:kept`, in a folder that host a has and host b lacks; b keeps temporary files in a folder beside."""
    folder, temporary = tmp_path / "data", tmp_path / "temporary"
    (folder / "some").mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    torch.save(jobs.data().inputs, folder / "some" / "inputs.pt")
    (folder / "large").write_bytes(os.urandom((3 << 20) + 1))
    (folder / "empty").touch()
    on_b(shell, LACKS)
    return folder


KEPT = ("--hosts", "a:1,b:1", "--shards", "1", "--ship-data")


def test_data_are_sent_to_the_hosts_that_lack_them_and_go_with_the_job(
    train: Callable[..., Told], stored: Path
) -> None:
    """Which a host that may not leave ends in peace when it is told to go."""
    told = train(*KEPT, "--data-dir", str(stored), "--epochs", str(jobs.MANY), task="jobs:kept")
    said = told.until(lambda one: "were sent to" in str(one.get("text")))
    assert said["text"] == f"data: 3.2 MB of {stored} were sent to b, until the job ends"
    told.until(trains)
    os.kill(told.agents()[1], signal.SIGTERM)
    _, printed = told.process.communicate(timeout=SECONDS)
    assert told.process.returncode == 130, printed
    assert re.search(r"interrupted; go on with: .*--hosts a:1,b:1", printed), printed
    assert f"[replica 0 on a] read in {stored}" in printed
    assert f"[replica 1 on b] read in {stored.parent}/temporary/distbelief-data-" in printed
    told.leaves_nobody()
    assert not list((stored.parent / "temporary").glob("distbelief-data-*"))


def test_data_that_were_sent_go_with_an_agent_that_is_killed(train: Callable[..., Told], stored: Path) -> None:
    """The job goes on, and a Ctrl-C ends it in peace."""
    told = train(*KEPT, "--data-dir", str(stored), "--epochs", str(jobs.MANY), task="jobs:kept")
    told.until(trains)
    [there] = (stored.parent / "temporary").glob("distbelief-data-*")
    assert {str(one.relative_to(there)) for one in there.rglob("*")} == {"empty", "large", "some", "some/inputs.pt"}
    os.kill(told.agents()[1], signal.SIGKILL)
    wait_until(lambda: not there.exists())
    told.process.send_signal(signal.SIGINT)
    _, printed = told.process.communicate(timeout=SECONDS)
    assert told.process.returncode == 130, printed
    assert list((stored.parent / "run" / "checkpoints").iterdir())
    told.leaves_nobody()


def test_a_host_without_room_for_the_data_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping.shutil, "disk_usage", lambda _: SimpleNamespace(free=2))
    kept = shipping.ShippedData()
    try:
        error = kept.take_offer(_offer(tmp_path / "nowhere", a=b"data")).error
        assert re.search(r"the data cannot be kept in .*: 0 MB are free; make room there", error), error
    finally:
        kept.close()


def _offer(folder: Path, **files: bytes) -> OfferData:
    return OfferData(
        str(folder), [DataFile(name, len(data), hashlib.sha256(data).digest()) for name, data in files.items()]
    )


@pytest.mark.parametrize(
    ("name", "sent", "wrong"),
    [
        ("../above", b"data", "is no name of a file in a folder"),
        ("/etc/above", b"data", "is no name of a file in a folder"),
        ("a", b"dato", "a changed while it was sent, or did not arrive whole; start again"),
        ("a", b"data and more", "a changed while it was sent, or did not arrive whole; start again"),
    ],
)
def test_what_is_not_what_was_offered_is_never_used(tmp_path: Path, name: str, sent: bytes, wrong: str) -> None:
    kept = shipping.ShippedData()
    try:
        taken = kept.take_offer(_offer(tmp_path / "nowhere", **{name: b"data"}))
        if not taken.error:
            taken = kept.take_piece(DataPiece(sent))
        assert wrong in taken.error
        assert "make room" not in taken.error
        assert kept.folder == ""
    finally:
        kept.close()


def test_part_of_the_data_is_never_used(tmp_path: Path) -> None:
    kept = shipping.ShippedData()
    try:
        assert kept.take_offer(_offer(tmp_path / "nowhere", a=b"data", b=b"more")) == DataTaken(8)
        assert (kept.take_piece(DataPiece(b"data")), kept.folder) == (DataTaken(4), "")
        assert kept.take_piece(DataPiece(b"more")) == DataTaken(0)
        assert (Path(kept.folder) / "b").read_bytes() == b"more"
        assert kept.take_piece(DataPiece(b"beyond")).error
    finally:
        kept.close()


def test_a_full_disk_is_told_of_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "a").symlink_to("/dev/full")
    monkeypatch.setattr(shipping.tempfile, "mkdtemp", lambda **_: str(made))
    kept = shipping.ShippedData()
    assert kept.take_offer(_offer(tmp_path / "nowhere", a=b"data")).missing == 4
    assert "No space left on device; make room there" in kept.take_piece(DataPiece(b"data")).error
    kept.close()
    assert not made.exists()


STOPS = (
    "from distbelief.places.cluster import words; import os, signal; say = words.Line.say; "
    "words.Line.say = lambda line, word: (say(line, word), isinstance(word, words.{word}) and os.kill(os.getpid(), "
    "signal.SIGSTOP))"
)
"""Stops an agent as soon as it has said a word of a kind."""


@pytest.mark.long
def test_a_host_that_stops_while_data_are_sent_to_it_does_not_keep_the_command(
    train: Callable[..., Told], stored: Path, shell: str
) -> None:
    """However much is sent."""
    for number in range(shipping.MOST_FILES - 10):
        (stored / f"{number}{'of many' * 30}").touch()
    on_b(shell, f"{LACKS}; {STOPS.format(word='HostsReached')}")
    told = train(*KEPT, "--data-dir", str(stored), task="jobs:kept")
    wait_until(lambda: any(signals.is_stopped(agent) for agent in told.agents()))
    sends = Path(f"/proc/{told.process.pid}/wchan")
    wait_until(lambda: "poll" in sends.read_text() or "sock_alloc" in sends.read_text())
    told.process.send_signal(signal.SIGINT)
    _, printed = told.process.communicate(timeout=SECONDS)
    assert told.process.returncode == 130
    assert "interrupted before the job began" in printed


def test_every_word_by_which_data_are_sent_fits_a_line_that_nobody_reads(tmp_path: Path) -> None:
    files = [DataFile("n" * 4096, 0, b"d" * 32)] * shipping.MOST_FILES
    (tmp_path / "large").write_bytes(bytes(3 * shipping.PIECE))
    large = [DataFile("large", 3 * shipping.PIECE, b"d" * 32)]
    offers = list(shipping._offers(tmp_path, files))
    assert [one.more for one in offers] == [True] * (len(offers) - 1) + [False]
    for word in (offers[0], *shipping._pieces(tmp_path, large)):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            data = msgspec.msgpack.encode(word)
            assert ours.send(data) == len(data)


@pytest.mark.parametrize("change", ["gone", "shorter"])
def test_a_file_that_changes_while_it_is_sent_is_told_of_as_that(tmp_path: Path, change: str) -> None:
    (tmp_path / "a").write_bytes(bytes(2 * shipping.PIECE))
    files = shipping.files_of(tmp_path)
    (tmp_path / "a").unlink() if change == "gone" else os.truncate(tmp_path / "a", shipping.PIECE)
    with pytest.raises(JobFailed, match="a changed while it was sent, or did not arrive whole; start again"):
        list(shipping._pieces(tmp_path, files))


def test_linked_files_and_folders_are_sent_as_what_they_are(tmp_path: Path) -> None:
    data, beside = tmp_path / "data", tmp_path / "beside"
    data.mkdir()
    beside.mkdir()
    (beside / "a").write_text("data")
    (data / "folder").symlink_to(beside)
    (data / "file").symlink_to(beside / "a")
    assert [file.name for file in shipping.files_of(data)] == ["file", "folder/a"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.symlink_to("nowhere"), "odd is neither a file nor a folder, nor a link to one; move it"),
        (os.mkfifo, "odd is neither a file nor a folder, nor a link to one; move it"),
        (lambda path: path.symlink_to(path.parent), "odd leads back to a folder above it"),
        (lambda path: path.with_name(os.fsdecode(b"odd\xff")).touch(), r"odd\\udcff' is no name in UTF-8; rename it"),
        (lambda path: path.mkdir(0), "cannot be read: .*Permission denied"),
    ],
    ids=["a link to nothing", "a pipe", "a loop", "no text", "no permission"],
)
def test_what_cannot_be_sent_is_refused_by_its_name(tmp_path: Path, make: Callable[[Path], object], told: str) -> None:
    if "Permission" in told and os.geteuid() == 0:
        pytest.skip("root may read anything")
    (tmp_path / "a").write_text("data")
    make(tmp_path / "odd")
    with pytest.raises(UsageError, match=told) as raised:
        shipping.list_data(tmp_path)
    str(raised.value).encode()


def test_folders_without_end_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one, other in ("ab", "ba"):
        (tmp_path / one).mkdir()
        for number in range(2):
            (tmp_path / one / f"{number}").symlink_to(tmp_path / other)
    with pytest.raises(UsageError, match=r"[01] is neither a file nor a folder, nor a link to one"):
        shipping.list_data(tmp_path)
    monkeypatch.setattr(shipping, "MOST_FILES", 30)
    with pytest.raises(UsageError, match="in more than 30 files and folders, and at most"):
        shipping.list_data(tmp_path)


def test_a_host_that_can_start_no_process_keeps_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    kept = shipping.ShippedData()
    assert "No such file or directory: 'sh'" in kept.take_offer(_offer(tmp_path / "nowhere", a=b"data")).error
    kept.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "which folder? Name the one that holds the data, with --data-dir"),
        (("--data-dir", "nowhere"), "nowhere is no folder here"),
        (("--data-dir", "data"), "holds 0 MB in 2 files, and at most 0 MB in 4096 are sent; copy it to the hosts"),
        (("--data-dir", "empty"), "empty is empty"),
    ],
)
def test_data_that_cannot_be_sent_are_told_of_before_the_job(
    stored: Path, shell: str, words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from distbelief.cli import main

    monkeypatch.chdir(stored.parent)
    monkeypatch.delenv("DISTBELIEF_DATA", raising=False)
    monkeypatch.setattr(shipping, "SHIP_LIMIT", 1000)
    (stored / "large").unlink()
    Path("empty").mkdir()
    command = ["train", "jobs:kept", "downpour", "--remote-shell", shell, *KEPT, *words, "--out", "run"]
    assert main.run(command) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not Path("run").exists()
