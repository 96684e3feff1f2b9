"""The algorithms of all-reduce, each a function that writes down its steps (`schedules/schedule`).

Each works for any number of ranks and any length. Every addition that two ranks make of the same elements has the same
two operands, so that all ranks end with the same bits. Where an algorithm wants a power of two, the ranks beyond it
give theirs to another first and are given the sum last.
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
    """A range in so many parts, as equal as can be; some are empty where it is shorter.

    >>> [part.size for part in cut(Range(0, 7), 3)]
    [2, 2, 3]
    """
    return [Range(a, b) for a, b in pairwise(within.start + within.size * part // parts for part in range(parts + 1))]


def _all_at_once(moves: Iterable[tuple[int, int, Range]], adds: bool) -> list[Move]:
    return [Move(source, target, part.start, part.stop, adds) for source, target, part in moves if part.size]


def naive(members: Sequence[int], whole: Range) -> Steps:
    """Everybody sends all to the first, which sends the sum to everybody."""
    root, *others = members
    adding = _all_at_once(((other, root, whole) for other in others), True)
    return [adding, _all_at_once(((root, other, whole) for other in others), False)]


def tree(members: Sequence[int], whole: Range) -> Steps:
    """Binomial: sums go to the first along a tree of pairs, and the sum goes back along it."""
    up: list[list[tuple[int, int]]] = []
    distance = 1
    while distance < len(members):
        up.append([(i + distance, i) for i in range(0, len(members) - distance, 2 * distance)])
        distance *= 2
    adding = [_all_at_once(((members[a], members[b], whole) for a, b in pairs), True) for pairs in up]
    return adding + [_all_at_once(((members[b], members[a], whole) for a, b in pairs), False) for pairs in reversed(up)]


def _folded(inner: Callable[[Sequence[int], Range], Steps], members: Sequence[int], whole: Range) -> Steps:
    """An algorithm for powers of two, for any number of ranks."""
    core = 1 << (len(members).bit_length() - 1)
    beyond = list(zip(members[core:], members, strict=False))
    fold = _all_at_once(((extra, partner, whole) for extra, partner in beyond), True)
    unfold = _all_at_once(((partner, extra, whole) for extra, partner in beyond), False)
    return [fold, *inner(members[:core], whole), unfold]


def butterfly(members: Sequence[int], whole: Range) -> Steps:
    """Recursive doubling: partners at distance 1, 2, 4, ... swap all that they have, and add."""

    def swap(core: Sequence[int], whole: Range) -> Steps:
        distances = [1 << bit for bit in range(len(core).bit_length() - 1)]
        return [_all_at_once(((core[i ^ d], core[i], whole) for i in range(len(core))), True) for d in distances]

    return _folded(swap, members, whole)


def halving_doubling(members: Sequence[int], whole: Range) -> Steps:
    """Rabenseifner: partners at distance 1, 2, 4, ... send each other the half that the other keeps; then back.

    Half way each has a part of the sum.
    """

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


def scatter(members: Sequence[int], whole: Range) -> Steps:
    """Reduce-scatter on a ring: member i ends with the sum of part i."""
    count, parts = len(members), cut(whole, len(members))
    pairs = [(member, members[(i + 1) % count]) for i, member in enumerate(members)]
    steps = [[(*pair, parts[(i - t - 1) % count]) for i, pair in enumerate(pairs)] for t in range(count - 1)]
    return [_all_at_once(step, True) for step in steps]


def gather(members: Sequence[int], whole: Range) -> Steps:
    """All-gather on a ring: member i begins with part i, and all end with all."""
    count, parts = len(members), cut(whole, len(members))
    pairs = [(member, members[(i + 1) % count]) for i, member in enumerate(members)]
    steps = [[(*pair, parts[(i - t) % count]) for i, pair in enumerate(pairs)] for t in range(count - 1)]
    return [_all_at_once(step, False) for step in steps]


def ring(members: Sequence[int], whole: Range) -> Steps:
    """Parts of the sum grow on their way around a ring, and go around once more."""
    return scatter(members, whole) + gather(members, whole)


def direct(members: Sequence[int], whole: Range) -> Steps:
    """Everybody sends each other his part, which adds them up and sends everybody the sum.

    They do so in an order in which nobody is sent to by all at once.
    """
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
"""The algorithms that know nothing of hosts, by name."""
HIERARCHICAL = "hierarchical"
ALGORITHMS = (*FLAT, HIERARCHICAL)
PLACED = ("native", "auto")
"""Names for the choice of the place where a job runs: its own way, and the best by what is known there."""


def hierarchical(hosts: Sequence[Sequence[int]], whole: Range, inner: str) -> Steps:
    """Reduce-scatter inside each host, an all-reduce of each local rank's piece between hosts, gather inside each host.

    On a host with more ranks than the smallest one, those beyond give theirs to another first, and are given the sum.
    """
    least = min(map(len, hosts))
    beyond = [(extra, host[i % least]) for host in hosts for i, extra in enumerate(host[least:])]
    locals_, pieces = [host[:least] for host in hosts], cut(whole, least)
    everywhere = [FLAT[inner]([host[i] for host in locals_], piece) for i, piece in enumerate(pieces)]
    return [
        *_in_turn(beyond, whole, True),
        *_side_by_side([scatter(host, whole) for host in locals_]),
        *_side_by_side(everywhere),
        *_side_by_side([gather(host, whole) for host in locals_]),
        *_in_turn([(partner, extra) for extra, partner in beyond], whole, False),
    ]


def _in_turn(pairs: Sequence[tuple[int, int]], whole: Range, adds: bool) -> Steps:
    return [_all_at_once(((source, target, whole) for source, target in pairs), adds)]


def _side_by_side(many: Sequence[Steps]) -> Steps:
    return [[move for step in steps for move in step] for steps in zip_longest(*many, fillvalue=())]


def broadcast(ranks: int, length: int) -> Schedule:
    """The second half of `tree`: the first rank's elements go to all.

    >>> [(move.source, move.target) for move in broadcast(3, 1).moves]
    [(0, 2), (0, 1)]
    """
    steps = [tuple(step) for step in tree(range(ranks), Range(0, length)) if step and not step[0].adds]
    return Schedule("broadcast", ranks, length, tuple(steps), postcondition=Postcondition.FIRST)


def by_host(ranks: int, per_host: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, where so many follow each other on one; 0 is all on one.

    >>> by_host(5, 2)
    ((0, 1), (2, 3), (4,))
    """
    step = per_host or max(ranks, 1)
    return tuple(tuple(range(first, min(first + step, ranks))) for first in range(0, ranks, step))


