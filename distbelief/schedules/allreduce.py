"""Algorithms of all-reduce, each a function that returns its steps (`schedules/schedule`).

Each works for any number of ranks and any length. If several ranks add up the same elements, all of them add the same
operands, so that they end with the same bits. If an algorithm needs a power of two, each rank beyond it first gives its
elements to another, and gets the sum at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest

from distbelief.errors import UsageError, unknown
from distbelief.schedules.schedule import Move, Postcondition, Schedule, Step
from distbelief.sharding.layout import Range

Steps = list[list[Move]]


def cut(within: Range, parts: int) -> list[Range]:
    """Cut a range into parts that are as equal as possible; some are empty if it is shorter.

    >>> [part.size for part in cut(Range(0, 7), 3)]
    [2, 2, 3]
    """
    return [Range(a, b) for a, b in pairwise(within.start + within.size * part // parts for part in range(parts + 1))]


def _all_at_once(moves: Iterable[tuple[int, int, Range]], adds: bool) -> list[Move]:
    return [Move(source, target, part.start, part.stop, adds) for source, target, part in moves if part.size]


def naive(members: Sequence[int], whole: Range) -> Steps:
    """Send everything to the first rank, which sends the sum to all."""
    root, *others = members
    adding = _all_at_once(((other, root, whole) for other in others), True)
    return [adding, _all_at_once(((root, other, whole) for other in others), False)]


def tree(members: Sequence[int], whole: Range) -> Steps:
    """Add up along a binomial tree to the first rank, and send the sum back along it."""
    up: list[list[tuple[int, int]]] = []
    distance = 1
    while distance < len(members):
        up.append([(i + distance, i) for i in range(0, len(members) - distance, 2 * distance)])
        distance *= 2
    adding = [_all_at_once(((members[a], members[b], whole) for a, b in pairs), True) for pairs in up]
    return adding + [_all_at_once(((members[b], members[a], whole) for a, b in pairs), False) for pairs in reversed(up)]


def _for_others(pairs: Sequence[tuple[int, int]], whole: Range, inner: Steps) -> Steps:
    """Have the first of each pair give its elements to the second before some steps, and get the sum after."""
    fold = _all_at_once(((extra, partner, whole) for extra, partner in pairs), True)
    return [fold, *inner, _all_at_once(((partner, extra, whole) for extra, partner in pairs), False)]


def _folded(inner: Callable[[Sequence[int], Range], Steps], members: Sequence[int], whole: Range) -> Steps:
    """Extend an algorithm for powers of two to any number of ranks."""
    core = 1 << (len(members).bit_length() - 1)
    return _for_others(list(zip(members[core:], members, strict=False)), whole, inner(members[:core], whole))


def butterfly(members: Sequence[int], whole: Range) -> Steps:
    """Swap all elements with partners at distance 1, 2, 4, ..., and add (recursive doubling)."""

    def swap(core: Sequence[int], whole: Range) -> Steps:
        distances = [1 << bit for bit in range(len(core).bit_length() - 1)]
        return [_all_at_once(((core[i ^ d], core[i], whole) for i in range(len(core))), True) for d in distances]

    return _folded(swap, members, whole)


def halving_doubling(members: Sequence[int], whole: Range) -> Steps:
    """Halve with partners at distance 1, 2, 4, ..., each adding up the half it keeps; then double (Rabenseifner)."""

    def halve(core: Sequence[int], whole: Range) -> Steps:
        held = [whole] * len(core)
        halving, doubling = [], []
        for distance in (1 << bit for bit in range(len(core).bit_length() - 1)):
            kept = [cut(part, 2)[bool(i & distance)] for i, part in enumerate(held)]
            halving.append(_all_at_once(((core[i ^ distance], core[i], part) for i, part in enumerate(kept)), True))
            doubling.append(_all_at_once(((core[i], core[i ^ distance], part) for i, part in enumerate(kept)), False))
            held = kept
        return halving + doubling[::-1]

    return _folded(halve, members, whole)


def _around(members: Sequence[int], whole: Range, first: int, adds: bool) -> Steps:
    """Send parts along a ring to all but one member.

    The first part that member i sends is part i + `first`.
    """
    count, parts = len(members), cut(whole, len(members))
    pairs = [(member, members[(i + 1) % count]) for i, member in enumerate(members)]
    steps = [[(*pair, parts[(i - t + first) % count]) for i, pair in enumerate(pairs)] for t in range(count - 1)]
    return [_all_at_once(step, adds) for step in steps]


def scatter(members: Sequence[int], whole: Range) -> Steps:
    """Reduce-scatter on a ring: member i ends with the sum of part i."""
    return _around(members, whole, -1, True)


def gather(members: Sequence[int], whole: Range) -> Steps:
    """All-gather on a ring: member i begins with part i, and all end with everything."""
    return _around(members, whole, 0, False)


def ring(members: Sequence[int], whole: Range) -> Steps:
    """Add up parts of the sum on their way around a ring, and send them around once more."""
    return scatter(members, whole) + gather(members, whole)


def direct(members: Sequence[int], whole: Range) -> Steps:
    """Send each member its part, which it adds up and sends to all."""
    # shifted, so that the members do not all send to the same one at once
    count, parts = len(members), cut(whole, len(members))
    pairs = [(i, (i + shift) % count) for shift in range(1, count) for i in range(count)]
    adding = _all_at_once(((members[rank], members[peer], parts[peer]) for rank, peer in pairs), True)
    return [adding, _all_at_once(((members[rank], members[peer], parts[rank]) for rank, peer in pairs), False)]


FLAT: Mapping[str, Callable[[Sequence[int], Range], Steps]] = {
    "naive": naive,
    "tree": tree,
    "butterfly": butterfly,
    "halving-doubling": halving_doubling,
    "ring": ring,
    "direct": direct,
}
"""Algorithms that ignore hosts, by name."""
HIERARCHICAL = "hierarchical"
ALGORITHMS = (*FLAT, HIERARCHICAL)
PLACED = ("native", "auto")
"""Names that leave the choice to the job's place: its own algorithm, or the best one known there."""


