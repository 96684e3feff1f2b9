"""State of a running job: its members, the progress of each, and what each waits for, for how long and why."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec

from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.errors import JobFailed, UsageError
from distbelief.places.messages import Standing
from distbelief.record.diagnosis import Diagnosis, Level, diagnose
from distbelief.record.folder import RunFolder
from distbelief.record.live import told_of
from distbelief.record.summary import Summary, in_words
from distbelief.record.timeline import Timeline
from distbelief.transport.secure import check_user

ANSWER_SECONDS = 0.5
"""Limit in seconds for a process's answer; a process that computes for longer does not answer."""
ASK_SECONDS = 5.0
"""Limit in seconds for the answer of a job's supervisor."""
CLIENTS = 8
"""Most clients that may wait for an answer, or read one, at the same time; more are turned away."""
READING_SECONDS = 0.02
"""Seconds between two attempts to send more to a client that reads slowly."""
ANSWER_LIMIT = 16 << 20
"""Longest answer in bytes."""


def _address(run: str | Path) -> str:
    return "\0distbelief-status-" + blake2b(os.fsencode(os.path.realpath(run)), digest_size=16).hexdigest()


class StatusServer:
    """Server of a supervisor, which answers clients with the job's state.

    It answers once every process has reported its state, or after a time limit.

    Args:
        run: the run folder; without one there is no server.
        ask: asks every process, and returns how many it asked.
        answer: returns the job's state, given the answers.
    """

    def __init__(self, run: Path | None, ask: Callable[[], int], answer: Callable[[Iterable[Standing]], Json]) -> None:
        self._ask, self._answer = ask, answer
        self._clients: list[socket.socket] = []
        self._said: dict[str, Standing] = {}
        self._asked, self._deadline = 0, 0.0
        self._readers: list[tuple[socket.socket, memoryview, float]] = []
        """Clients that have not read all of their answer yet, each with the rest of it and its deadline."""
        self.listener: socket.socket | None = None
        if run is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(_address(run))
                listener.listen(CLIENTS)
            except OSError:  # another job in the same folder holds the name
                listener.close()
                return
            listener.setblocking(False)
            self.listener = listener

    def serve(self, ready: bool) -> None:
        """Accept a client if the listener is ready, and answer the clients whose answer is due."""
        if ready and self.listener is not None:
            with contextlib.suppress(OSError):
                client, _ = self.listener.accept()
                self._admit(client)
        if self._clients and (len(self._said) >= self._asked or time.monotonic() > self._deadline):
            data = memoryview(json.dumps(self._answer(self._said.values())).encode())
            until = time.monotonic() + ANSWER_SECONDS
            self._readers += [(client, data, until) for client in self._clients]
            self._clients.clear()
        self._readers = [reader for reader in map(_told, self._readers) if reader]

    def _admit(self, client: socket.socket) -> None:
        try:
            check_user(client)
        except OSError:
            client.close()
            return
        if len(self._clients) + len(self._readers) >= CLIENTS:
            client.close()
            return
        client.setblocking(False)
        if not self._clients:
            self._said.clear()
            self._asked, self._deadline = self._ask(), time.monotonic() + ANSWER_SECONDS
        self._clients.append(client)

    def take(self, standing: Standing) -> None:
        """Store the state that a process reports."""
        self._said[standing.role] = standing

    @property
    def due(self) -> float:
        """Most seconds until a client must be answered; infinite if none waits."""
        reading = READING_SECONDS if self._readers else float("inf")
        return min(reading, max(0.0, self._deadline - time.monotonic()) if self._clients else float("inf"))

    def close(self) -> None:
        """Close all connections, and the listener."""
        for client in [*self._clients, *(client for client, _, _ in self._readers)]:
            client.close()
        if self.listener is not None:
            self.listener.close()


def _told(reader: tuple[socket.socket, memoryview, float]) -> tuple[socket.socket, memoryview, float] | None:
    """Send a client as much of its answer as it can take; return None once it has all, or its time is up."""
    client, rest, until = reader
    try:
        rest = rest[client.send(rest) :]
    except BlockingIOError:
        if time.monotonic() < until:
            return reader
        rest = rest[:0]
    except OSError:
        rest = rest[:0]
    if rest:
        return client, rest, until
    client.close()
    return None


def state(
    children: Iterable[tuple[str, int, int]],
    standings: Iterable[Standing],
    summary: Summary,
    timeline: Timeline | None = None,
    interrupted: bool = False,
) -> Json:
    """Return the state of a job.

    Args:
        children: the role, process id and incarnation of every process.
        standings: the states that they reported.
        summary: the summary of the job so far.
        timeline: the timeline of the job so far.
        interrupted: the job was told to end by a signal.
    """
    by_role = {standing.role: standing for standing in standings}
    known: dict[str, Json] = {}
    for standing in by_role.values():  # facts about the replicas that only servers know
        for role, facts in standing.facts.get("of", {}).items():
            for name, value in facts.items():
                if name == "waits_for":
                    known.setdefault(role, {}).setdefault("held_by", []).append(f"{standing.role}: {value}")
                elif value is not None:
                    known.setdefault(role, {})[name] = max(value, known.get(role, {}).get(name, value))
    here = {role for role, _, _ in children}
    # replicas on other machines: the coordinator deals to them, and no process here plays them
    guests = [(role, None, 0) for role, facts in known.items() if "minibatches" in facts and role not in here]
    members = []
    for role, pid, incarnation in [*children, *guests]:
        reply = by_role.get(role)
        state = "elsewhere" if pid is None else "busy" if reply is None else reply.state
        member: Json = {
            "role": role,
            "pid": pid,
            "incarnation": incarnation,
            "state": state,
            "waits_for": reply.waits_for if reply else "",
            "waited_seconds": reply.waited if reply else None,
        }
        member |= dict.fromkeys(("clock", "version", "staleness", "rate", "participation", "minibatches"))
        member |= {name: value for name, value in (reply.facts if reply else {}).items() if name != "of"}
        member |= known.get(role, {})
        if roles.is_replica(role) and (done := summary.replicas.get(roles.index_of(role))) and summary.seconds:
            member["rate"] = done.steps / summary.seconds
            member["participation"] = summary.participation(roles.index_of(role))
        members.append(member)
    started = summary.started  # the number of evaluations in an iteration is not known
    whole = (started.samples_per_epoch * started.epochs or None) if started and started.unit == "epoch" else None
    return {
        "running": True,
        "interrupted": interrupted,
        "samples": summary.samples,
        "of_samples": whole,
        "seconds": summary.seconds,
        "rate": summary.rate,
        "bytes": summary.bytes,
        "wrong": _wrong(diagnose(summary, timeline)),
        "members": members,
    }


