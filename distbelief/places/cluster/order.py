"""The order of hosts: a walk over the switches between them, by which what goes around them takes each link once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from distbelief.core import roles
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.network.graph import Topology
from distbelief.network.routes import Routes, loads
from distbelief.network.shapes import is_shape
from distbelief.network.slurm import parse_topology
from distbelief.places.cluster.hosts import Host
from distbelief.places.cluster.placement import HOME
from distbelief.places.topologies import topology as topology_of
from distbelief.schedules.allreduce import HIERARCHICAL, PLACED, by_host, schedule
from distbelief.schedules.on_topology import busiest_link, draw_on, switch_lines
from distbelief.strategies.grouped.settings import reduction

MOST_LOADED = 512
"""Replicas, or partitions of them, of which the loads of links are shown."""
ELEMENTS = 1 << 20
"""Of the gradient whose way is shown."""


class OrderedHosts(NamedTuple):
    """The hosts of a job, as replicas follow each other on them."""

    hosts: tuple[Host, ...]
    topology: Topology | None = None
    numbers: tuple[int, ...] = ()
    """Of these hosts in the topology."""
    told: tuple[str, ...] = ()
    """Why they are in this order."""

    def switch_of(self, at: int) -> int:
        """At which switch a host is."""
        return self.topology.switch_of(self.numbers[at]) if self.topology else 0


def order(hosts: Sequence[Host], path: str, slurm: str) -> OrderedHosts:
    """The hosts in the order of a topology: of the file at a path, or where that is "" of what Slurm says, if anything.

    Raises:
        UsageError: the file cannot be used, or lacks a host. What Slurm says is passed over then, which that tells.
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
        return OrderedHosts(tuple(hosts), told=(f"hosts are in Slurm's order: {error}",))


def _walk(hosts: Sequence[Host], topology: Topology) -> OrderedHosts:
    names = [host.name.rpartition("@")[2] for host in hosts]
    places = {topology.hosts[number]: (place, number) for place, number in enumerate(topology.named(names))}
    ranked = sorted(zip(names, hosts, strict=True), key=lambda pair: places[pair[0]])
    ordered = tuple(host for _, host in ranked)
    told = f"order of hosts, by {topology.name}: {', '.join(host.name for host in ordered)}"
    return OrderedHosts(ordered, topology, tuple(places[name][1] for name, _ in ranked), (told,))


def lines(ordered: OrderedHosts, settings: Settings, where: Mapping[str, int]) -> list[str]:
    """The order, what each link carries of what a step sends between hosts, and which link is the busiest.

    `where` has the host of each role, by its number among those.
    """
    topology, told = ordered.topology, list(ordered.told)
    if topology is None:
        return told
    if settings.mesh.size > MOST_LOADED:
        return [*told, f"what links carry is shown of at most {MOST_LOADED} replicas and partitions"]
    at, routes = {role: ordered.numbers[host] for role, host in where.items() if host != HOME}, Routes(topology)
    if shards := [role for role in at if roles.kind(role) is roles.Kind.SHARD]:
        told.append(
            f"strategy {settings.strategy.name} has no order of hosts: replicas push to shards, and fetch; these are "
            "spread over switches"
        )
        carried = loads(routes, ((at[one], at[other], share) for one, other, share in _served(at, shards, settings)))
        busiest = busiest_link(topology, carried)
        most = f"{topology.link_name(busiest)}: {carried.get(busiest, 0.0):.2f} gradients a step"
        return [*told, f"the busiest link is {most}", *switch_lines(topology, carried)]
    own, ranks = reduction(settings), settings.replicas
    if own.algorithm in PLACED:
        told.append(f"--algorithm {own.algorithm} chooses later how gradients are added up; by a ring it would be:")
    name = "ring" if own.algorithm in PLACED else own.algorithm
    made = schedule(name, ranks, ELEMENTS, by_host(ranks, own.per_host) if name.startswith(HIERARCHICAL) else ())
    drawn = draw_on(made, routes, [at[role] for role in roles.leads(settings.mesh)], None)
    return [*told, *drawn.splitlines()]


def _served(at: Collection[str], shards: Sequence[str], settings: Settings) -> Iterator[tuple[str, str, float]]:
    """What replicas push to shards and fetch, and these send to standbys: of the gradient, which part."""
    share = 1 / len(shards)
    for shard in shards:
        for cell in (role for role in at if roles.is_replica(role)):
            yield cell, shard, share / settings.partitions
            yield shard, cell, share / settings.partitions
        if (standby := roles.standby_of(shard)) in at:
            yield shard, standby, share * (1 if settings.strategy.rounds else settings.replicas)
