"""Traffic on the links of a topology in a simulated job, compared with the least that an all-reduce needs."""

from __future__ import annotations

from collections import Counter

from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.network.graph import busiest_link
from distbelief.schedules.price import NAMED
from distbelief.transport.routed import RoutedNetwork


def traffic(network: RoutedNetwork, seconds: float, rounds: float, size: int) -> Json:
    """Return the `network` entry of a result: a job took so many seconds and rounds, with a model of `size` bytes."""
    topology, carried, hosts = network.routes.topology, network.link_loads(), len(network.places)
    told: Json = {"topology": topology.name, "hosts": hosts, "of": len(topology.hosts)}
    if not carried or not seconds:
        return {**told, "told": f"{topology.name}: nothing went from host to host"}
    sums = {link: flows.total() for link, flows in carried.items()}
    busiest = busiest_link(topology, sums, network.model.bandwidth)
    flows, name, total = carried[busiest], topology.link_name(busiest), sums[busiest]
    busy = total / network.capacities[busiest] / seconds
    sends = max(sums.get(topology.uplink(host), 0) for host in network.places) / rounds
    least = 2 * (hosts - 1) / hosts * size
    kinds = Counter[str]()
    for (source, target), bytes_ in flows.items():
        kinds[f"{roles.kind(source)} to {roles.kind(target)}"] += bytes_
    shared = ", ".join(f"{kind} {part / total:.0%}" for kind, part in kinds.most_common(2) if part > total / 200)
    why = ""
    if topology.ends_at_host(busiest):
        shards = any(roles.kind(role) is roles.Kind.SHARD for pair in flows for role in pair)
        why = ", a host's own link, which no switch makes faster" + "; more shards do" * shards
    shared_by = [[*pair, bytes_] for pair, bytes_ in flows.most_common(NAMED)]
    return {
        **told,
        "busiest": {"link": name, "busy": busy, "bytes": total, "flows": len(flows), "shared_by": shared_by},
        "host_sends": sends,
        "least": least,
        "told": f"{topology.name}: {name} is the busiest link, {busy:.0%} of the time, with {len(flows)} flows "
        f"({shared}){why}; in a step of each replica a host sends at most {sends / 1e6:.3g} MB, and the least of an "
        f"all-reduce is {least / 1e6:.3g}",
    }
