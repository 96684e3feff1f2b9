"""Replicas that join a job from elsewhere and leave it again: real processes, over plain TCP and TLS."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import damped_downpour
import jobs
import msgspec
import pytest

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.core.records import Record
from distbelief.errors import JobFailed
from distbelief.places import status
from distbelief.places.join import guest, join_server
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Bounded, Downpour, Strategy, Synchronous

SECONDS = 60.0
PLAIN, TLS, OPEN = (
    Local(listen="127.0.0.1"),
    Local(listen="127.0.0.1", tls=True),
    Local(listen="0.0.0.0", advertise="127.0.0.1", insecure=True),
)


class Guests:
    """Commands `distbelief join` that run beside a job."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def join(self, run: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "distbelief", "join", str(run / join_server.TICKET), *more]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(jobs.__file__).parent), *sys.path])}
        one = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=Path(jobs.__file__).parent,
        )
        self.started.append(one)
        return one

    def ended(self) -> list[tuple[int, str]]:
        """The status and the words of each."""
        return [(one.wait(SECONDS), one.communicate()[0]) for one in self.started]


@pytest.fixture
def guests() -> Iterator[Guests]:
    guests = Guests()
    yield guests
    for one in guests.started:
        one.kill()
        one.wait()
        assert one.stdout
        one.stdout.close()


def assert_nothing_is_missing(folder: Path, strategy: Strategy, result: dict[str, object]) -> None:
    """What an interrupted job of a guest has counted is what it holds: going on, its epochs come to their samples, none
    missing and none twice. Where the last epoch was done and not yet told of, some of the next were dealt already.
    """
    epochs = int(result["epochs"]) + 2  # type: ignore[call-overload]
    whole = jobs.run(folder, strategy, epochs=epochs, resume=True)
    assert (whole["outcome"], whole["samples"]) == ("done", epochs * jobs.SAMPLES)


def worked(record: Record) -> bool:
    """Whether a record tells of steps of a guest."""
    return isinstance(record, records.Stepped) and record.role in ("replica 1", "replica 2") and record.steps > 0


@pytest.mark.parametrize("place", [PLAIN, TLS, OPEN], ids=["plain", "tls", "insecure"])
@pytest.mark.parametrize(
    "strategy", [Downpour(1, 2), Synchronous(1, 2), Bounded(1, 2, staleness=0)], ids=lambda s: s.name
)
def test_a_guest_does_its_share_and_every_sample_counts_once(
    tmp_path: Path, watch: jobs.Watch, guests: Guests, strategy: Strategy, place: Local
) -> None:
    if place is not PLAIN and strategy.name == "bounded":
        pytest.skip("two consistencies are enough over these")

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif isinstance(record, records.Joined) and record.role == "replica 1":
            assert (tmp_path / join_server.TICKET).stat().st_mode & 0o777 == 0o600
        elif worked(record):
            watch.interrupt()

    watch.act = act
    result = jobs.run(tmp_path, strategy, place, epochs=jobs.MANY)
    assert result["outcome"] == "interrupted"
    assert {one["id"]: bool(one["steps"]) for one in result["per_replica"]} == {0: True, 1: True}  # type: ignore[attr-defined]
    [(status, said)] = guests.ended()
    assert (status, said.splitlines()[1]) == (0, "joined as replica 1"), said
    assert not (tmp_path / join_server.TICKET).exists()
    watch.rest()
    assert_nothing_is_missing(tmp_path, strategy, result)


def test_a_guest_names_a_strategy_from_outside_the_package_and_a_ticket_imports_nothing(
    tmp_path: Path, watch: jobs.Watch, guests: Guests
) -> None:
    strategy = damped_downpour.DampedDownpour(1, 2)

    def join() -> None:
        guests.join(tmp_path).wait(SECONDS)
        guests.join(tmp_path, "--strategy", "damped_downpour:Bare").wait(SECONDS)
        guests.join(tmp_path, "--strategy", strategy.name)

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            threading.Thread(target=join).start()
        elif worked(record):
            watch.interrupt()

    watch.act = act
    result = jobs.run(tmp_path, strategy, PLAIN, epochs=jobs.MANY)
    assert {one["id"]: bool(one["steps"]) for one in result["per_replica"]} == {0: True, 1: True}  # type: ignore[attr-defined]
    [(refused, why), (bare, _), (status, said)] = guests.ended()
    assert (refused != 0, bare != 0, status) == (True, True, 0), said
    assert f"join with --strategy {strategy.name}" in " ".join(why.split())


