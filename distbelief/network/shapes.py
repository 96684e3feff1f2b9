"""Topologies that a few numbers describe: trees, fat trees, tori, dragonflies and slim flies.

Hosts are attached to switches, even in a torus: its nodes are switches with one host each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import prod

from distbelief.errors import UsageError, unknown
from distbelief.network.graph import MOST_HOSTS, Cable, Topology

Switches = tuple[list[int], Iterable[tuple[int, int]]]
"""Number of hosts at each switch, and pairs of switches with a cable between them."""
EXAMPLES = "tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2 or slim-fly:5"
_NUMBERS = re.compile(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){0,7}")


def is_shape(text: str) -> bool:
    """Return whether the text of `--topology` is a shape rather than a file.

    >>> is_shape("tree:2x2"), is_shape("topology.conf"), is_shape("./10:30/topology.conf")
    (True, False, False)
    """
    return (":" in text and "/" not in text) or text in SHAPES


def shape(text: str) -> Topology:
    """Make the topology of a shape, or raise a `UsageError`.

    >>> torus = shape("torus:4x4x4")
    >>> len(torus.hosts), len(torus.switches), len(torus.cables) - len(torus.hosts)
    (64, 64, 192)
    """
    name, _, numbers = text.partition(":")
    if name not in SHAPES:
        raise unknown("topology", name, SHAPES)
    if not _NUMBERS.fullmatch(numbers) or ("x" in numbers and name not in ("tree", "torus")):
        raise UsageError(f"--topology {text[:80]}: write it as {EXAMPLES}")
    (make, most), sizes = SHAPES[name], [int(number) for number in numbers.split("x")]
    if prod(sizes) > most:
        raise UsageError(f"--topology {text}: there may be at most {MOST_HOSTS} hosts; write at most {name}:{most}")
    hosts_at, edges = make(*sizes)
    at = [switch for switch, count in enumerate(hosts_at) for _ in range(count)]
    cables = [Cable(host, len(at) + switch) for host, switch in enumerate(at)]
    between = sorted({(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]})
    cables += [Cable(len(at) + a, len(at) + b) for a, b in between]
    hosts = [f"host {number}" for number in range(len(at))]
    return Topology(text, hosts, [f"switch {number}" for number in range(len(hosts_at))], cables)


def tree(*sizes: int) -> Switches:
    """Make a tree in which each vertex at level i has `sizes[i]` children; those of the last level are hosts."""
    levels = [prod(sizes[:depth]) for depth in range(len(sizes))]
    first = [sum(levels[:depth]) for depth in range(len(sizes))]
    edges = [
        (first[depth - 1] + number // sizes[depth - 1], first[depth] + number)
        for depth in range(1, len(sizes))
        for number in range(levels[depth])
    ]
    return [0] * first[-1] + [sizes[-1]] * levels[-1], edges


def fat_tree(k: int) -> Switches:
    """Make a fat tree of switches with k ports (Al-Fares): k pods of k/2 edge and k/2 upper switches, (k/2)^2 cores."""
    if k % 2:
        raise UsageError(f"--topology fat-tree:{k}: a switch's ports are halved; write an even number, such as {k + 1}")
    half, edge, above, core = k // 2, 0, k * k // 2, k * k
    pods, halves = range(k), range(half)
    inside = [(edge + pod * half + i, above + pod * half + j) for pod in pods for i in halves for j in halves]
    upward = [(above + pod * half + j, core + j * half + i) for pod in pods for i in halves for j in halves]
    return [half] * above + [0] * (core - above + half * half), inside + upward


def torus(*sizes: int) -> Switches:
    """Make a grid whose rows are rings in each dimension."""
    numbers = {place: number for number, place in enumerate(product(*map(range, sizes)))}
    edges = [
        (number, numbers[(*place[:axis], (place[axis] + 1) % size, *place[axis + 1 :])])
        for place, number in numbers.items()
        for axis, size in enumerate(sizes)
    ]
    return [1] * len(numbers), edges


def dragonfly(h: int) -> Switches:
    """Make a balanced dragonfly (Kim): 2h^2 + 1 groups of 2h routers with h hosts and h outer cables each."""
    routers, others = 2 * h, 2 * h * h
    groups = others + 1
    edges = [(g * routers + a, g * routers + b) for g in range(groups) for a in range(routers) for b in range(a)]
    for group, port in product(range(groups), range(others)):
        other = (group + port + 1) % groups
        edges.append((group * routers + port // h, other * routers + (others - 1 - port) // h))
    return [h] * groups * routers, edges


def slim_fly(q: int) -> Switches:
    """Make a graph of McKay, Miller and Siran (Besta and Hoefler): 2q^2 routers, at most two cables apart."""
    if q not in (usable := [candidate for candidate in range(3, 20) if prime_power(candidate)]):
        words = ", ".join(map(str, usable))
        raise UsageError(
            f"--topology slim-fly:{q}: q must be the power of a prime, and more than 2; write one of {words}"
        )
    field = GaloisField(q)
    powers, count = [*field.powers, 1], q // 2 if q % 2 == 0 else (q + 1) // 4
    edges, line = list[tuple[int, int]](), range(q)
    for half in (0, 1):
        steps = powers[half : 2 * count : 2]
        steps += [field.plus(0, step, -1) for step in steps]  # links go both ways; for an even q both sets are the same
        first = half * q * q
        edges += [
            (first + x * q + y, first + x * q + field.plus(y, step)) for x in line for y in line for step in steps
        ]
    edges += [(x * q + field.plus(field.times(m, x), c), q * q + m * q + c) for x in line for m in line for c in line]
    return [-(-3 * q // 4)] * 2 * q * q, edges


SHAPES: Mapping[str, tuple[Callable[..., Switches], int]] = {
    "tree": (tree, MOST_HOSTS),
    "fat-tree": (fat_tree, 40),
    "torus": (torus, MOST_HOSTS),
    "dragonfly": (dragonfly, 7),
    "slim-fly": (slim_fly, 19),
}
"""Function that makes each shape, and the largest product of its numbers."""


def prime_power(number: int) -> tuple[int, int] | None:
    """Return the prime and the exponent of a power of a prime, or None.

    >>> prime_power(8), prime_power(12)
    ((2, 3), None)
    """
    prime, exponent = next((p for p in range(2, number + 1) if number % p == 0), 0), 0
    while prime and number % prime == 0:
        number, exponent = number // prime, exponent + 1
    return (prime, exponent) if exponent and number == 1 else None


class GaloisField:
    """GF(q) for a power q of a prime. Elements are the numbers below q; their digits to base p are coefficients.

    >>> field = GaloisField(4)
    >>> field.plus(2, 3), field.times(2, 3)
    (1, 1)
    """

    def __init__(self, q: int) -> None:
        power = prime_power(q)
        assert power is not None, f"there is no field of {q} elements"
        self._prime, degree = power
        self._digits = list(product(range(self._prime), repeat=degree))
        self._elements = {digits: element for element, digits in enumerate(self._digits)}
        self.powers = next(powers for powers in map(self._powers_of_x, range(q)) if len(powers) == q - 1)
        """Powers of a primitive element, from 0 to q - 2, which are all elements but 0."""
        self._logarithms = {element: power for power, element in enumerate(self.powers)}

    def plus(self, a: int, b: int, times: int = 1) -> int:
        """Return a + times * b."""
        digits = zip(self._digits[a], self._digits[b], strict=True)
        return self._elements[tuple([(a + times * b) % self._prime for a, b in digits])]

    def times(self, a: int, b: int) -> int:
        """Return a * b."""
        if not (a and b):
            return 0
        return self.powers[(self._logarithms[a] + self._logarithms[b]) % len(self.powers)]

    def _powers_of_x(self, below: int) -> list[int]:
        """Return the powers of x if x**degree is the element `below`, or none if they are not all elements."""
        powers = [1]
        while True:
            high, *low = self._digits[powers[-1]]
            element = self.plus(self._elements[*low, 0], below, high)
            if element == 0 or element in powers:
                return powers if element == 1 else []
            powers.append(element)
