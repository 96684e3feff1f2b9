"""A topology: hosts, switches, and the cables between them, each of which is two directed links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple

from distbelief.errors import UsageError, unknown

MOST_HOSTS = 1 << 14
"""Of a topology; switches are as many at most."""


class Cable(NamedTuple):
    """It joins two vertices; link 2i of cable i goes from one to the other, link 2i + 1 back."""

    one: int
    other: int
    bandwidth: float = 0.0
    """Bytes per second each way; 0 is that of the network."""


class Topology:
    """Hosts, each of which has one cable, and switches, by their names: vertices, hosts first, numbered in that order.

    Raises:
        UsageError: there are no hosts, or too many.

    >>> pair = Topology("a pair", ["a", "b"], ["s"], [Cable(0, 2), Cable(1, 2)])
    >>> pair.walk, pair.link_name(3)
    ((0, 1), 's to b')
    """

    def __init__(self, name: str, hosts: Sequence[str], switches: Sequence[str], cables: Iterable[Cable]) -> None:
        self.name, self.hosts, self.switches = name, tuple(hosts), tuple(switches)
        self.cables = tuple(cables)
        if not 1 <= len(self.hosts) <= MOST_HOSTS or len(self.switches) > MOST_HOSTS:
            raise UsageError(
                f"--topology {name}: {len(self.hosts)} hosts and {len(self.switches)} switches; there may be from 1 to "
                f"{MOST_HOSTS} hosts, and as many switches"
            )
        self.around: list[list[tuple[int, int]]] = [[] for _ in range(len(self.hosts) + len(self.switches))]
        """The neighbours of each vertex, in their order, and the links to them."""
        for number, cable in enumerate(self.cables):
            self.around[cable.one].append((cable.other, 2 * number))
            self.around[cable.other].append((cable.one, 2 * number + 1))
        for neighbours in self.around:
            neighbours.sort()

    @cached_property
    def walk(self) -> tuple[int, ...]:
        """All hosts in depth-first order from the first switch, the hosts of a switch first: those under any switch of
        a tree follow each other.
        """
        first = len(self.hosts) if self.switches else 0
        found, seen = [], {first}
        stack = [iter(self.around[first])]
        while stack:
            for vertex, _ in stack[-1]:
                if vertex not in seen:
                    seen.add(vertex)
                    if vertex < len(self.hosts):
                        found.append(vertex)
                    else:
                        stack.append(iter(self.around[vertex]))
                        break
            else:
                stack.pop()
        return tuple(found)

    def first(self, count: int, asked: str) -> tuple[int, ...]:
        """So many hosts, the first of the walk.

        Raises:
            UsageError: there are fewer.
        """
        if count > len(self.hosts):
            raise UsageError(
                f"--topology {self.name}: has {len(self.hosts)} hosts, and {asked} asks for {count}: name a larger "
                "topology, or fewer hosts"
            )
        return self.walk[:count]

    def named(self, names: Sequence[str]) -> tuple[int, ...]:
        """Those hosts, as the walk meets them.

        Raises:
            UsageError: one is not there.
        """
        for name in names:
            if name not in self.hosts:
                known = unknown("host", name, self.hosts)
                raise UsageError(f"--topology {self.name}: {known}; add it to the Nodes= of its switch")
        return tuple(host for host in self.walk if self.hosts[host] in names)

    def switch_of(self, host: int) -> int:
        """The vertex at the other end of a host's cable."""
        return self.around[host][0][0]

    def spread(self, hosts: Sequence[int]) -> list[int]:
        """The places of hosts in such an order that those that follow each other are at different switches.

        >>> from distbelief.network.shapes import shape
        >>> shape("tree:2x3").spread([0, 1, 2, 3, 4])
        [0, 3, 1, 4, 2]
        """
        return spread([self.switch_of(host) for host in hosts])

    def link_name(self, link: int) -> str:
        """From whom to whom a link goes."""
        cable, names = self.cables[link // 2], (*self.hosts, *self.switches)
        ends = (names[cable.one], names[cable.other])
        return " to ".join(reversed(ends) if link % 2 else ends)

    def ends_at_host(self, link: int) -> bool:
        """Whether it is a host's own, which no switch shares out among several hosts."""
        cable = self.cables[link // 2]
        return min(cable.one, cable.other) < len(self.hosts)


def spread(switches: Sequence[int]) -> list[int]:
    """The places of these switches in such an order that those that follow each other are different ones.

    >>> spread([7, 7, 7, 8, 8])
    [0, 3, 1, 4, 2]
    """
    groups: dict[int, list[int]] = {}
    for place, switch in enumerate(switches):
        groups.setdefault(switch, []).append(place)
    rounds = zip_longest(*_far_apart(list(groups.values())))
    return [place for place in chain.from_iterable(rounds) if place is not None]


def _far_apart(groups: list[list[int]]) -> list[list[int]]:
    """The same, so that neighbours in the walk, which may be under one switch further up, follow each other late."""
    step = max(1, round(len(groups) ** 0.5))
    return [group for first in range(step) for group in groups[first::step]]
