"""Price of communication: latency, bandwidth and additions. The virtual network charges it for each message.

A message leaves through its sender's port, is on the line for the latency, and enters through its receiver's port; then
one processor adds it up. Ports and processors serve one message at a time. The two ports of a rank work side by side,
and so do all lines. On a topology, messages share the cables of their routes.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from zlib import crc32

import msgspec

from distbelief.network.graph import Routes, Topology, busiest_link, loads
from distbelief.schedules.allreduce import ALGORITHMS, by_host, check_algorithm, schedule
from distbelief.schedules.schedule import Schedule

CHOICES = tuple(name for name in ALGORITHMS if name != "direct")
"""Algorithms from which auto chooses if messages travel. `direct` is not among them: it takes longer than its price, as
its messages meet at a port. A virtual network serves them in the order of sending, not of arrival, and a real one
shares the port unevenly."""


class LinkModel(msgspec.Struct, frozen=True):
    """Speed of a line between two ranks."""

    latency: float
    """Seconds from the last byte's departure to its arrival."""
    bandwidth: float
    """Bytes per second."""
    reduction: float = 0.0
    """Seconds for each byte that is added."""
    header: int = 0
    """Bytes of each message besides its elements."""


class Port:
    """Time until which a rank sends, receives and adds, in seconds."""

    __slots__ = ("adds", "arrives", "leaves")

    def __init__(self) -> None:
        self.leaves = self.arrives = self.adds = 0.0


def carry(source: Port, target: Port, now: float, takes: float, latency: float) -> float:
    """Return when a message arrives whose bytes take `takes` seconds through a port.

    >>> one, other = Port(), Port()
    >>> carry(one, other, 0.0, 2.0, 0.5), carry(one, other, 0.0, 2.0, 0.5)
    (2.5, 4.5)
    """
    leaves = source.leaves = (now if now > source.leaves else source.leaves) + takes
    arrives, room = leaves + latency, target.arrives + takes
    target.arrives = arrives = arrives if arrives > room else room
    return arrives


def add(target: Port, arrives: float, takes: float) -> float:
    """Return when an arrival has been added up, which takes `takes` seconds."""
    target.adds = (arrives if arrives > target.adds else target.adds) + takes
    return target.adds


def price(
    schedule: Schedule, item: int, link: LinkModel, inside: LinkModel | None = None, hosts: Sequence[Sequence[int]] = ()
) -> float:
    """Return the seconds from the first step to the end of the last.

    An element has `item` bytes. The link `inside` a host may differ; without `hosts` they are those of the schedule.

    >>> round(price(schedule("ring", 8, 250_000), 4, LinkModel(20e-6, 1.25e9)) * 1e3, 2)
    1.68
    """
    home = {rank: number for number, members in enumerate(hosts or schedule.hosts) for rank in members}
    ports, ready = [Port() for _ in range(schedule.ranks)], [0.0] * schedule.ranks
    for step in schedule.steps:
        after = list(ready)
        for source, target, start, stop, adds in step:
            line = inside if inside is not None and home.get(source) == home.get(target) is not None else link
            size = (stop - start) * item
            takes = (size + line.header) / line.bandwidth
            arrives = carry(ports[source], ports[target], ready[source], takes, line.latency)
            if adds and line.reduction:
                arrives = add(ports[target], arrives, size * line.reduction)
            after[target] = max(after[target], arrives)
        ready = after
    return max(ready, default=0.0)


def price_on(schedule: Schedule, routes: Routes, hosts: Sequence[int], link: LinkModel, size: float) -> float:
    """Return the seconds for some bytes on a topology; in each step, all wait for the busiest link.

    `link` has the latency of two cables, and the bandwidth of cables for which the topology has none.
    """
    topology, seconds = routes.topology, 0.0
    for step in schedule.steps:
        ways = [(hosts[source], hosts[target], stop - start) for source, target, start, stop, _ in step]
        carried = loads(routes, ways)
        busiest = busiest_link(topology, carried, link.bandwidth)
        elements = carried.get(busiest, 0.0) / max(1, schedule.length)
        longest = max(len(routes.of(source, target)) for source, target, _ in ways)
        seconds += elements * size / topology.bandwidth(busiest, link.bandwidth) + link.latency * longest / 2
    return seconds


class Formula(msgspec.Struct, frozen=True):
    """Published formula for an algorithm: steps, and elements that all ranks send."""

    steps: int
    moved: int


def formula(algorithm: str, ranks: int, length: int, hosts: Sequence[Sequence[int]] = ()) -> Formula:
    """Return the steps and elements by the formula, for a length of at least the number of ranks.

    >>> formula("halving-doubling", 8, 1000), formula("ring", 8, 1000)
    (Formula(steps=6, moved=14000), Formula(steps=14, moved=14000))
    """
    check_algorithm(algorithm)
    twice = 2 * (ranks - 1) * length
    core = 1 << (ranks.bit_length() - 1)
    log, folds = core.bit_length() - 1, 2 * (core < ranks)
    beyond = 2 * (ranks - core) * length
    if algorithm.startswith("hierarchical"):
        return _of_hosts(hosts or by_host(ranks, 0), length, algorithm.partition(":")[2] or "ring")
    known: Mapping[str, Formula] = {
        "naive": Formula(2, twice),
        "tree": Formula(2 * math.ceil(math.log2(ranks)), twice),
        "butterfly": Formula(log + folds, log * core * length + beyond),
        "halving-doubling": Formula(2 * log + folds, 2 * (core - 1) * length + beyond),
        "ring": Formula(2 * (ranks - 1), twice),
        "direct": Formula(2, twice),
    }
    return known[algorithm] if ranks > 1 else Formula(0, 0)


def _of_hosts(hosts: Sequence[Sequence[int]], length: int, inner: str) -> Formula:
    """Return the formula of `hierarchical`: a ring inside each host, twice, and another algorithm between hosts."""
    least = min(map(len, hosts))
    beyond = sum(len(host) - least for host in hosts)
    between = formula(inner, len(hosts), length)
    inside = 2 * len(hosts) * (least - 1) * length
    return Formula(2 * (least - 1) + between.steps + 2 * bool(beyond), inside + between.moved + 2 * beyond * length)


@functools.lru_cache(maxsize=1024)
def cheapest(
    hosts: tuple[tuple[int, ...], ...],
    length: int,
    item: int,
    link: LinkModel,
    inside: LinkModel | None = None,
    among: tuple[str, ...] = CHOICES,
) -> str:
    """Return the algorithm with the lowest price, the first of equals; for arguments see `schedule` and `price`.

    >>> hosts, link = (tuple(range(8)),), LinkModel(20e-6, 1.25e9)
    >>> [cheapest(hosts, length, 4, link, among=("butterfly", "halving-doubling")) for length in (1000, 250_000)]
    ['butterfly', 'halving-doubling']
    """
    ranks = sum(map(len, hosts))
    schedules = {name: schedule(name, ranks, length, hosts if name == "hierarchical" else ()) for name in among}
    prices = {name: price(candidate, item, link, inside, hosts) for name, candidate in schedules.items()}
    return min(prices, key=lambda name: prices[name])


Traffic = Mapping[str, tuple[int, int, float]]
"""Hosts of sender and receiver, and the amount, by the names of sender and receiver."""
NAMED = 8
"""Most users of the busiest link that are named."""


def draw_on(schedule: Schedule, routes: Routes, hosts: Sequence[int], link: LinkModel | None = None) -> list[str]:
    """Describe the loads of links under a schedule on these hosts, and on the same hosts in two other orders.

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

    Cables without a bandwidth get the default one, or the fastest of the topology.
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
