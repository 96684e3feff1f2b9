"""Tickets: by what the processes of one start find the first of them, and how each engine hands them out."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import stat
import sys
from pathlib import Path
from typing import Protocol

import msgspec

from distbelief.core.outcomes import Outcome
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.places.cluster.launched import RESTARTS, Launched, parent_process
from distbelief.places.join.ticket import LIMIT, Ticket
from distbelief.record.folder import OWNER_ALONE, written_whole

UNFINISHED = (None, Outcome.INTERRUPTED, Outcome.FAILED)
"""Outcomes of runs that are gone on with; the first is of those that were killed."""


class Invitation(Protocol):
    """Invitation by which the other processes of a job get their ticket."""

    ranks: range
    """Theirs."""
    here: Launched | None
    """The first one, where it offers slots itself."""

    def send(self, ticket: Ticket) -> None:
        """Hand it out.

        Raises:
            UsageError: it cannot be.
        """
        ...

    def check(self) -> None:
        """Raise, where some of them will never come, a JobFailed."""
        ...

    def withdraw(self) -> None:
        """All have come, or nobody is waited for any more."""
        ...

    def close(self) -> None:
        """The job is over."""
        ...

    def late(self, missing: list[int]) -> str:
        """Return what to say, with what to do, when some ranks have not come."""
        ...


class TicketFile:
    """A ticket for processes that a launcher has started: a file in a folder that all hosts share.

    Args:
        start: the first of them.
        folder: "" for the working directory.
    """

    def __init__(self, start: Launched, folder: str) -> None:
        self.here: Launched | None = start
        self.ranks = range(1, start.size)
        self.path, self._start = ticket_path(start, folder), start
        self._sent: bytes | None = None

    def send(self, ticket: Ticket) -> None:
        """Write it for its owner only."""
        self._sent = ticket.text
        _write(self.path, self._sent)

    def check(self) -> None:
        """Whoever has not come may still come."""

    def withdraw(self) -> None:
        """Remove it, unless by now the launcher has started all again, and it is another's."""
        with contextlib.suppress(OSError):
            if self.path.read_bytes() == self._sent:
                self.path.unlink()

    def close(self) -> None:
        """Nothing is left to do."""

    def late(self, missing: list[int]) -> str:
        """Return whom the launcher has started, and who has not come."""
        more = ", ..." if len(missing) > 8 else ""
        return (
            f"{len(missing)} of the {self._start.size} processes that {self._start.launcher} has started have not "
            f"come, by rank {', '.join(map(str, missing[:8]))}{more}: is {self.path.parent} a folder that all hosts "
            "share (name one with --tickets), and can they reach this host?"
        )


def ticket_path(start: Launched, folder: str) -> Path:
    """The ticket of a start."""
    return Path(folder or ".").absolute() / f".distbelief-{start.launcher}-{start.name}.ticket"


def told_of(start: Launched) -> Json:
    """Return what a run folder keeps of its start, by which the next finds it after a launcher's restart.

    Each command is by itself: what a launcher has started may be a script with several, one after another.
    """
    command = hashlib.sha256(shlex.join(sys.orig_argv[1:]).encode()).hexdigest()[:16]
    return {"launcher": start.launcher, "name": start.name, "command": command, "by": parent_process()}


def run_before(start: Launched, out: str | None, restarts: int) -> Path | None:
    """The run folder of the start before, where the launcher has started all of it again; None where it has not.

    torchrun counts on each host how often something failed there, and nowhere that a host has come or gone: for that,
    it is the same process of the launcher's that has started this one.

    Args:
        start: the first process.
        out: the folder that its command names.
        restarts: the most that the launcher counts on any host.
    """
    now = told_of(start)
    for run in ([Path(out)] if out else Path("runs").glob("*")) if start.launcher in RESTARTS else ():
        before = _read(run / "job.json").get("start", {})
        again = restarts or (now["by"] and now["by"] == before.get("by"))
        if again and {**before, "by": now["by"]} == now and _read(run / "result.json").get("outcome") in UNFINISHED:
            return run
    return None


def _read(path: Path) -> Json:
    """Return what a file of a run folder says; nothing where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Json)
    except (OSError, ValueError):
        return {}


def _write(path: Path, text: bytes) -> None:
    """Write a ticket that only its owner can read.

    Raises:
        UsageError: the folder keeps none.
    """
    try:
        with written_whole(path, OWNER_ALONE) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise UsageError(
                    f"{path.parent} keeps no file for its owner alone, and a ticket must be one: name another folder "
                    "that all hosts share, with --tickets"
                )
            file.write(text)
    except OSError as error:
        raise UsageError(
            f"no ticket can be written to {path.parent}: {error.strerror}; name a folder that all hosts share, with "
            "--tickets"
        ) from error


def read_ticket_file(path: Path) -> Ticket | None:
    """A ticket; None where there is none (yet).

    Raises:
        UsageError: others could have read or written it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UsageError(
                    f"{path} is of user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}; a ticket is of user "
                    f"{os.getuid()} alone (600): remove it, and name another shared folder with --tickets"
                )
            return msgspec.json.decode(file.read(LIMIT), type=Ticket)
    except (OSError, msgspec.MsgspecError):
        return None