def check_algorithm(name: str, others: Sequence[str] = ()) -> None:
    """Refuse what is no algorithm, and none of some others; `hierarchical:NAME` names the one between hosts.

    Raises:
        UsageError: with the nearest known name.
    """
    outer, colon, inner = name.partition(":")
    if name in others:
        return
    if outer not in ALGORITHMS or (colon and outer != HIERARCHICAL):
        raise unknown("algorithm", name, (*ALGORITHMS, *others))
    if colon and inner not in FLAT:
        raise unknown(f"algorithm between hosts in {name}", inner, FLAT)


def check_hosts(algorithm: str, per_host: int, auto: bool) -> None:
    """Refuse to be told who is on one host where nobody asks.

    Nobody does for an algorithm that knows of no hosts, or for auto, where `auto` says that it does not look.

    Raises:
        UsageError: with the algorithms that ask.

    >>> check_hosts("hierarchical:tree", 4, auto=False), check_hosts("ring", 0, auto=False)
    (None, None)
    """
    if per_host and not (algorithm.startswith(HIERARCHICAL) or (auto and algorithm == "auto")):
        algorithms = f"{HIERARCHICAL}{' or auto' if auto else ''}"
        reason = f"--per-host {per_host}: says who is on one host, which --algorithm {algorithm} does not ask"
        raise UsageError(f"{reason}: name {algorithms}, or leave it off")


@lru_cache(maxsize=256)
def schedule(algorithm: str, ranks: int, length: int, hosts: tuple[tuple[int, ...], ...] = ()) -> Schedule:
    """The schedule of an algorithm for so many ranks and elements.

    Args:
        algorithm: one of `ALGORITHMS`; `hierarchical:tree` names the one between hosts, which is `ring` where none is.
        ranks: 1 or more.
        length: elements, 0 or more.
        hosts: the ranks of each host, for `hierarchical`; all are on one where none are given.

    Raises:
        UsageError: there is no such algorithm, no rank, or hosts that do not have every rank once.

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
