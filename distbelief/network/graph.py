"""Topology (hosts, switches, and cables of two directed links each) and the routes of messages over it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import NamedTuple

from distbelief.errors import UsageError

MOST_HOSTS = 1 << 14
"""Most hosts of a topology, and most switches."""


class Cable(NamedTuple):
    """Cable between two vertices: link 2i of cable i leads from `end` to `other`, and link 2i + 1 leads back."""

    end: int
    other: int
    bandwidth: float = 0.0
    """Bytes per second each way; 0 if unknown."""


class Topology:
    """Hosts and switches by name, and cables. Vertices are numbered in this order, hosts first; a host has one cable.

    >>> pair = Topology("a pair", ["a", "b"], ["s"], [Cable(0, 2), Cable(1, 2)])
    >>> pair.walk, pair.link_name(3)
    ((0, 1), 's to b')
    """

    def __init__(self, name: str, hosts: Sequence[str], switches: Sequence[str], cables: Iterable[Cable]) -> None:
        self.name, self.hosts, self.switches = name, tuple(hosts), tuple(switches)
        self.cables = tuple(cables)
        if not 1 <= len(self.hosts) <= MOST_HOSTS or len(self.switches) > MOST_HOSTS:
            raise UsageError(
                f"--topology {name}: {len(self.hosts)} hosts and {len(self.switches)} switches; write 1 to "
                f"{MOST_HOSTS} hosts, and at most as many switches"
            )
        self.around: list[list[tuple[int, int]]] = [[] for _ in range(len(self.hosts) + len(self.switches))]
        """Neighbours of each vertex in their order, and the links to them."""
        for number, cable in enumerate(self.cables):
            self.around[cable.end].append((cable.other, 2 * number))
            self.around[cable.other].append((cable.end, 2 * number + 1))
        for neighbours in self.around:
            neighbours.sort()

    @cached_property
    def walk(self) -> tuple[int, ...]:
        """Return all hosts in depth-first order from the first switch: neighbours in a tree follow each other."""
        stack, seen = [len(self.hosts) if self.switches else 0], dict[int, None]()
        while stack:
            if (vertex := stack.pop()) not in seen:
                seen[vertex] = None
                stack += [other for other, _ in reversed(self.around[vertex])]
        return tuple(vertex for vertex in seen if vertex < len(self.hosts))

    def first(self, count: int, asker: str) -> tuple[int, ...]:
        """Return the first `count` hosts of the walk, or raise a `UsageError` that names the asker."""
        if count > len(self.hosts):
            raise UsageError(
                f"--topology {self.name}: has {len(self.hosts)} hosts, and {asker} needs {count}: name a larger "
                "topology, or fewer hosts"
            )
        return self.walk[:count]

    def named(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the hosts of some names in the order of the walk, or raise a `UsageError`."""
        known = {*self.hosts}
        if lacking := [name for name in names if name not in known]:
            some = ", ".join([*self.hosts[:8], *["..."] * (len(known) > 8)])
            reason = f"unknown host {lacking[0]!r}; add it to the Nodes= of its switch, as {some}"
            raise UsageError(f"--topology {self.name}: {reason}")
        wanted = {*names}
        return tuple(host for host in self.walk if self.hosts[host] in wanted)

    def switch_of(self, host: int) -> int:
        """Return the switch of a host."""
        return self.around[host][0][0]

    def uplink(self, host: int) -> int:
        """Return the link from a host to its switch."""
        return self.around[host][0][1]

    def bandwidth(self, link: int, usual: float) -> float:
        """Return the bytes per second of a link; `usual` if unknown."""
        return self.cables[link // 2].bandwidth or usual

    def link_name(self, link: int) -> str:
        """Return the names of a link's ends, such as "a to b"."""
        cable, names = self.cables[link // 2], (*self.hosts, *self.switches)
        ends = (names[cable.end], names[cable.other])
        return " to ".join(reversed(ends) if link % 2 else ends)

    def ends_at_host(self, link: int) -> bool:
        """Return whether a link belongs to one host."""
        cable = self.cables[link // 2]
        return min(cable.end, cable.other) < len(self.hosts)


def spread(switches: Sequence[int]) -> list[int]:
    """Order positions in a list of switches so that consecutive ones have different switches, as far as possible.

    >>> spread([7, 7, 7, 8, 8])
    [0, 3, 1, 4, 2]
    """
    groups: dict[int, list[int]] = {}
    for place, switch in enumerate(switches):
        groups.setdefault(switch, []).append(place)
    # neighbours in the walk may share a higher switch: these are separated too
    step = round(len(groups) ** 0.5)
    apart = [group for first in range(step) for group in [*groups.values()][first::step]]
    return [place for place in chain.from_iterable(zip_longest(*apart)) if place is not None]


Route = tuple[int, ...]
"""Consecutive directed links."""


class Routes:
    """Shortest routes between hosts; the seed chooses among equally short ones.

    >>> from distbelief.network.shapes import shape
    >>> topology = shape("tree:2x2")
    >>> [topology.link_name(link) for link in Routes(topology).of(1, 2)]
    ['host 1 to switch 1', 'switch 1 to switch 0', 'switch 0 to switch 2', 'switch 2 to host 2']
    """

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        self.topology, self._seed = topology, seed
        self._distances: dict[int, list[int]] = {}
        self._known: dict[tuple[int, int], Route] = {}

    def of(self, source: int, target: int) -> Route:
        """Return the route from one host to another; empty from a host to itself."""
        if (source, target) not in self._known:
            self._known[source, target] = self._shortest(source, target)
        return self._known[source, target]

    def distances(self, target: int) -> list[int]:
        """Count the links from each vertex to a target; -1 without a route."""
        if target not in self._distances:
            around = self.topology.around
            distances, near = [-1] * len(around), [target]
            distances[target] = 0
            for vertex in near:
                for other, _ in around[vertex]:
                    if distances[other] < 0:
                        distances[other] = distances[vertex] + 1
                        near.append(other)
            self._distances[target] = distances
        return self._distances[target]

    def _shortest(self, source: int, target: int) -> Route:
        if source == target:
            return ()
        topology, links = self.topology, list[int]()
        last, at = topology.switch_of(target), source
        distances = self.distances(last)
        while at != last:
            nearer = [(there, link) for there, link in topology.around[at] if distances[there] == distances[at] - 1]
            drawn = blake2b(f"{self._seed} {source} {target} {at}".encode(), digest_size=4).digest()
            at, link = nearer[int.from_bytes(drawn) % len(nearer)]
            links.append(link)
        return (*links, topology.uplink(target) ^ 1)


def loads(routes: Routes, messages: Iterable[tuple[int, int, float]]) -> Mapping[int, float]:
    """Sum the bytes on each directed link, for messages of (source host, target host, bytes).

    >>> from distbelief.network.shapes import shape
    >>> dict(loads(Routes(shape("tree:2x1")), [(0, 1, 8.0)]))
    {0: 8.0, 5: 8.0, 6: 8.0, 3: 8.0}
    """
    carried: dict[int, float] = defaultdict(float)
    for source, target, size in messages:
        for link in routes.of(source, target):
            carried[link] += size
    return carried


def busiest_link(topology: Topology, carried: Mapping[int, float], usual: float = 0.0) -> int:
    """Return the link that takes longest for its load; unknown bandwidths are `usual`, or else the fastest."""
    usual = usual or max(cable.bandwidth for cable in topology.cables) or 1.0
    return max(carried, key=lambda link: carried[link] / topology.bandwidth(link, usual), default=0)
