"""Checks of hosts before a job: a report of each host, with its problems and their remedies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import combinations
from multiprocessing.connection import Connection

import msgspec

from distbelief.errors import DistbeliefError, Interrupted, UsageError
from distbelief.network.slurm import measured_topology
from distbelief.places.cluster import opening
from distbelief.places.cluster.engines import Engine
from distbelief.places.cluster.opening import Opened
from distbelief.places.cluster.remote_agent import RemoteAgent
from distbelief.places.join.ticket import VERSION
from distbelief.places.messages import MeasureWays, OpenJob, Way
from distbelief.transport.addresses import joined

CLOCK_SECONDS = 5.0
"""Largest difference of a host's clock, in seconds, that is not reported as a problem."""
MEMORY = 1 << 30
"""Smallest free memory, in bytes, that is not reported as a problem: a few processes with torch need it."""
MOST_MEASURED = 64
"""Most hosts between which every pair is measured, which takes some minutes."""


class HostReport(msgspec.Struct):
    """Report of a host."""

    name: str
    version: str = ""
    cores: int = 0
    gpus: int = 0
    memory: int = 0
    """Free memory, in bytes."""
    clock: float = 0.0
    """Seconds by which its clock is ahead."""
    address: str = ""
    """Address by which the others reach it."""
    ways: dict[str, Way] = {}
    """Measured connections to the other hosts."""
    problems: list[str] = []
    """Problems, each with its remedy."""


def check_hosts(
    engine: Engine, names: Sequence[str], interface: str, job: OpenJob, every_two: bool, woken: Connection
) -> list[HostReport]:
    """Start an agent on each host, check the host, and end the agent; a failure on one host does not stop the others.

    Hosts reach each other by the address of a network interface, or of any if it is "". `job` names the task whose data
    they look for. With `every_two`, every pair of hosts is measured, however many they are. A signal on `woken` ends
    the checks.

    Raises:
        UsageError: the engine is not installed, or there are too many hosts to measure every pair.
        Interrupted: a signal has come.
    """
    if every_two and len(names) > MOST_MEASURED:
        raise UsageError(
            f"{len(names)} hosts: of at most {MOST_MEASURED} each two are measured; name fewer, and write the others "
            "into the file"
        )
    reports = {name: HostReport(name, ways={}, problems=[]) for name in names}
    checked = _Checked(woken, reports)
    every = checked.agents
    try:
        checked.start(engine, names)
        checked.open(job)
        for agent in every:
            _describe(agent, reports[agent.name])
        checked.agents = [one for one in every if not one.gone and reports[one.name].version == VERSION]
        _measure(checked, interface, every_two)
    finally:
        checked.agents = every
        checked.close()
    return list(reports.values())


class _Checked(Opened):
    """Hosts that are checked; a failure on one is reported, and does not stop the others."""

    def __init__(self, woken: Connection, reports: dict[str, HostReport]) -> None:
        super().__init__(woken)
        self.reports = reports

    def lose(self, gone: Sequence[RemoteAgent]) -> None:
        for agent in gone:
            self.reports[agent.name].problems.append(agent.gone)


def _describe(agent: RemoteAgent, report: HostReport) -> None:
    """Fill in the report of a host from its agent's greeting, with the problems that it shows."""
    if (greeting := agent.greeting) is None or agent.attend is None:
        return
    report.version, report.cores, report.gpus = agent.attend.version, greeting.cores, greeting.gpus
    report.memory, report.clock = greeting.memory, agent.clock_ahead
    if report.version != VERSION:
        report.problems.append(f"it runs distbelief {report.version}, this is {VERSION}: install the same on all hosts")
    if abs(report.clock) > CLOCK_SECONDS:
        far = "ahead" if report.clock > 0 else "behind"
        report.problems.append(
            f"its clock is {abs(report.clock):.0f} s {far}: have it set by the network (timedatectl set-ntp true)"
        )
    if greeting.memory < MEMORY:
        report.problems.append(f"{greeting.memory >> 20} MB of memory are free: end what else runs there")
    if greeting.lacks:
        report.problems.append(greeting.lacks)


