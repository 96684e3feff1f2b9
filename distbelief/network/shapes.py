"""The topologies that a few numbers describe: trees, fat trees, tori, dragonflies and slim flies.

Hosts are at switches, also in a torus: its 4x4x4 nodes are switches with a host each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import prod

from distbelief.errors import UsageError, unknown
from distbelief.network.galois import GaloisField, prime_power
from distbelief.network.graph import MOST_HOSTS, Cable, Topology

Edges = Iterable[tuple[int, int]]
"""Pairs of switches with a cable between them."""
EXAMPLES = "tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2 or slim-fly:5"
_NUMBERS = re.compile(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){0,7}")


def is_shape(text: str) -> bool:
    """Whether it is one of these, and no file.

    >>> is_shape("tree:2x2"), is_shape("topology.conf"), is_shape("./10:30/topology.conf")
    (True, False, False)
    """
    return (":" in text and "/" not in text) or text in SHAPES


def shape(text: str) -> Topology:
    """The topology that is written so.

    Raises:
        UsageError: there is none, or it is too large.

    >>> torus = shape("torus:4x4x4")
    >>> len(torus.hosts), len(torus.switches), len(torus.cables) - len(torus.hosts)
    (64, 64, 192)
    """
    name, _, numbers = text.partition(":")
    if name not in SHAPES:
        raise unknown("topology", name, SHAPES)
    if not _NUMBERS.fullmatch(numbers) or ("x" in numbers and name not in ("tree", "torus")):
        raise UsageError(f"--topology {text[:80]}: write it as {EXAMPLES}")
    return SHAPES[name](text, [int(number) for number in numbers.split("x")])


def _few(name: str, hosts: int) -> None:
    """Refuse too many before they are made."""
    if hosts > MOST_HOSTS:
        raise UsageError(f"--topology {name}: has {hosts} hosts; there may be at most {MOST_HOSTS}")


def _topology(name: str, hosts_of: list[int], edges: Edges) -> Topology:
    """So many hosts at each switch, and the cables between switches."""
    at = [switch for switch, count in enumerate(hosts_of) for _ in range(count)]
    cables = [Cable(host, len(at) + switch) for host, switch in enumerate(at)]
    between = sorted({(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]})
    cables += [Cable(len(at) + one, len(at) + other) for one, other in between]
    hosts = [f"host {number}" for number in range(len(at))]
    return Topology(name, hosts, [f"switch {number}" for number in range(len(hosts_of))], cables)


def tree(name: str, sizes: list[int]) -> Topology:
    """So many under the root, so many under each of these, ...: the last are hosts. Each level is numbered in a row."""
    _few(name, prod(sizes))
    levels = [prod(sizes[:depth]) for depth in range(len(sizes))]
    first = [sum(levels[:depth]) for depth in range(len(sizes))]
    edges = [(first[depth - 1] + number // sizes[depth - 1], first[depth] + number)
        for depth in range(1, len(sizes)) for number in range(levels[depth])]  # fmt: skip
    return _topology(name, [0] * first[-1] + [sizes[-1]] * levels[-1], edges)


def fat_tree(name: str, sizes: list[int]) -> Topology:
    """Of switches with k ports (Al-Fares): k pods with k/2 switches at their edge and k/2 above, and (k/2)^2 cores."""
    [k] = sizes
    if k % 2:
        raise UsageError(f"--topology {name}: the ports of a switch are halved: write an even number, such as {k + 1}")
    _few(name, k**3 // 4)
    half, edge, above, core = k // 2, 0, k * k // 2, k * k
    pods, halves = range(k), range(half)
    inside = [(edge + pod * half + i, above + pod * half + j) for pod in pods for i in halves for j in halves]
    upward = [(above + pod * half + j, core + j * half + i) for pod in pods for i in halves for j in halves]
    return _topology(name, [half] * above + [0] * (core - above + half * half), inside + upward)


def torus(name: str, sizes: list[int]) -> Topology:
    """A grid whose rows are rings, in each dimension."""
    _few(name, prod(sizes))
    numbers = {place: number for number, place in enumerate(product(*map(range, sizes)))}
    edges = [(number, numbers[(*place[:axis], (place[axis] + 1) % size, *place[axis + 1 :])])
        for place, number in numbers.items() for axis, size in enumerate(sizes)]  # fmt: skip
    return _topology(name, [1] * len(numbers), edges)


def dragonfly(name: str, sizes: list[int]) -> Topology:
    """Balanced (Kim): groups of 2h routers, all joined, with h hosts and h cables to other groups each, of which there
    are 2h^2, each joined with each.
    """
    [h] = sizes
    routers, others = 2 * h, 2 * h * h
    groups = others + 1
    _few(name, groups * routers * h)
    edges = [(g * routers + a, g * routers + b) for g in range(groups) for a in range(routers) for b in range(a)]
    for group, port in product(range(groups), range(others)):
        other = (group + port + 1) % groups
        edges.append((group * routers + port // h, other * routers + (others - 1 - port) // h))
    return _topology(name, [h] * groups * routers, edges)


def slim_fly(name: str, sizes: list[int]) -> Topology:
    """Of McKay, Miller and Siran's graphs (Besta and Hoefler): 2q^2 routers, none more than two cables apart."""
    [q] = sizes
    if q % 4 == 2 or q < 3 or prime_power(q) is None:
        usable = [one for one in range(3, 2 * q + 8) if prime_power(one)]
        near = sorted(sorted(usable, key=lambda one: abs(one - q))[:2])
        raise UsageError(
            f"--topology {name}: q must be the power of a prime, and more than 2: write {near[0]} or {near[1]}"
        )
    delta = {0: 0, 1: 1, 3: -1}[q % 4]
    at_each = -(-(3 * q - delta) // 4)  # half of the ports between routers
    _few(name, at_each * 2 * q * q)
    field = GaloisField(q)
    powers = field.powers
    even, odd = set(powers[::2]), set(powers[1::2])
    if delta == 0:
        odd.add(1)
    elif delta == -1:
        w = (q + 1) // 4
        even = {powers[i % (q - 1)] for i in (*range(0, 2 * w - 1, 2), *range(2 * w - 1, 4 * w - 2, 2))}
        odd = {powers[i % (q - 1)] for i in (*range(1, 2 * w, 2), *range(2 * w, 4 * w - 1, 2))}
    steps = [(half * q * q, y, other) for half, allowed in enumerate((even, odd)) for y in range(q)
        for other in range(q) if field.plus(y, other, -1) in allowed]  # fmt: skip
    edges = [(first + x * q + y, first + x * q + other) for first, y, other in steps for x in range(q)]
    points = product(range(q), repeat=3)
    edges += [(x * q + field.plus(field.times(m, x), c), q * q + m * q + c) for x, m, c in points]
    return _topology(name, [at_each] * 2 * q * q, edges)


SHAPES: Mapping[str, Callable[[str, list[int]], Topology]] = {
    "tree": tree, "fat-tree": fat_tree, "torus": torus, "dragonfly": dragonfly, "slim-fly": slim_fly,
}  # fmt: skip