def hierarchical(hosts: Sequence[Sequence[int]], whole: Range, inner: str) -> Steps:
    """Reduce-scatter inside each host, all-reduce each piece between hosts, and gather inside each host.

    On a host with more ranks than the smallest host has, each extra rank first gives its elements to one of the others,
    and gets the sum at the end.
    """
    least = min(map(len, hosts))
    beyond = [(extra, host[i % least]) for host in hosts for i, extra in enumerate(host[least:])]
    locals_, pieces = [host[:least] for host in hosts], cut(whole, least)
    phases = (
        [scatter(host, whole) for host in locals_],
        [FLAT[inner]([host[i] for host in locals_], piece) for i, piece in enumerate(pieces)],
        [gather(host, whole) for host in locals_],
    )
    return _for_others(beyond, whole, [step for phase in phases for step in _side_by_side(phase)])


def _side_by_side(many: Sequence[Steps]) -> Steps:
    return [[move for step in steps for move in step] for steps in zip_longest(*many, fillvalue=())]


def broadcast(ranks: int, length: int) -> Schedule:
    """Return the second half of `tree`: the first rank's elements go to all.

    >>> [(move.source, move.target) for move in broadcast(3, 1).moves]
    [(0, 2), (0, 1)]
    """
    steps = [tuple(step) for step in tree(range(ranks), Range(0, length)) if step and not step[0].adds]
    return Schedule("broadcast", ranks, length, tuple(steps), postcondition=Postcondition.FIRST)


def by_host(ranks: int, per_host: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, `per_host` consecutive ranks on each; 0 puts all on one.

    >>> by_host(5, 2)
    ((0, 1), (2, 3), (4,))
    """
    step = per_host or max(ranks, 1)
    return tuple(tuple(range(first, min(first + step, ranks))) for first in range(0, ranks, step))


def check_algorithm(name: str, others: Sequence[str] = ()) -> None:
    """Refuse an algorithm that does not exist; in `hierarchical:NAME`, NAME is the algorithm between hosts."""
    outer, colon, inner = name.partition(":")
    if name in others:
        return
    if outer not in ALGORITHMS or (colon and outer != HIERARCHICAL):
        raise unknown("algorithm", name, (*ALGORITHMS, *others))
    if colon and inner not in FLAT:
        raise unknown(f"algorithm between hosts in {name}", inner, FLAT)


def check_hosts(algorithm: str, per_host: int, auto: bool) -> None:
    """Refuse a number of ranks on each host if the algorithm does not use it.

    `auto` tells whether algorithm auto uses it.
    """
    if per_host and not (algorithm.startswith(HIERARCHICAL) or (auto and algorithm == "auto")):
        algorithms = f"{HIERARCHICAL}{' or auto' if auto else ''}"
        reason = f"--per-host {per_host}: sets the ranks of a host, which --algorithm {algorithm} does not use"
        raise UsageError(f"{reason}: choose {algorithms}, or leave it off")


@lru_cache(maxsize=256)
def schedule(algorithm: str, ranks: int, length: int, hosts: tuple[tuple[int, ...], ...] = ()) -> Schedule:
    """Return the schedule of an algorithm for some number of ranks and elements.

    Args:
        algorithm: one of `ALGORITHMS`; `hierarchical:tree` uses `tree` between hosts, and `hierarchical` uses `ring`.
        ranks: 1 or more.
        length: number of elements, 0 or more.
        hosts: the ranks of each host, each once, for `hierarchical`; without them, all are on one.

    >>> [schedule(name, 8, 1000).moved for name in ("ring", "butterfly", "tree")]
    [14000, 24000, 14000]
    """
    check_algorithm(algorithm)
    if ranks < 1 or length < 0:
        raise UsageError(f"{ranks} ranks with {length} elements: there must be 1 rank or more, and 0 elements or more")
    whole = Range(0, length)
    if algorithm in FLAT:
        steps = FLAT[algorithm](range(ranks), whole)
    else:
        hosts = hosts or by_host(ranks, 0)
        if sorted(rank for host in hosts for rank in host) != list(range(ranks)) or not all(hosts):
            raise UsageError(f"hosts {hosts}: they must have each of the {ranks} ranks once, and none may be empty")
        steps = hierarchical(hosts, whole, algorithm.partition(":")[2] or "ring")
    moving: list[Step] = [tuple(step) for step in steps if step]
    return Schedule(algorithm, ranks, length, tuple(moving), hosts)
