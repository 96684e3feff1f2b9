"""The order of hosts: a walk over the switches between them, by which what goes around them takes each link once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from distbelief.places.topologies import topology_file
from distbelief.schedules.allreduce import PLACED, by_host, schedule
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
    """The hosts in the order of a topology.

    Args:
        hosts: as they are written.
        path: of a file that has it; "" for none.
        slurm: what Slurm says of it, which counts where there is no file; "" for nothing.

    Raises:
        UsageError: the file cannot be used, or lacks a host. What Slurm says is passed over then, which that tells.
    """
    if path:
        if is_shape(path):
            raise UsageError(
                f"--topology {path}: real hosts have names: name a file as Slurm's topology.conf, which distbelief "
                f"check --hosts {hosts[0].name},... --topology-out FILE measures"
            )
        return _walk(hosts, topology_file(path))
    if not slurm:
        return OrderedHosts(tuple(hosts))
    try:
        return _walk(hosts, parse_topology(slurm, "of scontrol show topology"))
    except UsageError as error:
        return OrderedHosts(tuple(hosts), told=(f"hosts are in Slurm's order: {error}",))


def _walk(hosts: Sequence[Host], topology: Topology) -> OrderedHosts:
    names = [host.name.rpartition("@")[2] for host in hosts]
    ranked = [
        (host, number)
        for number in topology.named(names)
        for name, host in zip(names, hosts, strict=True)
        if name == topology.hosts[number]
    ]
    ordered = tuple(host for host, _ in ranked)
    told = f"order of hosts, by --topology {topology.name}: {', '.join(host.name for host in ordered)}"
    return OrderedHosts(ordered, topology, tuple(number for _, number in ranked), (told,))


def lines(ordered: OrderedHosts, settings: Settings, where: Mapping[str, int]) -> list[str]:
    """The order, what each link carries of what a step sends between hosts, and which link is the most loaded.

    Args:
        ordered: the hosts.
        settings: of the job.
        where: the host of each role, by its number among these.
    """
    topology, told = ordered.topology, list(ordered.told)
    if topology is None:
        return told
    cells = [role for role in where if roles.is_replica(role)]
    if len(cells) > MOST_LOADED:
        return [*told, f"the loads of links are shown of at most {MOST_LOADED} replicas"]
    if servers := [role for role in where if roles.kind(role) in (roles.Kind.SHARD, roles.Kind.STANDBY)]:
        told.append(
            f"strategy {settings.strategy.name} has no order of hosts: replicas push to shards, and fetch; these are "
            "spread over switches"
        )
        messages = _served(cells, servers, settings)
    else:
        own = reduction(settings)
        native, name = own.algorithm in PLACED, "ring" if own.algorithm in PLACED else own.algorithm
        told.append(f"gradients are added up by {name}{f', or as {own.algorithm} chooses' if native else ''}")
        messages = _summed(settings, name, own.per_host)
    at = {role: ordered.numbers[host] for role, host in where.items() if host != HOME}
    carried = loads(Routes(topology), ((at[one], at[other], share) for one, other, share in messages))
    if not carried:
        return [*told, "nothing of a step goes between hosts"]
    speed = [cable.bandwidth for cable in topology.cables]
    usual = max(speed) or 1.0
    for number, cable in enumerate(topology.cables):
        up, down = carried.get(2 * number, 0.0), carried.get(2 * number + 1, 0.0)
        if up or down:
            speed_of = f" of {cable.bandwidth * 8e-6:.0f} Mbit/s" if cable.bandwidth else ""
            told.append(f"link {topology.link_name(2 * number)}{speed_of}: {up:.2f} gradients a step, back {down:.2f}")
    most = max(carried, key=lambda link: (carried[link] / (speed[link // 2] or usual), -link))
    return [*told, f"most loaded: link {topology.link_name(most)}, {carried[most]:.2f} gradients a step"]


def _served(cells: Sequence[str], servers: Sequence[str], settings: Settings) -> Iterator[tuple[str, str, float]]:
    """What replicas push to shards and fetch, and these send to standbys: of the gradient, which part."""
    shards = [role for role in servers if roles.kind(role) is roles.Kind.SHARD]
    share = 1 / len(shards)
    for shard in shards:
        for cell in cells:
            yield cell, shard, share / settings.partitions
            yield shard, cell, share / settings.partitions
        if (standby := roles.standby_of(shard)) in servers:
            yield shard, standby, share * (1 if settings.strategy.rounds else settings.replicas)


def _summed(settings: Settings, algorithm: str, per_host: int) -> Iterator[tuple[str, str, float]]:
    """What replicas send each other in an all-reduce, each partition to the same of others."""
    mesh = settings.mesh
    cells, ranks = roles.replicas(mesh), by_host(mesh.replicas, per_host)
    hosts = ranks if algorithm.startswith("hierarchical") else ()
    moves = list(schedule(algorithm, mesh.replicas, ELEMENTS, hosts).moves)
    for partition in range(mesh.partitions):
        for move in moves:
            one, other = mesh.number(move.source, partition), mesh.number(move.target, partition)
            yield cells[one], cells[other], move.length / (ELEMENTS * mesh.partitions)
