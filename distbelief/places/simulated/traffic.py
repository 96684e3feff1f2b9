"""What the links of a topology have carried in a simulated job: which is the busiest, who shares it, and how much hosts
send beside the least that an all-reduce needs.
"""

from __future__ import annotations

from collections import Counter

from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.transport.routed import RoutedNetwork

NAMED = 8
"""Of those who share a link, so many are named: who send the most."""


def traffic(network: RoutedNetwork, seconds: float, rounds: float, size: int) -> Json:
    """What `result.json` has of it, by the seconds of the job, the steps of each replica and the model's bytes."""
    topology, found = network.routes.topology, network.link_loads()
    hosts = len(network.places)
    told: Json = {"topology": topology.name, "hosts": hosts, "of": len(topology.hosts)}
    sums = {link: sum(flows.values()) / network.capacities[link] for link, flows in found.items()}
    if not sums or not seconds:
        return {**told, "told": f"{topology.name}: nothing went from host to host"}
    busiest = max(sums, key=lambda link: sums[link])
    flows, total = found[busiest], sum(found[busiest].values())
    sends = max(sum(found.get(2 * host, Counter()).values()) for host in network.places) / rounds
    least = 2 * (hosts - 1) / hosts * size
    kinds: Counter[str] = Counter()
    for (source, target), bytes_ in flows.items():
        kinds[f"{roles.kind(source)} to {roles.kind(target)}"] += bytes_
    shared = ", ".join(f"{kind} {part / total:.0%}" for kind, part in kinds.most_common(2) if part > total / 200)
    why = ""
    if topology.ends_at_host(busiest):
        shards = any(roles.kind(role) is roles.Kind.SHARD for pair in flows for role in pair)
        why = ": a host's own, which no switch makes faster" + "; more shards do" * shards
    return {
        **told,
        "busiest": {
            "link": topology.link_name(busiest),
            "busy": sums[busiest] / seconds,
            "bytes": total,
            "flows": len(flows),
            "shared_by": [[*pair, bytes_] for pair, bytes_ in flows.most_common(NAMED)],
        },
        "host_sends": sends,
        "least": least,
        "told": f"{topology.name}: {topology.link_name(busiest)} is the busiest link, {sums[busiest] / seconds:.0%} of "
        f"the time, with {len(flows)} flows ({shared}){why}; in a step of each replica a host sends at most "
        f"{sends / 1e6:.3g} MB, and the least of an all-reduce is {least / 1e6:.3g}",
    }
