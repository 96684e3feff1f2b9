"""Slurm as an engine: an allocation's nodes are the hosts, and each agent is a step of one task."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

from distbelief.errors import UsageError
from distbelief.places.cluster.engines import Engine, agent_command
from distbelief.places.cluster.hosts import Host
from distbelief.places.cluster.remote_agent import RemoteAgent

_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
LIST_SECONDS = 20.0


def is_allocated(environment: Mapping[str, str]) -> bool:
    """Return whether this process is in an allocation of several nodes."""
    return environment.get("SLURM_JOB_NUM_NODES", "1") != "1" and "SLURM_JOB_NODELIST" in environment


def cores_of_nodes(text: str) -> list[int]:
    """Return the number of processors of each node, given `SLURM_JOB_CPUS_PER_NODE`.

    Raises:
        UsageError: the text is malformed.

    >>> cores_of_nodes("4(x2),8")
    [4, 4, 8]
    """
    matches = [_COUNT.fullmatch(word) for word in text.split(",")]
    if not all(matches):
        raise UsageError(f"SLURM_JOB_CPUS_PER_NODE is {text[:80]!r}: are we in an allocation? (salloc, sbatch)")
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]


def allocated_hosts(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the nodes of the allocation, each with its number of allotted processors.

    Raises:
        UsageError: there is no allocation, or Slurm is not installed here.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise UsageError("--on slurm: this is no allocation; get one with salloc -N4, or write a batch script (sbatch)")
    if shutil.which("scontrol") is None or shutil.which("srun") is None:
        raise UsageError(
            "--on slurm: there is no scontrol or srun here; install Slurm's (apt-get install slurm-client)"
        )
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=LIST_SECONDS, check=False
    )
    names, cores = listed.stdout.split(), cores_of_nodes(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if listed.returncode or len(names) != len(cores):
        raise UsageError(
            f"--on slurm: the nodes {nodes} cannot be listed: {listed.stderr.strip() or listed.stdout.strip()}"
        )
    return tuple(Host(name, count) for name, count in zip(names, cores, strict=True))


def show_topology() -> str:
    """Return Slurm's description of its switches; "" if it has none, or is not installed."""
    if shutil.which("scontrol") is None:
        return ""
    shown = subprocess.run(
        ["scontrol", "show", "topology"], capture_output=True, text=True, timeout=LIST_SECONDS, check=False
    )
    return shown.stdout if not shown.returncode and "SwitchName=" in shown.stdout else ""


class SlurmSteps(Engine):
    """Engine that starts an agent as a step of the allocation, on one of its nodes.

    `cores` has the number of cores of each node in the allocation.
    """

    def __init__(self, cores: Mapping[str, int], interface: str) -> None:
        super().__init__(interface)
        self._cores = cores

    def start(self, host: str) -> RemoteAgent:
        """Begin to start the agent of a node. Its output is passed on as it comes, and its death ends no other step."""
        step = [
            *("srun", "--overlap", "-N1", "-n1", f"--nodelist={host}", f"--cpus-per-task={self._cores[host]}"),
            *("--cpu-bind=none", "--mem=0", "--unbuffered", "--kill-on-bad-exit=0", "--quiet"),
        ]
        return self._spawn(host, [*step, "sh", "-c", agent_command()])
