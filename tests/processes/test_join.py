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
from typing import Any

import damped_downpour
import jobs
import msgspec
import pytest
from patience import SECONDS

from distbelief.cli import main
from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.core.records import Record
from distbelief.places import status
from distbelief.places.join import guest, join_server
from distbelief.places.join import ticket as ticket_file
from distbelief.places.join.ticket import Ticket
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Downpour, Strategy, Synchronous
from distbelief.transport.addresses import cut

PLAIN, TLS = Local(listen="127.0.0.1"), Local(listen="127.0.0.1", tls=True)


class Guests:
    """Commands `distbelief join` that run beside a job."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def join(self, run: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "distbelief", "join", str(run / join_server.TICKET), *more]
        self.started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=jobs.environment(),
                cwd=Path(jobs.__file__).parent,
            )
        )  # fmt: skip
        return self.started[-1]

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


def test_a_guest_does_its_share_outlives_its_replica_and_leaves_when_it_is_asked_to(
    tmp_path: Path, watch: jobs.Watch, guests: Guests
) -> None:
    """What it had begun counts once; who has no ticket is turned away; its status is known; it leaves by Ctrl-C."""

    def strangers() -> None:
        ticket = ticket_file.read_ticket(str(tmp_path / join_server.TICKET))
        for job, secret in (("another job", ticket.secret), (ticket.job, "a guess")):
            answer = join_server.ask(ticket, join_server.JoinRequest(job, secret))
            refused.append(answer == join_server.JoinRefusal("the ticket is of another job"))
        for garbage in (b"", b"\0", b"\xff" * 100, b"\x04\0\0\0\xff\xff\xff\xff", b"\0\0\1\0" + bytes(200)):
            with socket.create_connection(cut(ticket.where[0])) as link:
                link.sendall(garbage)
        silent.extend(socket.create_connection(cut(ticket.where[0])) for _ in range(8))
        guests.join(tmp_path)

    def ask_and_kill() -> None:
        found.append(status.status(tmp_path))
        children = jobs.descendants(guests.started[0].pid)
        [child] = [pid for pid, title in children.items() if title.endswith("distbelief: replica 1")]
        killed.append(child)
        os.kill(child, signal.SIGKILL)

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            threading.Thread(target=strangers).start()
        elif worked(record) and not asker.ident:
            asker.start()
        elif worked(record) and killed and lives() == 2 and not asked:
            asked.append(record)
            guests.started[0].send_signal(signal.SIGINT)
        elif isinstance(record, records.Gone) and asked:
            watch.interrupt()

    def lives() -> int:
        return [one.role for one in watch.of(records.Joined)].count("replica 1")

    refused, silent, killed = list[bool](), list[socket.socket](), list[int]()
    found, asked = list[dict[str, Any]](), list[Record]()
    asker = threading.Thread(target=ask_and_kill)
    watch.act = act
    result = jobs.run(tmp_path, Downpour(1, 2), PLAIN, epochs=jobs.MANY)
    for link in silent:
        link.close()
    assert (result["outcome"], refused, len(silent)) == ("interrupted", [True, True], 8)
    assert {one["id"]: bool(one["steps"]) for one in result["per_replica"]} == {0: True, 1: True}  # type: ignore[attr-defined]
    [guest] = [one for one in found[0]["members"] if one["state"] == "elsewhere"]
    assert (guest["role"], guest["pid"]) == ("replica 1", None)
    assert guest["clock"] > 0
    assert guest["rate"] > 0
    assert any(line.startswith("replica 1  ") and "elsewhere" in line for line in status.lines(found[0]))
    gone = [(one.role, one.died) for one in watch.of(records.Gone)]
    assert gone[:2] == [("replica 1", True), ("replica 1", False)]
    alone = [note.text for note in watch.of(records.Note) if "127.0.0.1, which only this machine reaches" in note.text]
    assert len(alone) == 1, "a ticket for nobody else is warned of"
    watch.rest()
    assert_nothing_is_missing(tmp_path, Downpour(1, 2), result)
    [(ended, said)] = guests.ended()
    assert ended == 0, said
    assert said.splitlines()[1] == "joined as replica 1"
    why = "its process was killed by SIGKILL"
    assert f"replica 1 died: {why}; another takes its place\njoined as replica 1\n" in said
    assert "leaving once its unfinished work is applied" in said


def test_a_guest_stays_when_the_coordinator_dies_and_comes_again(
    tmp_path: Path, watch: jobs.Watch, guests: Guests
) -> None:
    killed: list[int] = []

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif isinstance(record, records.Joined) and record.role == "replica 1":
            assert (tmp_path / join_server.TICKET).stat().st_mode & 0o777 == 0o600
        elif worked(record) and not killed:
            killed.append(jobs.kill("coordinator"))
        elif worked(record) and any("from its journal" in note.text for note in watch.of(records.Note)):
            watch.interrupt()

    watch.act = act
    result = jobs.run(tmp_path, Synchronous(1, 2), TLS, epochs=jobs.MANY)
    assert (result["outcome"], result["carrier"]) == ("interrupted", "tls")
    [(status, said)] = guests.ended()
    assert status == 0, said
    assert said.count("joined as replica 1\n") == 1, said
    assert not (tmp_path / join_server.TICKET).exists()
    watch.rest()
    assert_nothing_is_missing(tmp_path, Synchronous(1, 2), result)


def test_a_guest_names_a_strategy_from_outside_the_package_and_a_ticket_imports_nothing(
    tmp_path: Path, watch: jobs.Watch, guests: Guests
) -> None:
    strategy = damped_downpour.DampedDownpour(1, 2)

    def join() -> None:
        guests.join(tmp_path).wait(SECONDS)
        guests.join(tmp_path, "--strategy", strategy.name)

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            threading.Thread(target=join).start()
        elif worked(record):
            watch.interrupt()

    watch.act = act
    result = jobs.run(tmp_path, strategy, PLAIN, epochs=jobs.MANY)
    assert {one["id"]: bool(one["steps"]) for one in result["per_replica"]} == {0: True, 1: True}  # type: ignore[attr-defined]
    [(refused, why), (status, said)] = guests.ended()
    assert (refused != 0, status) == (True, 0), said
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


@pytest.mark.parametrize(("how", "replicas"), [("leaves", 2), pytest.param("is killed", 1, marks=pytest.mark.long)])
def test_a_guest_adds_up_its_gradients_with_the_others(
    tmp_path: Path, watch: jobs.Watch, guests: Guests, replicas: int, how: str
) -> None:
    """In a new group, which has what the others hold; and the others go on without it, where it goes."""
    strategy, own = Allreduce(replicas=replicas, optimizer=optim("momentum", lr=0.05)), f"replica {replicas}"

    def leave() -> None:
        command = [sys.executable, "-m", "distbelief", "leave", str(tmp_path / join_server.TICKET)]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False).stdout)

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(tmp_path)
        elif isinstance(record, records.Stepped) and record.role == own and record.steps and not stepped:
            stepped.append(record)
            if how == "leaves":
                leaving.start()
            else:
                guests.started[0].kill()  # its replica ends with it
        elif isinstance(record, records.Gone) and record.role == own:
            gone.append(record.died)
        elif isinstance(record, records.Stepped) and gone:
            watch.interrupt()

    stepped, gone, said = list[Record](), list[bool](), list[str]()
    leaving = threading.Thread(target=leave)
    watch.act = act
    result = jobs.run(tmp_path, strategy, TLS, epochs=jobs.MANY)
    assert (result["outcome"], result["carrier"]) == ("interrupted", "tls")
    assert gone[:1] == [how == "is killed"]
    assert {one["id"]: bool(one["steps"]) for one in result["per_replica"]} == dict.fromkeys(range(replicas + 1), True)  # type: ignore[attr-defined]  # a list
    [(status, told)] = guests.ended()
    assert status == (-signal.SIGKILL if how == "is killed" else 0), told
    if how == "leaves":
        leaving.join()
        assert said == ["asked 1 replica to leave\n"]
        watch.rest()
        assert_nothing_is_missing(tmp_path, strategy, result)


def test_a_script_is_run_by_guests_too(tmp_path: Path, watch: jobs.Watch, guests: Guests) -> None:
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    run = tmp_path / "run"

    def act(record: Record) -> None:
        if isinstance(record, records.Started):
            guests.join(run)
            guests.join(run, str(script))
        elif worked(record) and guests.started[0].poll() is not None:  # the other has been refused
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


def test_only_the_same_user_has_a_guest_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, own = tmp_path / join_server.TICKET, os.getuid()
    ticket = Ticket(f"job of {os.getpid()}", [], "", None)
    path.write_bytes(msgspec.json.encode(ticket))
    listener = guest.open_leave_listener(ticket)
    assert listener
    with listener:
        assert (guest.leave(str(path)), guest.is_ours(listener)) == (1, True)
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        assert (guest.leave(str(path)), guest.is_ours(listener)) == (0, False)


LIGHT = """
import multiprocessing.forkserver, sys
from distbelief.cli.main import run
status = run(sys.argv[1:])
sys.exit(99 if "torch" in sys.modules or multiprocessing.forkserver._forkserver._forkserver_pid else status)
"""
REFUSED = join_server.JoinRefusal("the job is ending")


@pytest.fixture
def ticket(tmp_path: Path) -> Iterator[Path]:
    """Of a job that is ending."""
    opened = join_server.JoinServer("job", ("127.0.0.1", 0), "127.0.0.1", None, lambda _: REFUSED, tmp_path)
    yield opened.path
    opened.close()


def test_who_is_refused_has_not_waited_for_torch(ticket: Path) -> None:
    command = [sys.executable, "-c", LIGHT, "join", str(ticket)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode, "the job is ending" in ended.stderr) == (1, True), ended.stderr


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"secret": "another"}, 1, "the ticket is of another job"),
        ({"where": ["127.0.0.1:1"]}, 1, "does not answer"),
        ({"where": ["no-such-host.invalid:1"]}, 1, "does not answer"),
        ({"where": [1]}, 2, "is no ticket"),
        (None, 2, "no ticket can be read"),
    ],
)
def test_what_is_wrong_with_a_ticket_is_told(
    ticket: Path, tmp_path: Path, change: dict[str, Any] | None, status: int, said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    mine = tmp_path / "mine.json"
    if change is not None:
        mine.write_text(json.dumps({**json.loads(ticket.read_text()), **change}))
    assert main.run(["join", str(mine)]) == status
    assert said in capsys.readouterr().err
