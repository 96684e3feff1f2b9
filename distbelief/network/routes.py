"""Routes of messages over a topology, and the loads of its links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from distbelief.network.graph import Topology

Route = tuple[int, ...]
"""Directed links, one after another."""


class Routes:
    """The shortest route of each pair of hosts; of several equally short ones the seed chooses.

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
        """The route from one host to another; empty from a host to itself."""
        if (source, target) not in self._known:
            self._known[source, target] = self._found(source, target)
        return self._known[source, target]

    def distances(self, target: int) -> list[int]:
        """Count the links from each vertex to one; -1 where there is no way."""
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

    def _found(self, source: int, target: int) -> Route:
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
    """Bytes that each directed link carries of messages, each from a host to a host and of so many bytes.

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
    """The link that takes longest for its load; a cable without a bandwidth has the usual one, or the fastest's."""
    usual = usual or max(cable.bandwidth for cable in topology.cables) or 1.0
    return max(carried, key=lambda link: carried[link] / topology.bandwidth(link, usual), default=0)
