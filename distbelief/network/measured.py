"""A tree of switches from the bandwidths measured between each two hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from distbelief.network.slurm import MBIT

ALIKE = 1.5
"""Bandwidths that differ by no more than this factor are those of one switch: a measurement is off by less."""


class Group(NamedTuple):
    """Hosts that are nearer to each other than to all others."""

    hosts: list[str]
    bandwidth: float = 0.0
    """Between those of different parts, in bytes per second; 0 of a single host."""
    parts: tuple[Group, ...] = ()


def measured_topology(hosts: Sequence[str], bandwidths: Mapping[tuple[str, str], float]) -> str:
    """Write the text of a topology.conf in which hosts are together that are near each other.

    The two groups of hosts with the largest mean bandwidth between them are joined first. `bandwidths` has each two
    hosts, in their order.

    >>> near, far = 1.25e8, 3e7
    >>> pairs = {("a", "b"): far, ("a", "c"): near, ("b", "c"): far}
    >>> print(measured_topology("abc", pairs))
    # LinkSpeed is in Mbit/s, as measured between two hosts at a time
    SwitchName=s0 LinkSpeed=1000 Nodes=a,c
    SwitchName=s1 LinkSpeed=240 Nodes=b
    SwitchName=s2 LinkSpeed=240 Switches=s0,s1
    <BLANKLINE>
    """
    groups = {number: Group([host]) for number, host in enumerate(hosts)}
    sums = dict(zip(combinations(groups, 2), (bandwidths[pair] for pair in combinations(hosts, 2)), strict=True))

    def mean(pair: tuple[int, int]) -> float:
        return sums[pair] / (len(groups[pair[0]].hosts) * len(groups[pair[1]].hosts))

    while sums:
        one, other = nearest = max(sums, key=lambda pair: (mean(pair), -pair[0], -pair[1]))
        groups[one] = _joined(groups[one], groups[other], mean(nearest))
        del groups[other], sums[nearest]
        for third in groups.keys() - {one}:
            kept = (one, third) if one < third else (third, one)
            sums[kept] += sums.pop((other, third) if other < third else (third, other))
    [whole] = groups.values()
    lines = ["# LinkSpeed is in Mbit/s, as measured between two hosts at a time"]
    _write(whole, lines)
    return "\n".join([*lines, ""])


def _joined(left: Group, right: Group, bandwidth: float) -> Group:
    """Join two groups under one switch, beside the parts of one between which it is as slow."""
    parts: list[Group] = []
    for group in (left, right):
        if group.parts and group.bandwidth <= ALIKE * bandwidth:
            parts += group.parts
            bandwidth = max(bandwidth, group.bandwidth)
        else:
            parts.append(group)
    return Group(left.hosts + right.hosts, bandwidth, tuple(parts))


def _write(group: Group, lines: list[str], above: float = 0.0) -> str:
    """Add the lines of a group's switches; returns the name of its own."""
    speed = max(2, round((group.bandwidth or above) / MBIT))
    under = f"Nodes={','.join(group.hosts)}"
    if any(part.parts for part in group.parts):
        under = f"Switches={','.join([_write(part, lines, group.bandwidth) for part in group.parts])}"
    name = f"s{len(lines) - 1}"
    lines.append(f"SwitchName={name} LinkSpeed={speed} {under}")
    return name
