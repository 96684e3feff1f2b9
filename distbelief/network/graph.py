"""A topology: hosts, switches, and the cables between them, each of which is two directed links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple

from distbelief.errors import UsageError

MOST_HOSTS = 1 << 14
"""Most hosts of a topology; switches are as many at most."""


class Cable(NamedTuple):
    """A cable between two vertices: of cable i, link 2i goes from one to the other, and link 2i + 1 back."""

    one: int
    other: int
    bandwidth: float = 0.0
    """Bytes per second each way; 0 where nothing is said of it."""


class Topology:
    """Hosts and switches by name, and cables. Vertices are numbered in their order, hosts first; a host has one cable.

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
        """All hosts in depth-first order from the first switch: those under any switch of a tree follow each other."""
        stack, seen = [len(self.hosts) if self.switches else 0], dict[int, None]()
        while stack:
            if (vertex := stack.pop()) not in seen:
                seen[vertex] = None
                stack += [other for other, _ in reversed(self.around[vertex])]
        return tuple(vertex for vertex in seen if vertex < len(self.hosts))

    def first(self, count: int, asker: str) -> tuple[int, ...]:
        """The first hosts of the walk, so many.

        Raises:
            UsageError: there are fewer.
        """
        if count > len(self.hosts):
            raise UsageError(
                f"--topology {self.name}: has {len(self.hosts)} hosts, and {asker} asks for {count}: name a larger "
                "topology, or fewer hosts"
            )
        return self.walk[:count]

    def named(self, names: Sequence[str]) -> tuple[int, ...]:
        """The hosts of those names, in the order of the walk.

        Raises:
            UsageError: one is not there.
        """
        known = {*self.hosts}
        if lacking := [name for name in names if name not in known]:
            some = ", ".join([*self.hosts[:8], *["..."] * (len(known) > 8)])
            reason = f"unknown host {lacking[0]!r}; add it to the Nodes= of its switch, as {some}"
            raise UsageError(f"--topology {self.name}: {reason}")
        wanted = {*names}
        return tuple(host for host in self.walk if self.hosts[host] in wanted)

    def switch_of(self, host: int) -> int:
        """The vertex at the other end of a host's cable."""
        return self.around[host][0][0]

    def uplink(self, host: int) -> int:
        """The link from a host to its switch."""
        return self.around[host][0][1]

    def bandwidth(self, link: int, usual: float) -> float:
        """Bytes per second of a link; the usual ones where nothing is said of it."""
        return self.cables[link // 2].bandwidth or usual

    def link_name(self, link: int) -> str:
        """The names of a link's ends, from the one to the other."""
        cable, names = self.cables[link // 2], (*self.hosts, *self.switches)
        ends = (names[cable.one], names[cable.other])
        return " to ".join(reversed(ends) if link % 2 else ends)

    def ends_at_host(self, link: int) -> bool:
        """Return whether a link is a host's own, which several hosts do not share."""
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
    # neighbours in the walk, which may be under one switch further up, follow each other late
    step = round(len(groups) ** 0.5)
    apart = [group for first in range(step) for group in [*groups.values()][first::step]]
    return [place for place in chain.from_iterable(zip_longest(*apart)) if place is not None]