def status(run: str | Path) -> Json:
    """Return the state of the job in a run folder; if it has ended, its outcome.

    Raises:
        UsageError: there is no run folder.
        JobFailed: its supervisor does not answer.
    """
    folder = RunFolder.open(run)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ASK_SECONDS)
        try:
            connection.connect(_address(run))
            check_user(connection)
            data = b""
            while chunk := connection.recv(1 << 16):
                data += chunk
                if len(data) > ANSWER_LIMIT:
                    raise JobFailed(f"the job in {run} answers with more than {ANSWER_LIMIT} bytes")
            if not data:
                raise ConnectionError("it ended the connection")
            return {"run": str(run), **json.loads(data)}
        except (ConnectionRefusedError, FileNotFoundError):
            return _ended(folder)
        except PermissionError as error:
            raise JobFailed(f"the job in {run} does not answer: {error}") from None
        except (OSError, ValueError) as error:  # one is that as many as it lets wait have given up waiting
            raise JobFailed(f"the job in {run} does not answer ({error}); it may just have ended: ask again") from error


def supervisor(run: str | Path) -> int:
    """Return the id of the supervisor's process, of a job of this user that runs on this machine.

    Raises:
        UsageError: there is none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ASK_SECONDS)
        try:
            connection.connect(_address(run))
            return check_user(connection)
        except OSError as error:
            raise UsageError(f"no job of yours runs in {run} on this machine: {error}") from error


def _ended(folder: RunFolder) -> Json:
    """Return the state of a job whose supervisor does not listen."""
    if folder.locked:
        reason = "it cannot be asked: it is a simulation, or a job that is just beginning or ending"
        return {
            "run": str(folder.path),
            "running": True,
            "outcome": None,
            "reason": reason,
            "samples": None,
            "seconds": None,
            "members": [],
        }
    result: Json = {"outcome": "unknown"}
    diagnoses: list[Diagnosis] = []
    try:
        read = msgspec.json.decode(folder.result.read_bytes(), type=Json)
        result, diagnoses = read, msgspec.convert(read.get("diagnosis", []), list[Diagnosis])
    except OSError:
        result["reason"] = "it is not running and has left no result: it was killed, or the disk was full"
    except (ValueError, RecursionError) as error:
        result["reason"] = f"{folder.result} is corrupt ({error}): see {folder.metrics.name} for what it did"
    return {
        "run": str(folder.path),
        "running": False,
        **{name: result.get(name) for name in ("outcome", "cause", "reason", "samples", "seconds")},
        "wrong": _wrong(diagnoses),
    }


def _wrong(diagnoses: Iterable[Diagnosis]) -> list[Json]:
    return [msgspec.to_builtins(each) for each in diagnoses if each.level is Level.WRONG]


def lines(answer: Json) -> list[str]:
    """Return a state as lines of text.

    >>> lines({"run": "runs/x", "running": False, "outcome": "done", "reason": "all epochs are done"})
    ['runs/x: not running; done: all epochs are done']
    """
    wrong = [f"wrong: {told_of(each)}" for each in answer.get("wrong", [])]
    if not answer["running"]:
        return [f"{answer['run']}: not running; {answer['outcome']}: {answer['reason']}", *wrong]
    if not answer["members"]:
        return [f"{answer['run']}: running; {answer['reason']}"]
    whole = f"/{answer['of_samples']:,}" if answer["of_samples"] else ""
    moved = in_words(answer["bytes"])
    head = [
        f"{answer['run']}: running; {answer['samples']:,}{whole} samples, {answer['rate']:,.0f} samples/s"
        f"{moved and f', {moved}'}",
        *wrong,
    ]
    rows = [["", "state", "clock", "version", "staleness", "steps/s", "share", "to do", "waits for"]]
    for member in answer["members"]:
        since = (
            f" (for {member['waited_seconds']:.1f} s)"
            if member["waited_seconds"] is not None and member["waits_for"]
            else ""
        )
        why = "; ".join(filter(None, [member["waits_for"] + since, *member.get("held_by", ())]))
        numbers = [
            _shown(member[name]) for name in ("clock", "version", "staleness", "rate", "participation", "minibatches")
        ]
        rows.append(
            [
                f"{member['role']} (pid {member['pid']})" if member["pid"] else member["role"],
                member["state"],
                *numbers,
                why,
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return head + [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
