"""Push and fetch round trips over each carrier, beside what this machine can do at best."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from benchmarks.parts import limits
from benchmarks.parts.shards import Ours
from benchmarks.parts.timing import BenchOptions, Figure, figure, finish, interleave, ratio, spread
from distbelief.cli.tables import number, show
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.places.evaluate import threads
from distbelief.places.processes.peers import Peers
from distbelief.record.machine import machine

OURS = (
    "shared, landed",
    "shared, in place",
    "tcp",
    "tls",
    "shared, landed, 1 shard",
    "shared, in place, 1 shard",
    "a push alone",
    "a fetch alone",
)
LIMITS = ("direct update", "direct update and copy", "raw tcp", "gloo", "doorbell")
TRIPS_LIMIT = 400
"""Most round trips of one measurement."""
SMALL, MIDDLE, LARGE = 4 << 10, 4 << 20, 64 << 20


@dataclass(frozen=True)
class WireOptions(BenchOptions):
    """Options of the benchmark wire."""

    sizes: tuple[int, ...] = (SMALL, 256 << 10, 1 << 20, MIDDLE, LARGE)
    """Bytes that are pushed, and fetched, in one round trip; multiples of 128."""
    shards: int = 2
    """Shards that the bytes lie on, as in a job; rows that say so, and tcp and tls beside one raw socket, have one."""
    repeats: int = 15
    """Rounds in which all carriers and limits take their turns."""
    seconds: float = 0.04
    """About how long one turn lasts."""
    QUICK: ClassVar[Mapping[str, object]] = {"sizes": (SMALL, 256 << 10), "repeats": 3, "seconds": 0.002}
    """Defaults with --quick."""


class Contender(Protocol):
    """A carrier or a limit."""

    def trips(self, count: int) -> float:
        """Seconds per round trip, over `count` of them."""
        ...

    def check(self) -> None:
        """Raise where what was measured did not happen."""

    def close(self) -> None:
        """Let go of everything."""


def run(options: WireOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: a size or a number of repeats that cannot be.
    """
    for size in options.sizes:
        if size < 128 or size % 128:
            raise UsageError(f"--sizes {size}: must be a positive multiple of 128 bytes")
    sizes, repeats, seconds = options.sizes, options.repeats, options.seconds
    if options.shards < 1:
        raise UsageError(f"--shards {options.shards}: must be 1 or more")
    with threads(1):
        facts = machine()
        measured = {str(size): _of_size(size, options.shards, repeats, seconds) for size in sizes}
    result = {
        "bench": "wire",
        "machine": facts,
        "shards": options.shards,
        "repeats": repeats,
        "sizes": measured,
        "figures": _figures(measured),
    }
    if not options.quiet:
        _show(measured)
    return finish(result, options)


def _of_size(size: int, shards: int, repeats: int, seconds: float) -> Json:
    """All carriers and limits, for one size."""
    with Peers() as peers, contextlib.ExitStack() as stack:
        contenders: dict[str, Contender] = {
            "shared, landed": Ours(peers, "shared", size, shards),
            "shared, in place": Ours(peers, "shared", size, shards, "in place"),
            "tcp": Ours(peers, "tcp", size),
            "tls": Ours(peers, "tls", size),
            "shared, landed, 1 shard": Ours(peers, "shared", size),
            "shared, in place, 1 shard": Ours(peers, "shared", size, 1, "in place"),
            "a push alone": Ours(peers, "shared", size, 1, "push"),
            "a fetch alone": Ours(peers, "shared", size, 1, "fetch"),
            "direct update": limits.Direct(size),
            "direct update and copy": limits.DirectAndCopy(size),
            "raw tcp": limits.RawTcp(peers, size),
            "gloo": limits.Gloo(peers, size),
            "doorbell": limits.Doorbell(peers),
        }
        for contender in contenders.values():
            stack.callback(contender.close)
        counts = {}
        for name, contender in contenders.items():
            contender.trips(2)  # the first ones touch memory that was never touched
            counts[name] = max(1, min(TRIPS_LIMIT, round(seconds / contender.trips(2))))
        taken = interleave(
            {name: partial(_turn, contender, counts[name]) for name, contender in contenders.items()}, repeats
        )
        for contender in contenders.values():
            contender.check()
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "seconds": medians,
        "spread": {name: spread(values) for name, values in taken.items()},
        "gigabytes_per_second": {name: size / value / 1e9 for name, value in medians.items() if name != "doorbell"},
        "least_seconds": {name: min(values) for name, values in taken.items()},
        "of_direct": {name: ratio(taken["direct update"], taken[name]) for name in (*OURS, "direct update and copy")},
        "of_gloo": {name: ratio(taken["gloo"], taken[name]) for name in OURS},
        "of_raw_tcp": {name: ratio(taken["raw tcp"], taken[name]) for name in OURS},
        "of_tcp": {"tls": ratio(taken["tcp"], taken["tls"])},
        "doorbells": {name: ratio(taken[name], taken["doorbell"]) for name in OURS},
    }


def _turn(contender: Contender, count: int) -> float:
    contender.trips(1)  # brings its data back into the caches, as in a run of its own
    return contender.trips(count)


def _figures(measured: Json) -> list[Figure]:
    """The promised figures, as far as their sizes were measured."""
    figures = []
    for size, told, landed, in_place in ((MIDDLE, "4 MB", 0.45, 0.5), (LARGE, "64 MB", 0.6, 0.8)):
        if one := measured.get(str(size)):
            figures += [
                figure(f"shared, landed, {told}: of the direct update", one["of_direct"]["shared, landed"], landed),
                figure(
                    f"shared, in place, {told}: of the direct update", one["of_direct"]["shared, in place"], in_place
                ),
                figure(f"shared, landed, {told}: times gloo", one["of_gloo"]["shared, landed"], 4.0),
                figure(f"tcp, {told}: of a raw blocking socket", one["of_raw_tcp"]["tcp"], 0.85),
            ]
            if size == MIDDLE:
                figures.append(figure(f"tls, {told}: of plain tcp", one["of_tcp"]["tls"], 0.5))
    if one := measured.get(str(SMALL)):
        for name in ("a push alone", "a fetch alone"):
            figures.append(figure(f"shared, 4 kB, {name}: of a doorbell's", one["doorbells"][name], 2.0, lower=True))
    return figures


def _show(measured: Json) -> None:
    def name_of(size: str) -> str:
        return f"{int(size) >> 20} MB" if int(size) >= 1 << 20 else f"{int(size) >> 10} kB"

    columns = [f"{name_of(size)}, {unit}" for size in measured for unit in ("us", "GB/s")]
    rows = []
    for name in (*OURS, *LIMITS):
        row = [name]
        for one in measured.values():
            rate = one["gigabytes_per_second"].get(name)
            row += [number(one["seconds"][name] * 1e6), number(rate) if rate else ""]
        rows.append(row)
    show("a push and a fetch, the update applied; GB/s each way", ("", *columns), rows)
    rows = []
    for what, key in (("the direct update", "of_direct"), ("gloo", "of_gloo"), ("a raw socket", "of_raw_tcp")):
        rows += [[f"{name}: speed, of {what}", *(number(one[key][name]) for one in measured.values())] for name in OURS]
    rows.append(["tls: speed, of plain tcp", *(number(one["of_tcp"]["tls"]) for one in measured.values())])
    rows.append(
        [
            "direct update and copy: of the direct update",
            *(number(one["of_direct"]["direct update and copy"]) for one in measured.values()),
        ]
    )
    show("ratios", ("", *map(name_of, measured)), rows)
