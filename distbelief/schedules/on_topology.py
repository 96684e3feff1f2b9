"""Loads of a topology's links, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from zlib import crc32

from distbelief.network.graph import Topology
from distbelief.network.routes import Routes, busiest_link, loads
from distbelief.schedules.price import LinkModel, price_on
from distbelief.schedules.schedule import Schedule

Traffic = Mapping[str, tuple[int, int, float]]
"""Hosts of sender and receiver, and the amount, by the names of sender and receiver."""
NAMED = 8
"""Most users of the busiest link to be named."""


def draw_on(schedule: Schedule, routes: Routes, hosts: Sequence[int], link: LinkModel | None = None) -> list[str]:
    """Describe the loads of links under a schedule with these hosts of its ranks, and with those in two other orders.

    With `link` it also prices a megabyte; `link` has the bandwidth of cables for which the topology has none.
    """
    topology, names = routes.topology, routes.topology.hosts
    used, length = list(dict.fromkeys(hosts)), max(1, schedule.length)
    sent = Counter[tuple[int, int]]()
    for move in schedule.moves:
        sent[move.source, move.target] += move.length

    def traffic(order: Sequence[int]) -> Traffic:
        at = dict(zip(used, order, strict=True))
        return {
            f"{sender}-{to}": (at[hosts[sender]], at[hosts[to]], count / length) for (sender, to), count in sent.items()
        }

    orders = {
        "by names": sorted(used, key=lambda host: names[host]),
        "at random": sorted(used, key=lambda host: crc32(f"{host}".encode())),
    }
    most = {what: max(loads(routes, traffic(order).values()).values(), default=0.0) for what, order in orders.items()}
    otherwise = f"; it would be {', '.join(f'{load:.2f} {what}' for what, load in most.items())}"
    carried = loads(routes, traffic(used).values())
    sends = max(carried.get(topology.uplink(host), 0.0) for host in used)
    return [
        f"{schedule.algorithm} on {topology.name}, in this order: {', '.join(names[host] for host in used)}",
        f"a host sends at most {sends:.2f} times the vector; the least is {2 * (len(used) - 1) / len(used):.2f}",
        *load_lines(routes, traffic(used), "times the vector", link.bandwidth if link else 0.0, otherwise),
        *([f"price of 1 MB: {1e3 * price_on(schedule, routes, hosts, link, 1e6):.2f} ms"] if link else []),
    ]


def load_lines(routes: Routes, traffic: Traffic, unit: str, usual: float = 0.0, more: str = "") -> list[str]:
    """Describe the busiest link and its users, and the traffic through each switch.

    Cables without a bandwidth have the usual one, or the fastest of the topology.
    """
    topology, carried = routes.topology, loads(routes, traffic.values())
    busiest = busiest_link(topology, carried, usual)
    by = [who for who, (source, target, _) in traffic.items() if busiest in routes.of(source, target)]
    others = f" and {len(by) - NAMED} more" if len(by) > NAMED else ""
    load = f"{carried.get(busiest, 0.0):.2f} {unit}{', by ' if by else ''}{', '.join(by[:NAMED])}{others}"
    return [f"the busiest link is {topology.link_name(busiest)}: {load}{more}", *_switch_lines(topology, carried)]


def _switch_lines(topology: Topology, carried: Mapping[int, float]) -> Iterator[str]:
    """Yield a line for each switch with traffic: what its hosts and later switches send to it, and receive."""
    names = (*topology.hosts, *topology.switches)
    for switch, name in enumerate(topology.switches, len(topology.hosts)):
        rows = [
            (f"{carried.get(link, 0.0):.2f} there, {carried.get(link ^ 1, 0.0):.2f} back", names[other])
            for other, link in topology.around[switch]
            if not len(topology.hosts) <= other < switch
        ]
        phrases = []
        for what, group in groupby(rows, key=lambda row: row[0]):
            first, *rest = [other for _, other in group]
            phrases.append(f"{first}{f' to {rest[-1]}' if rest else ''} {what}")
        if any(carried.get(link) or carried.get(link ^ 1) for _, link in topology.around[switch]) and phrases:
            yield f"  {name}: {'; '.join(phrases)}"
