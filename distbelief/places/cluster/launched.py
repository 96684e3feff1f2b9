"""Launchers that start a command several times (srun, torchrun, mpirun), and the place of this process among them."""

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

from distbelief.core.records import Json, Outcome
from distbelief.errors import UsageError
from distbelief.places.signals import stat_of


class _Variables(NamedTuple):
    """Environment variables of a launcher."""

    size: str
    rank: str
    local_rank: str
    names: tuple[str, ...]
    """Variables that have the same values in all processes of one start, and in no other; the first is always set."""
    own: tuple[str, ...]
    """Prefixes of the variables that are hidden from a job's roles, which are other processes."""


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
"""Variables by launcher, the innermost first: Slurm's srun starts torchrun and mpirun, and their processes see both."""
RESTARTS = {"torchrun": "TORCHELASTIC_RESTART_COUNT"}
"""Launchers that restart all processes when one has failed, and the variable that counts the restarts."""
UNFINISHED = (None, Outcome.INTERRUPTED, Outcome.FAILED)
"""Outcomes of runs that a restart resumes; None is for killed runs."""
UNKNOWN = "PMI_SIZE"
"""Variable of MPICH and similar launchers, by which processes cannot distinguish one start from another."""


class Launched(msgspec.Struct, frozen=True):
    """One of the processes that a launcher has started with one command, or the only agent of its host."""

    launcher: str = ""
    size: int = 0
    rank: int = 0
    local_rank: int = 0
    """Rank among the processes of its host."""
    name: str = ""
    """Name of the start, which only its processes have, all the same."""
    restarts: int = 0
    """Number of restarts by the launcher after a failure on this host; each host has its own number."""
    cores: int = 0
    """Number of cores that the launcher reports as allotted on this host; 0 if it reports none."""


def launched(environment: Mapping[str, str]) -> Launched | None:
    """Return this process's position among several; None if no launcher has started more than one.

    Raises:
        UsageError: the variables of a launcher contradict each other, or belong to an unsupported launcher.

    >>> one = launched({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"})
    >>> one.launcher, one.rank, one.size
    ('torchrun', 1, 2)
    >>> launched({"WORLD_SIZE": "2", "RANK": "1"})  # other programs use these names too
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
    """Return the position of this process among a launcher's; None if no launcher has started several."""
    return launched(os.environ)


def forget(environment: MutableMapping[str, str]) -> None:
    """Remove the launcher's variables of this process: the roles of a job are other processes."""
    start = launched(environment)
    if start is not None:
        for name in [name for name in environment if name.startswith(LAUNCHERS[start.launcher].own)]:
            del environment[name]


def hostname() -> str:
    """Return the name of this host, as Slurm knows it where it is set."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def parent_process() -> str:
    """Return a name of the parent process, the same as long as that runs; "" if it is out of sight."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.getppid()} {stat_of(os.getppid())[19]}"
    except OSError:
        return ""


def told_of(start: Launched) -> Json:
    """Return the record of a start in its run folder, by which a restart of the launcher finds that folder.

    Each command is distinguished, since a launcher may have started a script with several commands.
    """
    command = hashlib.sha256(shlex.join(sys.orig_argv[1:]).encode()).hexdigest()[:16]
    return {"launcher": start.launcher, "name": start.name, "command": command, "by": parent_process()}


def run_before(start: Launched, out: str | None, restarts: int) -> Path | None:
    """Return the run folder of the previous start, if the launcher has restarted all of it; None if it has not.

    torchrun counts on each host the failures there. It does not count hosts that come or go. In that case, this process
    still has the same parent process of the launcher. Of several hosts' counts, `restarts` is the largest.
    """
    now = told_of(start)
    for run in ([Path(out)] if out else Path("runs").glob("*")) if start.launcher in RESTARTS else ():
        before = _read(run / "job.json").get("start", {})
        again = restarts or (now["by"] and now["by"] == before.get("by"))
        if again and {**before, "by": now["by"]} == now and _read(run / "result.json").get("outcome") in UNFINISHED:
            return run
    return None


def _read(path: Path) -> Json:
    """Return the contents of a file in a run folder; empty if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Json)
    except (OSError, ValueError):
        return {}
