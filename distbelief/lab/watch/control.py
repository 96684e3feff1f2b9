"""Buttons of a page: they stop a job that runs on this machine, or kill one of its replicas."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from distbelief.core import roles
from distbelief.errors import UsageError
from distbelief.places.status import status, supervisor


def press(run: Path, name: str, role: str) -> str:
    """Do what a button says with the job in a run folder; return a sentence about it.

    Raises:
        UsageError: no job of this user runs here in the folder, or its role is on another machine.
    """
    above, job = supervisor(run), status(run)
    if name == "stop":
        if job.get("interrupted"):  # a second signal would end the job without its checkpoint
            return "The job is ending already"
        os.kill(above, signal.SIGTERM)  # a job in the background ignores what Ctrl-C sends
        return "The job ends, and keeps a checkpoint"
    pids = [one["pid"] for one in job.get("members", ()) if one["role"] == role and one["pid"]]
    if name != "kill" or not pids or not roles.is_replica(role):
        raise UsageError(f"{name} {role!r}: no button does that")
    kept = os.pidfd_open(pids[0])  # another process may get the number of one that ends
    try:
        if not _plays(pids[0], role, above):
            raise UsageError(f"process {pids[0]} is not {role} of this job; is it on another machine?")
        signal.pidfd_send_signal(kept, signal.SIGKILL)
    finally:
        os.close(kept)
    return f"{role} was killed; with --restarts it comes back"


def _plays(pid: int, role: str, above: int) -> bool:
    """Return whether a process of this machine plays a role of the job with this supervisor."""
    if Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ") != roles.title_of(role).encode():
        return False
    while pid > 1 and pid != above:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == above
