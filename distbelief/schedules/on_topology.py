"""Schedules on a topology: what each link carries, and which is the busiest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from zlib import crc32

from distbelief.network.graph import Topology
from distbelief.network.routes import Routes, loads
from distbelief.schedules.price import LinkModel, price_on
from distbelief.schedules.schedule import Schedule


def draw_on(schedule: Schedule, routes: Routes, hosts: Sequence[int], link: LinkModel | None) -> str:
    """What a schedule puts on each link of a topology, by the host of each rank; and the price of a megabyte, where
    it is known what other cables are like than those of which the topology says that.
    """
    topology, names = routes.topology, routes.topology.hosts
    used = list(dict.fromkeys(hosts))
    carried = _carried(schedule, routes, hosts)
    busiest = busiest_link(topology, carried, link.bandwidth if link else 0.0)
    pairs = Counter(
        f"{move.source}-{move.target}" for move in schedule.moves
        if busiest in routes.of(hosts[move.source], hosts[move.target])
    )  # fmt: skip
    sends = max(carried.get(2 * host, 0.0) for host in used)
    others = {
        "by names": sorted(used, key=lambda host: names[host]),
        "at random": sorted(used, key=lambda host: crc32(f"{host}".encode())),
    }
    most = {
        what: max(_carried(schedule, routes, [order[used.index(host)] for host in hosts]).values(), default=0.0)
        for what, order in others.items()
    }
    more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    return "\n".join([
        f"{schedule.algorithm} on {topology.name}, in this order: {', '.join(names[host] for host in used)}",
        f"a host sends at most {sends:.2f} times the vector; the least is {2 * (len(used) - 1) / len(used):.2f}",
        f"the busiest link is {topology.link_name(busiest)}: {carried.get(busiest, 0.0):.2f} times the vector, by "
        f"{' '.join([*pairs][:8])}{more}; it would be "
        f"{', '.join(f'{load:.2f} {what}' for what, load in most.items())}",
        *switch_lines(topology, carried),
        *([f"price of 1 MB: {1e3 * price_on(schedule, routes, hosts, link, 1e6):.2f} ms"] if link else []),
    ])  # fmt: skip


def _carried(schedule: Schedule, routes: Routes, hosts: Sequence[int]) -> Mapping[int, float]:
    """Times the vector, by link."""
    length = max(1, schedule.length)
    return loads(routes, ((hosts[move.source], hosts[move.target], move.length / length) for move in schedule.moves))


def busiest_link(topology: Topology, carried: Mapping[int, float], usual: float = 0.0) -> int:
    """Which link takes longest for what it carries, with what is usual where nothing is said: else the most."""
    usual = usual or max(cable.bandwidth for cable in topology.cables) or 1.0
    return max(carried, key=lambda one: carried[one] / (topology.cables[one // 2].bandwidth or usual), default=0)


def switch_lines(topology: Topology, carried: Mapping[int, float]) -> Iterator[str]:
    """A line of each switch that passes something on: what goes to its hosts and later switches, and comes back."""
    names = (*topology.hosts, *topology.switches)
    for switch, name in enumerate(topology.switches, len(topology.hosts)):
        rows = [
            (f"{carried.get(link, 0.0):.2f} there, {carried.get(link ^ 1, 0.0):.2f} back", names[other])
            for other, link in topology.around[switch] if not len(topology.hosts) <= other < switch
        ]  # fmt: skip
        told = []
        for what, group in groupby(rows, key=lambda row: row[0]):
            first, *rest = [other for _, other in group]
            told.append(f"{first}{f' to {rest[-1]}' if rest else ''} {what}")
        if any(carried.get(link) or carried.get(link ^ 1) for _, link in topology.around[switch]) and told:
            yield f"  {name}: {'; '.join(told)}"
