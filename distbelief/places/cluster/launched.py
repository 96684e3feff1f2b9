"""Launchers that start a command several times (srun, torchrun, mpirun): which of those processes this one is."""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from distbelief.core.outcomes import Outcome
from distbelief.core.records import Json
from distbelief.errors import UsageError


class _Variables(NamedTuple):
    """Variables of a launcher, and those that are nobody's but the launcher's."""

    size: str
    rank: str
    local_rank: str
    names: tuple[str, ...]
    """Those that are the same in all processes of one start, and in no other's; the first is always there."""
    own: tuple[str, ...]
    """Beginnings of the names that the roles of a job are not to see: they are other processes."""


LAUNCHERS = {
    "torchrun": _Variables(
        "WORLD_SIZE", "RANK", "LOCAL_RANK", ("TORCHELASTIC_RUN_ID",),
        (
            *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ),
    ),
    "mpirun": _Variables(
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_MCA_orte_hnp_uri",),
        ("OMPI_", "PMIX_"),
    ),
    "srun": _Variables(
        "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_", "PMI_", "PMIX_"),
    ),
}  # fmt: skip
"""The innermost first: torchrun and mpirun are started by srun where there is Slurm, and what they start sees both."""
RESTARTS = {"torchrun": "TORCHELASTIC_RESTART_COUNT"}
"""The launchers that start all again when one has failed, and the variable by which they say how often."""
UNFINISHED = (None, Outcome.INTERRUPTED, Outcome.FAILED)
"""Outcomes of runs that are gone on with; the first is of those that were killed."""
UNKNOWN = "PMI_SIZE"
"""Variable of MPICH and its kin, whose processes cannot tell one start from another by it."""


class Launched(msgspec.Struct, frozen=True):
    """One of the processes that a launcher has started with one command."""

    launcher: str
    size: int
    rank: int
    local_rank: int
    """Among those of its host."""
    name: str
    """Name of the start: all of its processes have the same, and those of no other."""
    restarts: int = 0
    """Restarts of this process by the launcher since one of its host failed: another number on each host."""
    cores: int = 0
    """Processors that it says are allotted on this host; 0 where it says nothing of that."""


def launched(environment: Mapping[str, str]) -> Launched | None:
    """Return which of several processes this one is; None where no launcher has started more than one.

    Raises:
        UsageError: the variables of a launcher contradict each other, or are one's that is not known.

    >>> one = launched({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"})
    >>> one.launcher, one.rank, one.size
    ('torchrun', 1, 2)
    >>> launched({"WORLD_SIZE": "2", "RANK": "1"})  # names that others use too
    """
    for launcher, known in LAUNCHERS.items():
        size = environment.get(known.size, "")
        if not size.isdecimal() or int(size) < 2 or known.names[0] not in environment:
            continue
        rank, local = (environment.get(name, "") for name in (known.rank, known.local_rank))
        if not rank.isdecimal() or int(rank) >= int(size):
            raise UsageError(
                f"{launcher} says that there are {size} processes ({known.size}), and that this is number {rank!r} "
                f"({known.rank}): start the command with {launcher}, or with both variables unset"
            )
        job = " ".join(environment.get(name, "") for name in known.names)
        cores = environment.get("SLURM_CPUS_ON_NODE", "") if launcher == "srun" else ""
        restarts = environment.get(RESTARTS.get(launcher, ""), "")
        here = int(local if local.isdecimal() else rank)
        start = hashlib.sha256(job.encode()).hexdigest()[:16]
        return Launched(launcher, int(size), int(rank), here, start, int(restarts or 0), int(cores or 0))
    if (size := environment.get(UNKNOWN, "")).isdecimal() and int(size) > 1:
        raise UsageError(
            f"mpiexec has started this command {size} times ({UNKNOWN}), and each would be a job of its own: use Open "
            "MPI's mpirun, or start it once, and name the hosts with --hosts"
        )
    return None


def own() -> Launched | None:
    """Return which of several processes this one is."""
    return launched(os.environ)


def forget(environment: MutableMapping[str, str]) -> None:
    """Take away what a launcher says of the process that it has started: the roles of a job are others."""
    start = launched(environment)
    if start is not None:
        for name in [name for name in environment if name.startswith(LAUNCHERS[start.launcher].own)]:
            del environment[name]


def hostname() -> str:
    """Return the name of this host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def parent_process() -> str:
    """Name the process that has started this one: the same as long as that runs; "" where it is out of sight."""
    try:
        with open(f"/proc/{os.getppid()}/stat") as file, open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.getppid()} {file.read().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""


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
