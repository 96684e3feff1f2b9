"""The command `check`: whether hosts are ready for a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from distbelief.cli.arguments import DataFolder, ask
from distbelief.errors import UsageError
from distbelief.references import check_task


@dataclass(frozen=True)
class CheckOptions(DataFolder):
    """Readiness of hosts for a job: logins, versions, clocks, cores and memory of each, the data of a task, and
    latency and bandwidth between each two; what is wrong with any of them, and what to do.
    """

    hosts: str = ""
    """The hosts (a:4,b:4)."""
    hostfile: str = ""
    """A file that names them instead."""
    on: str = ""
    """Starter of a job there: ssh, or slurm inside an allocation."""
    remote_shell: str = "ssh"
    """The command, with its options, by which a host is logged in to."""
    interface: str = ""
    """The network interface by whose address hosts are reached, such as eth1."""
    topology_out: str = ""
    """Write a file for --topology, with the switches that the bandwidths between each two hosts tell of."""
    json: bool = False
    """Show what is found as JSON."""


PROG = "distbelief check [TASK]"


def check(args: list[str]) -> int:
    """`distbelief check [TASK] --hosts a:4,b:4 [options]`; returns 1 where anything is wrong."""
    words = args[:1] if args and not args[0].startswith("-") else []
    rest = args[len(words) :]
    settings = ask(PROG, CheckOptions, rest)
    task = words[0] if words else ""
    if task:
        check_task(task)
    elif settings.data_dir:
        raise UsageError(f"--data-dir {settings.data_dir}: of which task? Write it first: distbelief check mnist ...")
    out = Path(settings.topology_out)
    if settings.topology_out and (out.exists() or not out.absolute().parent.is_dir()):
        raise UsageError(f"--topology-out {out}: is there already, or its folder is not; name a new file")
    from distbelief.places.cluster.checking import lines, topology_of
    from distbelief.places.cluster.cluster import Cluster

    place = Cluster(
        hosts=settings.hosts,
        hostfile=settings.hostfile,
        on=settings.on,
        remote_shell=settings.remote_shell,
        interface=settings.interface,
    )
    reports = place.check(task, settings.data_dir or "", bool(settings.topology_out))
    print(msgspec.json.encode(reports).decode() if settings.json else "\n".join(lines(reports)))
    if settings.topology_out:
        text = topology_of(reports)
        try:
            out.write_text(text)
        except OSError as error:
            print(text)  # it took minutes
            raise UsageError(f"--topology-out {out}: cannot be written ({error.strerror}): it is shown above") from None
    return int(any(report.problems for report in reports))