def _measure(opened: _Checked, interface: str, every_two: bool) -> None:
    """Find the address by which each host is reached, and measure the connections, one host after the other."""
    reports = opened.reports
    if not opened.agents:
        return
    try:
        opened.find_addresses(interface)
    except Interrupted:
        raise
    except DistbeliefError as error:
        reports[opened.agents[0].name].problems.append(str(error))
        return
    for agent in opened.agents:
        reports[agent.name].address = agent.address
    for number, agent in enumerate(opened.agents):
        after = opened.agents[number + 1 :]
        others = [*after, *opened.agents[:number]]
        chosen = others if len(opened.agents) <= opening.ALL_PAIRS else after if every_two else others[:2]
        where = {host.name: joined(host.address, host.greeting.port) for host in chosen if host.greeting}
        agent.line.say(MeasureWays(where))
        opened.until(functools.partial(_has_measured, agent), "does not answer")
        if agent.measured:
            reports[agent.name].ways = agent.measured.ways
            for name in where.keys() - agent.measured.ways.keys():
                reports[agent.name].problems.append(
                    f"host {name} does not answer it at {where[name]}: open the ports between them, or mend the route"
                )


def _has_measured(agent: RemoteAgent, one: RemoteAgent) -> bool:
    """Return whether one agent need not be waited for: it is not `agent`, or has measured."""
    return one is not agent or one.measured is not None


def topology_of(reports: Sequence[HostReport]) -> str:
    """Return a topology.conf for the measured bandwidths.

    The faster direction between two hosts counts, since other work may slow one down.

    Raises:
        UsageError: there is only one host, or no bandwidth was measured between two of them.
    """
    bandwidths: dict[tuple[str, str], float] = {}
    for host, other in combinations(reports, 2):
        ways = [way for way in (host.ways.get(other.name), other.ways.get(host.name)) if way]
        if not ways:
            raise UsageError(
                f"no bandwidth was measured between hosts {host.name} and {other.name}: mend what is WRONG there"
            )
        bandwidths[_bare(host), _bare(other)] = max(way.bandwidth for way in ways)
    if not bandwidths:
        raise UsageError("between one host and itself there is nothing to measure: name more with --hosts")
    return measured_topology([_bare(report) for report in reports], bandwidths)


def _bare(report: HostReport) -> str:
    """Return the name of a host, without its user name."""
    return report.name.rpartition("@")[2]


def lines(reports: Sequence[HostReport]) -> list[str]:
    r"""Return the reports as lines of text.

    >>> report = HostReport("a", "0.1.0", 4, 0, 3 << 30, 0.002, "10.0.0.1", {"b": Way(1e-4, 1.2e8)}, ["no data"])
    >>> print("\n".join(lines([report])))
    host a (10.0.0.1): distbelief 0.1.0, 4 cores, 3.0 GB of memory free, clock 0.0 s off
      to b: 0.10 ms there and back, 0.96 Gbit/s
      WRONG: no data
    """
    lines = []
    for report in reports:
        where = f" ({report.address})" if report.address else ""
        cores = f"{report.cores} core{'s' * (report.cores != 1)}"
        gpus = f", {report.gpus} GPUs" if report.gpus else ""
        is_like = (
            f"distbelief {report.version}, {cores}{gpus}, {report.memory / (1 << 30):.1f} GB of memory free, clock "
            f"{abs(report.clock):.1f} s off"
        )
        lines.append(f"host {report.name}{where}: {is_like if report.version else 'cannot be used'}")
        for name, way in report.ways.items():
            lines.append(f"  to {name}: {way.latency * 1e3:.2f} ms there and back, {way.bandwidth * 8e-9:.2f} Gbit/s")
        lines += [f"  WRONG: {problem}" for problem in report.problems]
    return lines
