"""Schedules as text: who holds the sum of whose elements after every step, as the symbolic executor has it; and what
they put on the links of a topology.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from zlib import crc32

from distbelief.network.graph import Topology
from distbelief.network.routes import Routes, loads
from distbelief.schedules.price import LinkModel, formula, price, price_on
from distbelief.schedules.proof import SymbolicSum, execute, prove, wanted_ranks
from distbelief.schedules.schedule import Schedule, Step

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw(schedule: Schedule, link: LinkModel, inside: LinkModel | None = None) -> str:
    """What a schedule sends, step by step, and what each rank holds after that; with the price of a megabyte.

    A cell is one part of the vector, and holds a letter for each rank whose elements are in its sum; `=` is the whole.

    Args:
        schedule: of at most 26 ranks; it is proved first.
        link: between two ranks.
        inside: between two of one host.

    >>> from distbelief.schedules.allreduce import schedule
    >>> print(draw(schedule("butterfly", 2, 2), LinkModel(20e-6, 1.25e9)))
    butterfly, 2 ranks: 1 step; all ranks together send 2.0 times the vector
    step 1, added: 1-0 0-1
      rank 0  =
      rank 1  =
    price of 1 MB, at a latency of 20 us and 1.25 GB/s: 0.82 ms
    """
    prove(schedule)
    ranks, count, wanted = schedule.ranks, len(schedule.steps), wanted_ranks(schedule)
    times = schedule.moved / max(schedule.length, 1)
    lines = [
        f"{schedule.algorithm}, {ranks} ranks: {count} step{'' if count == 1 else 's'}; all ranks together send "
        f"{times:.1f} times the vector"
    ]
    states = execute(schedule)
    next(states)
    for number, (step, state) in enumerate(zip(schedule.steps, states, strict=True), 1):
        lines.append(f"step {number}, {_moves(step)}")
        for rank, row in enumerate(state):
            cells = ["=" if held.ranks == wanted else _letters(held) for held in row]
            lines.append(
                f"  rank {rank}  "
                + (" ".join(cell.ljust(ranks) for cell in cells) if ranks > 2 else "".join(cells)).rstrip()
            )
    expected = formula(schedule.algorithm, ranks, schedule.length, schedule.hosts)
    assert expected.moved == schedule.moved
    return "\n".join([*lines, _price(schedule, link, inside)])


def _moves(step: Step) -> str:
    words = {True: list[str](), False: list[str]()}
    for move in step:
        words[move.adds].append(f"{move.source}-{move.target}")
    told = [f"{'added' if adds else 'put'}: {' '.join(dict.fromkeys(pairs))}" for adds, pairs in words.items() if pairs]
    return "; ".join(told)


def _letters(held: SymbolicSum) -> str:
    return "".join(letter for rank, letter in enumerate(LETTERS) if held.ranks >> rank & 1)


def _price(schedule: Schedule, link: LinkModel, inside: LinkModel | None) -> str:
    """That of a megabyte, whatever the length of the schedule is."""
    scale = schedule.length * 4 / 1e6
    scaled = LinkModel(link.latency, link.bandwidth * scale, link.reduction)
    within = LinkModel(inside.latency, inside.bandwidth * scale, inside.reduction) if inside else None
    between = f"at a latency of {link.latency * 1e6:g} us and {link.bandwidth / 1e9:g} GB/s"
    if inside:
        between += f" between hosts, {inside.latency * 1e6:g} us and {inside.bandwidth / 1e9:g} GB/s inside"
    return f"price of 1 MB, {between}: {1e3 * price(schedule, 4, scaled, within):.2f} ms"


def draw_on(schedule: Schedule, routes: Routes, hosts: Sequence[int], link: LinkModel | None) -> str:
    """What a schedule puts on each link of a topology, by the host of each rank; and the price of a megabyte, where
    it is known what other cables are like than those of which the topology says that.
    """
    topology, names = routes.topology, routes.topology.hosts
    used = list(dict.fromkeys(hosts))
    carried = _carried(schedule, routes, hosts)
    busiest = busiest_link(topology, carried, link.bandwidth if link else 0.0)
    pairs = Counter(
        f"{move.source}-{move.target}" for move in schedule.moves
        if busiest in routes.of(hosts[move.source], hosts[move.target])
    )  # fmt: skip
    sends = max(carried.get(2 * host, 0.0) for host in used)
    others = {
        "by names": sorted(used, key=lambda host: names[host]),
        "at random": sorted(used, key=lambda host: crc32(f"{host}".encode())),
    }
    most = {
        what: max(_carried(schedule, routes, [order[used.index(host)] for host in hosts]).values(), default=0.0)
        for what, order in others.items()
    }
    more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    return "\n".join([
        f"{schedule.algorithm} on {topology.name}, in this order: {', '.join(names[host] for host in used)}",
        f"a host sends at most {sends:.2f} times the vector; the least is {2 * (len(used) - 1) / len(used):.2f}",
        f"the busiest link is {topology.link_name(busiest)}: {carried.get(busiest, 0.0):.2f} times the vector, by "
        f"{' '.join([*pairs][:8])}{more}; it would be "
        f"{', '.join(f'{load:.2f} {what}' for what, load in most.items())}",
        *switch_lines(topology, carried),
        *([f"price of 1 MB: {1e3 * price_on(schedule, routes, hosts, link, 1e6):.2f} ms"] if link else []),
    ])  # fmt: skip


def _carried(schedule: Schedule, routes: Routes, hosts: Sequence[int]) -> Mapping[int, float]:
    """Times the vector, by link."""
    length = max(1, schedule.length)
    return loads(routes, ((hosts[one.source], hosts[one.target], one.length / length) for one in schedule.moves))


def busiest_link(topology: Topology, carried: Mapping[int, float], usual: float = 0.0) -> int:
    """Which link takes longest for what it carries, with what is usual where nothing is said: else the most."""
    usual = usual or max(cable.bandwidth for cable in topology.cables) or 1.0
    return max(carried, key=lambda one: carried[one] / (topology.cables[one // 2].bandwidth or usual), default=0)


def switch_lines(topology: Topology, carried: Mapping[int, float]) -> Iterator[str]:
    """A line of each switch that passes something on: what goes to its hosts and later switches, and comes back."""
    names = (*topology.hosts, *topology.switches)
    for switch, name in enumerate(topology.switches, len(topology.hosts)):
        rows = [
            (f"{carried.get(link, 0.0):.2f} there, {carried.get(link ^ 1, 0.0):.2f} back", names[other])
            for other, link in topology.around[switch] if not len(topology.hosts) <= other < switch
        ]  # fmt: skip
        told = []
        for what, group in groupby(rows, key=lambda row: row[0]):
            first, *rest = [other for _, other in group]
            told.append(f"{first}{f' to {rest[-1]}' if rest else ''} {what}")
        if any(carried.get(link) or carried.get(link ^ 1) for _, link in topology.around[switch]) and told:
            yield f"  {name}: {'; '.join(told)}"
