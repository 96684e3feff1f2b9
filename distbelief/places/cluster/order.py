"""Order of hosts: a walk over the switches between them, such that a ring of replicas takes each link once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distbelief.core import roles
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.network.graph import Routes, Topology
from distbelief.network.shapes import is_shape
from distbelief.network.slurm import parse_topology
from distbelief.places.cluster.hosts import Host
from distbelief.places.cluster.placement import HOME
from distbelief.places.topologies import topology as topology_of
from distbelief.schedules.allreduce import HIERARCHICAL, PLACED, by_host, schedule
from distbelief.schedules.price import Traffic, draw_on, load_lines
from distbelief.strategies.grouped.settings import reduction

MOST_LOADED = 512
"""Most replicas, or partitions of them, for which the loads of links are shown."""
ELEMENTS = 1 << 20
"""Number of elements of the gradient in the loads that are shown."""


class OrderedHosts(NamedTuple):
    """Hosts of a job, in the order of the replicas on them."""

    hosts: tuple[Host, ...]
    topology: Topology | None = None
    numbers: tuple[int, ...] = ()
    """Number of each host in the topology."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the order."""

    def switch_of(self, at: int) -> int:
        """Return the switch of a host; all hosts have the same switch without a topology."""
        return self.topology.switch_of(self.numbers[at]) if self.topology else 0


def order(hosts: Sequence[Host], path: str, slurm: str) -> OrderedHosts:
    """Order hosts by the topology of a file, or by Slurm's description of its switches; without either, keep the order.

    Faults of Slurm's description are only noted.

    Raises:
        UsageError: the file cannot be used, or lacks a host.
    """
    if path:
        if is_shape(path):
            raise UsageError(
                f"--topology {path}: real hosts have names: name a file as Slurm's topology.conf, which distbelief "
                f"check --hosts {hosts[0].name},... --topology-out FILE measures"
            )
        return _walk(hosts, topology_of(path))
    if not slurm:
        return OrderedHosts(tuple(hosts))
    try:
        return _walk(hosts, parse_topology(slurm, "scontrol show topology"))
    except UsageError as error:
        return OrderedHosts(tuple(hosts), notes=(f"hosts are in Slurm's order: {error}",))


def _walk(hosts: Sequence[Host], topology: Topology) -> OrderedHosts:
    names = [host.name.rpartition("@")[2] for host in hosts]
    places = {topology.hosts[number]: (place, number) for place, number in enumerate(topology.named(names))}
    ranked = sorted(zip(names, hosts, strict=True), key=lambda pair: places[pair[0]])
    ordered = tuple(host for _, host in ranked)
    note = f"order of hosts, by {topology.name}: {', '.join(host.name for host in ordered)}"
    return OrderedHosts(ordered, topology, tuple(places[name][1] for name, _ in ranked), (note,))


def lines(ordered: OrderedHosts, settings: Settings, where: Mapping[str, int]) -> list[str]:
    """Return lines that show the order, the traffic of each link in a step, and the busiest link.

    `where` holds the number of each role's host.
    """
    if ordered.topology is None:
        return list(ordered.notes)
    if settings.mesh.size > MOST_LOADED:
        return [*ordered.notes, f"the load of each link is shown for at most {MOST_LOADED} replicas and partitions"]
    at = {role: ordered.numbers[host] for role, host in where.items() if host != HOME}
    routes, options = Routes(ordered.topology), reduction(settings)
    if shards := [role for role in at if roles.kind(role) is roles.Kind.SHARD]:
        why = "has no order of hosts: replicas push to shards, and fetch; these are spread over switches"
        loads = load_lines(routes, _served(at, shards, settings), "gradients a step")
        return [*ordered.notes, f"strategy {settings.strategy.name} {why}", *loads]
    name, notes = options.algorithm, []
    if name in PLACED:
        name, notes = "ring", [f"--algorithm {name} chooses later how gradients are added up; with a ring:"]
    hosts = by_host(settings.replicas, options.per_host) if name.startswith(HIERARCHICAL) else ()
    drawn = schedule(name, settings.replicas, ELEMENTS, hosts)
    return [*ordered.notes, *notes, *draw_on(drawn, routes, [at[role] for role in roles.leads(settings.mesh)])]


def _served(at: Mapping[str, int], shards: Sequence[str], settings: Settings) -> Traffic:
    """Return the traffic of a step between replicas, shards and standbys, in fractions of the gradient."""
    share, parts = 1 / len(shards), dict[tuple[str, str], float]()
    for shard in shards:
        for cell in filter(roles.is_replica, at):
            parts[cell, shard] = parts[shard, cell] = share / settings.partitions
        if (standby := roles.standby_of(shard)) in at:
            parts[shard, standby] = share * (1 if settings.policy.rounds else settings.replicas)
    return {f"{sender} to {other}": (at[sender], at[other], part) for (sender, other), part in parts.items()}
