"""Slurm's topology.conf: a tree of switches with link bandwidths, read from a file or written from measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import NamedTuple

from distbelief.errors import UsageError
from distbelief.network.graph import MOST_HOSTS, Cable, Topology

MBIT = 125e3
_KNOWN = {"switchname", "switches", "nodes", "linkspeed", "level"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_WORD = re.compile(r"(?:[^\[\],]+|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class SwitchLine(NamedTuple):
    """Switch, with the hosts or switches under it."""

    where: str
    switch: str
    hosts: list[str]
    switches: list[str]
    bandwidth: float
    """Bytes per second of the links to those; 0 if unknown."""


def parse_topology(text: str, path: str) -> Topology:
    r"""Read the tree of switches in the text of a topology.conf, or raise a `UsageError` with the line and the remedy.

    LinkSpeed is taken as Mbit/s, as Slurm defines no unit; 0 and 1 mean unknown, since Slurm writes them for that.

    >>> tree = parse_topology("SwitchName=s0 Nodes=a[1-2]\nSwitchName=s1 Nodes=b\nSwitchName=top Switches=s[0-1]", "f")
    >>> [tree.hosts[host] for host in tree.walk], tree.switches
    (['a1', 'a2', 'b'], ('s0', 's1', 'top'))
    """
    lines: dict[str, SwitchLine] = {}
    for line in _lines(text, path):
        if before := lines.get(line.switch):
            raise UsageError(f"{line.where}: switch {line.switch} is listed twice, also in {before.where}; leave one")
        lines[line.switch] = line
    hosts, switches = _above(lines, "host"), _above(lines, "switch")
    if not hosts:
        raise UsageError(f"--topology {path}: names no host; write lines such as SwitchName=s0 Nodes=node[1-4]")
    _check_tree(lines, switches)
    vertex = {name: len(hosts) + number for number, name in enumerate(lines)}
    cables = [Cable(number, vertex[line.switch], line.bandwidth) for number, line in enumerate(hosts.values())]
    cables += [Cable(vertex[name], vertex[line.switch], line.bandwidth) for name, line in switches.items()]
    return Topology(path, list(hosts), list(lines), cables)


def _above(lines: dict[str, SwitchLine], kind: str) -> dict[str, SwitchLine]:
    """Return the line of the switch above each host, or above each switch."""
    above: dict[str, SwitchLine] = {}
    for line in lines.values():
        for name in line.hosts if kind == "host" else line.switches:
            if before := above.get(name):
                places = f"under {line.switch}, and under {before.switch} by {before.where}"
                raise UsageError(f"{line.where}: {kind} {name} is {places}; leave it under one of them")
            if kind == "switch" and name not in lines:
                raise UsageError(f"{line.where}: there is no line SwitchName={name}; add one, or remove it here")
            above[name] = line
    return above


def _check_tree(lines: dict[str, SwitchLine], above: dict[str, SwitchLine]) -> None:
    """Refuse a cycle, and several roots."""
    known = set[str]()
    """Switches whose root is known."""
    for line in lines.values():
        way, up = {line.switch: None}, above.get(line.switch)
        while up and up.switch not in known:
            if up.switch in way:
                names = [*way]
                cycle = " under ".join([*names[names.index(up.switch) :], up.switch])
                raise UsageError(f"{up.where}: a cycle, {cycle}; remove {names[-1]} from its Switches=")
            way[up.switch] = None
            up = above.get(up.switch)
        known.update(way)
    top, *others = [line for line in lines.values() if line.switch not in above]
    if others:
        joining = f"SwitchName=all Switches={','.join(line.switch for line in (top, *others))}"
        reason = f"nothing joins switches {top.switch} and {others[0].switch}"
        raise UsageError(f"{others[0].where}: {reason}; add a line such as {joining}")


def _lines(text: str, path: str) -> Iterator[SwitchLine]:
    begun = ""
    for number, line in enumerate([*text.splitlines(), ""], 1):  # the last line may end with a continuation mark
        whole = begun + line.partition("#")[0].rstrip()
        begun = whole[:-1] + " " if whole.endswith("\\") else ""
        where, words = f"--topology {path}, line {number}", whole.split()
        if begun or not words:
            continue
        fields = {name.lower(): value for name, _, value in (word.partition("=") for word in words)}
        if strange := [word for word in words if word.partition("=")[0].lower() not in _KNOWN]:
            raise UsageError(f"{where}: {strange[0][:80]!r} belongs to no tree of switches; {_EXAMPLE}")
        if len(fields) < len(words) or not fields.get("switchname") or not fields.keys() & {"nodes", "switches"}:
            raise UsageError(f"{where}: must name one switch, and what is under it; {_EXAMPLE}")
        speed = fields.get("linkspeed", "0")
        if not (speed.isdecimal() and len(speed) < 10):
            raise UsageError(f"{where}: LinkSpeed={speed[:80]} is no whole number of Mbit/s; write LinkSpeed=10000")
        [switch, *more] = _names(fields["switchname"], where)
        if more:
            raise UsageError(f"{where}: names {1 + len(more)} switches; write a line for each")
        inner = _names(fields["switches"], where) if "switches" in fields else []
        # scontrol, which writes levels, also lists a switch's nodes under switches below it
        hosts = [] if inner and "level" in fields else _names(fields["nodes"], where) if "nodes" in fields else []
        yield SwitchLine(where, switch, hosts, inner, int(speed) * MBIT if int(speed) > 1 else 0.0)


_EXAMPLE = "write lines such as SwitchName=s0 Nodes=node[1-4] LinkSpeed=10000 and SwitchName=top Switches=s[0-3]"


def _names(text: str, where: str) -> list[str]:
    """Read names such as node[1-3,7],other."""
    words = _WORD.findall(text)
    if ",".join(words) != text:
        raise UsageError(f"{where}: {text[:80]!r} are no names; write them as node[1-3,7],other")
    names: list[str] = []
    for word in words:
        parts = [_numbers(inside, where) if inside else [plain] for inside, plain in _PART.findall(word)]
        if len(names) + prod(map(len, parts)) > MOST_HOSTS:
            raise UsageError(f"{where}: {text[:80]!r} are more than {MOST_HOSTS} names; write at most that many")
        names += ["".join(choice) for choice in product(*parts)]
    if strange := [name for name in names if not _NAME.fullmatch(name)]:
        raise UsageError(f"{where}: {strange[0][:80]!r} is no name; write names as node[1-3,7],other")
    return names


def _numbers(text: str, where: str) -> list[str]:
    """Read the numbers in a bracket, with as many digits as the first of each range."""
    numbers: list[str] = []
    for word in text.split(","):
        match = _RANGE.fullmatch(word)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < MOST_HOSTS - len(numbers):
            raise UsageError(f"{where}: [{text[:80]}] are no numbers, or too many; write [1-4] or [01-16,20]")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


ALIKE = 1.5
"""Bandwidths that differ by at most this factor count as those of one switch; measurements vary less."""


class Group(NamedTuple):
    """Hosts with larger bandwidths between each other than to all others."""

    hosts: list[str]
    bandwidth: float = 0.0
    """Bytes per second between hosts of different parts; 0 for a single host."""
    parts: tuple[Group, ...] = ()


def measured_topology(hosts: Sequence[str], bandwidths: Mapping[tuple[str, str], float]) -> str:
    """Write the text of a topology.conf from the bandwidth between each pair of hosts, given in order.

    The two groups of hosts with the largest mean bandwidth between them are joined first.

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
        first, other = nearest = max(sums, key=lambda pair: (mean(pair), -pair[0], -pair[1]))
        groups[first] = _joined(groups[first], groups[other], mean(nearest))
        del groups[other], sums[nearest]
        for third in groups.keys() - {first}:
            kept = (first, third) if first < third else (third, first)
            sums[kept] += sums.pop((other, third) if other < third else (third, other))
    [whole] = groups.values()
    lines = ["# LinkSpeed is in Mbit/s, as measured between two hosts at a time"]
    _write(whole, lines)
    return "\n".join([*lines, ""])


def _joined(left: Group, right: Group, bandwidth: float) -> Group:
    """Join two groups under one switch; a group with a similar bandwidth between its parts dissolves into them."""
    parts: list[Group] = []
    for group in (left, right):
        if group.parts and group.bandwidth <= ALIKE * bandwidth:
            parts += group.parts
            bandwidth = max(bandwidth, group.bandwidth)
        else:
            parts.append(group)
    return Group(left.hosts + right.hosts, bandwidth, tuple(parts))


def _write(group: Group, lines: list[str], above: float = 0.0) -> str:
    """Append the lines for a group's switches, and return the name of its top switch."""
    speed = max(2, round((group.bandwidth or above) / MBIT))
    under = f"Nodes={','.join(group.hosts)}"
    if any(part.parts for part in group.parts):
        under = f"Switches={','.join([_write(part, lines, group.bandwidth) for part in group.parts])}"
    name = f"s{len(lines) - 1}"
    lines.append(f"SwitchName={name} LinkSpeed={speed} {under}")
    return name