@pytest.mark.parametrize(
    ("strategy", "named", "says"),
    [
        ("downpour", "", ""),
        ("mine:Own", "mine:Own", ""),
        ("downpour", "mine:Own", "it trains with strategy downpour, not mine:Own: leave --strategy off"),
        ("mine:Own", "", "imported only where you name it: join with --strategy mine:Own"),
        ("mine:Own", "theirs:Own", "imported only where you name it: join with --strategy mine:Own"),
    ],
)
def test_a_guest_names_the_jobs_strategy_where_it_is_of_nobody_here(strategy: str, named: str, says: str) -> None:
    assert says in join_server.wrong_strategy(strategy, named)
    assert bool(says) == bool(join_server.wrong_strategy(strategy, named))


@pytest.mark.parametrize("how", ["leave", "Ctrl-C"])
def test_a_guest_leaves_and_what_it_had_not_begun_is_dealt_to_others(
    tmp_path: Path, watch: jobs.Watch, guests: Guests, how: str
) -> None:
    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif worked(record) and not asked:
            asked.append(record)
            if how == "leave":
                left = subprocess.run(
                    [sys.executable, "-m", "distbelief", "leave", str(tmp_path / join_server.TICKET)],
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
                assert left.stdout == "asked 1 replica to leave\n", left
            else:
                guests.started[0].send_signal(signal.SIGINT)
        elif isinstance(record, records.Gone):
            watch.interrupt()

    asked: list[Record] = []
    watch.act = act
    result = jobs.run(tmp_path, Downpour(1, 2), PLAIN, epochs=jobs.MANY)
    assert next((gone.role, gone.died) for gone in watch.of(records.Gone)) == ("replica 1", False)
    watch.rest()
    assert_nothing_is_missing(tmp_path, Downpour(1, 2), result)
    [(status, said)] = guests.ended()
    assert status == 0
    assert "leaving, once what has begun is applied" in said


@pytest.mark.parametrize("how", ["leaves", "is killed", "stays"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_guest_adds_up_its_gradients_with_the_others(
    tmp_path: Path, watch: jobs.Watch, guests: Guests, replicas: int, how: str
) -> None:
    """In a new group, which has what the others hold; and the others go on without it, where it goes."""
    strategy, own = Allreduce(replicas=replicas, optimizer=optim("momentum", lr=0.05)), f"replica {replicas}"

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif isinstance(record, records.Stepped) and record.role == own and record.steps and not stepped:
            stepped.append(record)
            if how == "stays":
                watch.interrupt()
            elif how == "leaves":
                guests.started[0].send_signal(signal.SIGINT)
            else:
                guests.started[0].kill()  # its replica ends with it
        elif isinstance(record, records.Gone) and record.role == own:
            gone.append(record.died)
        elif isinstance(record, records.Stepped) and gone:
            watch.interrupt()

    stepped, gone = list[Record](), list[bool]()
    watch.act = act
    result = jobs.run(tmp_path, strategy, TLS, epochs=jobs.MANY)
    assert (result["outcome"], result["carrier"]) == ("interrupted", "tls")
    assert gone[:1] == {"leaves": [False], "is killed": [True], "stays": gone[:1]}[how]
    assert {one["id"]: bool(one["steps"]) for one in result["per_replica"]} == dict.fromkeys(range(replicas + 1), True)  # type: ignore[attr-defined]  # a list
    [(status, said)] = guests.ended()
    assert status == (-signal.SIGKILL if how == "is killed" else 0), said
    watch.rest()
    assert_nothing_is_missing(tmp_path, strategy, result)


def test_a_guest_is_given_no_longer_than_it_has(tmp_path: Path, watch: jobs.Watch, guests: Guests) -> None:
    """What it had begun is dealt to others."""

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path, "--leave-within", "1e-6")
        elif worked(record) and not asked:
            asked.append(record)
            guests.started[0].send_signal(signal.SIGTERM)
        elif isinstance(record, records.Gone):
            watch.interrupt()

    asked: list[Record] = []
    watch.act = act
    result = jobs.run(tmp_path, Downpour(1, 2), PLAIN, epochs=jobs.MANY)
    assert result["outcome"] == "interrupted"
    [(status, said)] = guests.ended()
    assert (status, "what was begun took longer than --leave-within" in said) == (130, True), said


def test_a_guest_that_is_killed_is_a_death_like_any_other(tmp_path: Path, watch: jobs.Watch, guests: Guests) -> None:
    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif worked(record):
            guests.started[0].kill()  # its replica ends with it
        elif isinstance(record, records.Gone):
            watch.interrupt()

    watch.act = act
    assert jobs.run(tmp_path, Downpour(1, 2), PLAIN, epochs=jobs.MANY)["outcome"] == "interrupted"
    assert next((gone.role, gone.died) for gone in watch.of(records.Gone)) == ("replica 1", True)


def test_a_guests_replica_that_is_killed_has_a_next_life(tmp_path: Path, watch: jobs.Watch, guests: Guests) -> None:
    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif worked(record) and not killed:
            [child] = [
                pid
                for pid, title in jobs.descendants(guests.started[0].pid).items()
                if title.endswith("distbelief: replica 1")
            ]
            killed.append(child)
            os.kill(child, signal.SIGKILL)
        elif isinstance(record, records.Joined) and record.role == "replica 1" and killed:
            watch.interrupt()

    killed: list[int] = []
    watch.act = act
    assert jobs.run(tmp_path, Downpour(1, 2), PLAIN, epochs=jobs.MANY)["outcome"] == "interrupted"
    [(status, said)] = guests.ended()
    assert status == 0
    assert "replica 1 died; another takes its place\njoined as replica 1\n" in said


def test_a_script_is_run_by_guests_too(tmp_path: Path, watch: jobs.Watch, guests: Guests) -> None:
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    run = tmp_path / "run"

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(run)
            guests.join(run, str(script))
        elif worked(record):
            watch.interrupt()

    watch.act = act
    PLAIN.launch(jobs.job(run, Downpour(1, 1), epochs=jobs.MANY), [str(script)])
    (refused, said), (status, _) = guests.ended()
    assert (refused, status) == (1, 0)
    assert "every replica runs a script, loop.py: name your copy of it" in said


SCRIPT = """
import torch, distbelief as db
replica = db.join()
model = torch.nn.Linear(4, 2)
optimizer = replica.optimizer(model)
data = [(torch.randn(4), 0) for _ in range(64)]
for x, y in replica.batches(data):
    optimizer.zero_grad(); torch.nn.functional.cross_entropy(model(x), y).backward(); optimizer.step()
"""


def test_the_status_of_a_job_knows_of_its_guests(tmp_path: Path, watch: jobs.Watch, guests: Guests) -> None:
    def ask() -> None:
        found.append(status.status(tmp_path))
        watch.interrupt()

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif worked(record) and not asker.ident:
            asker.start()

    found: list[dict[str, Any]] = []
    asker = threading.Thread(target=ask)
    watch.act = act
    jobs.run(tmp_path, Downpour(1, 2), PLAIN, epochs=jobs.MANY)
    asker.join()
    [guest] = [one for one in found[0]["members"] if one["state"] == "elsewhere"]
    assert (guest["role"], guest["pid"]) == ("replica 1", None)
    assert guest["clock"] > 0
    assert guest["rate"] > 0
    assert any(line.startswith("replica 1  ") and "elsewhere" in line for line in status.lines(found[0]))


def test_who_has_no_ticket_or_another_is_turned_away_and_garbage_costs_nothing(
    tmp_path: Path, watch: jobs.Watch, guests: Guests
) -> None:
    def stranger() -> None:
        ticket = join_server.read_ticket(str(tmp_path / join_server.TICKET))
        other = join_server.JoinRequest("another job", ticket.secret)
        assert join_server.ask(ticket, other) == join_server.JoinRefusal("the ticket is of another job")
        assert join_server.ask(ticket, join_server.JoinRequest(ticket.job, "a guess")) == join_server.JoinRefusal(
            "the ticket is of another job"
        )
        for garbage in (b"", b"\0", b"\xff" * 100, b"\x04\0\0\0\xff\xff\xff\xff", b"\0\0\1\0" + bytes(200)):
            with socket.create_connection((ticket.host, ticket.port)) as link:
                link.sendall(garbage)
        silent.extend(socket.create_connection((ticket.host, ticket.port)) for _ in range(8))
        guests.join(tmp_path)

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            threading.Thread(target=stranger).start()
        elif isinstance(record, records.Joined) and record.role == "replica 1":
            watch.interrupt()

    silent: list[socket.socket] = []
    watch.act = act
    assert jobs.run(tmp_path, Downpour(1, 2), PLAIN, epochs=jobs.MANY)["outcome"] == "interrupted"
    for link in silent:
        link.close()


def test_a_ticket_that_is_none_or_of_a_job_that_is_over_says_so(tmp_path: Path) -> None:
    (tmp_path / "ticket.json").write_text(json.dumps({"job": 3}))
    for path, says in ((tmp_path / "nowhere", "no ticket can be read"), (tmp_path / "ticket.json", "is no ticket")):
        with pytest.raises(join_server.UsageError, match=says):
            join_server.read_ticket(str(path))
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    began = monotonic()
    with pytest.raises(JobFailed, match=f"the job at 127.0.0.1:{port} does not answer"):
        join_server.ask(join_server.Ticket("job", "127.0.0.1", port, "", None), join_server.JoinRequest("job", ""))
    assert monotonic() - began < SECONDS


def test_only_the_same_user_has_a_guest_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, own = tmp_path / join_server.TICKET, os.getuid()
    ticket = join_server.Ticket(f"job of {os.getpid()}", "", 1, "", None)
    path.write_bytes(msgspec.json.encode(ticket))
    listener = guest._open_leave_listener(ticket)
    assert listener
    with listener:
        assert (guest.leave(str(path)), guest._is_ours(listener)) == (1, True)
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        assert (guest.leave(str(path)), guest._is_ours(listener)) == (0, False)


def test_a_guest_of_another_version_is_told_so(
    tmp_path: Path, watch: jobs.Watch, guests: Guests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
            ended.start()

    def end() -> None:
        guests.started[0].wait(SECONDS)
        watch.interrupt()

    ended = threading.Thread(target=end)
    monkeypatch.setattr(join_server, "VERSION", "9.9")
    watch.act = act
    jobs.run(tmp_path, Downpour(1, 2), PLAIN, epochs=jobs.MANY)
    ended.join()
    [(status, said)] = guests.ended()
    assert status == 1
    assert "it runs distbelief 9.9, this is 0.1.0: install the same everywhere" in said


def test_a_guest_stays_when_the_coordinator_dies_and_comes_again(
    tmp_path: Path, watch: jobs.Watch, guests: Guests
) -> None:
    killed: list[int] = []

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif worked(record) and not killed:
            killed.append(jobs.kill("coordinator"))
        elif worked(record) and any("by its journal" in note.text for note in watch.of(records.Note)):
            watch.interrupt()

    watch.act = act
    assert jobs.run(tmp_path, Downpour(1, 2), TLS, epochs=jobs.MANY)["outcome"] == "interrupted"
    [(status, said)] = guests.ended()
    assert status == 0, said
    assert said.count("joined as replica 1\n") == 1, said


LIGHT = """
import multiprocessing.forkserver, sys
from distbelief.cli.main import run
status = run(sys.argv[1:])
sys.exit(99 if "torch" in sys.modules or multiprocessing.forkserver._forkserver._forkserver_pid else status)
"""
REFUSED = join_server.JoinRefusal("the job is ending")


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({}, 1, "the job is ending"),
        ({"secret": "another"}, 1, "the ticket is of another job"),
        ({"port": 1}, 1, "does not answer"),
        ({"host": "no-such-host.invalid"}, 1, "does not answer"),
        ({"port": "x"}, 2, "is no ticket"),
        (None, 2, "no ticket can be read"),
    ],
)
def test_who_is_refused_has_not_waited_for_torch(
    tmp_path: Path, change: dict[str, Any] | None, status: int, said: str
) -> None:
    opened = join_server.JoinServer("job", ("127.0.0.1", 0), "127.0.0.1", None, lambda _: REFUSED, tmp_path)
    try:
        ticket = tmp_path / "mine.json"
        if change is not None:
            ticket.write_text(json.dumps({**json.loads(opened.path.read_text()), **change}))
        command = [sys.executable, "-c", LIGHT, "join", str(ticket)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    finally:
        opened.close()
    assert (ended.returncode, said in ended.stderr) == (status, True), ended.stderr
