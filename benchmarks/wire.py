"""Push and fetch round trips over each carrier, compared with the limits of this machine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.parts import limits
from benchmarks.parts.peers import Peers
from benchmarks.parts.shards import Does, Ours
from benchmarks.parts.timing import BenchOptions, Figure, Measured, Table, figure, interleave, medians, ratio, spread
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.lab import number
from distbelief.places.evaluate import threads

OURS: Mapping[str, tuple[str, bool, Does]] = {
    "shared, landed": ("shared", True, "both"),
    "shared, in place": ("shared", True, "in place"),
    "tcp": ("tcp", False, "both"),
    "tls": ("tls", False, "both"),
    "shared, landed, 1 shard": ("shared", False, "both"),
    "shared, in place, 1 shard": ("shared", False, "in place"),
    "a push alone": ("shared", False, "push"),
    "a fetch alone": ("shared", False, "fetch"),
}
"""Carrier, whether the bytes are on all shards or on one, and the kind of round trip."""
LIMITS: Mapping[str, Callable[[Peers, int], limits.Limit]] = {
    "direct update": lambda _, size: limits.Direct(size),
    "direct update and copy": lambda _, size: limits.Direct(size, copies=True),
    "raw tcp": limits.RawTcp,
    "gloo": limits.Gloo,
    "doorbell": lambda peers, _: limits.Doorbell(peers),
}
BESIDE = {"the direct update": "of_direct", "gloo": "of_gloo", "a raw socket": "of_raw_tcp"}
TRIPS_LIMIT = 400
"""Most round trips of one measurement."""
SMALL, MIDDLE, LARGE = 4 << 10, 4 << 20, 64 << 20


@dataclass(frozen=True)
class WireOptions(BenchOptions):
    """Options of the benchmark wire."""

    sizes: tuple[int, ...] = (SMALL, 256 << 10, 1 << 20, MIDDLE, LARGE)
    """Bytes pushed and fetched in a round trip, multiples of 128."""
    shards: int = 2
    """Shards that hold the bytes, as in a job; tcp and tls are also measured with one shard, for comparison with a raw
    socket."""
    repeats: int = 15
    """Rounds in which all carriers and limits take turns."""
    seconds: float = 0.04
    """Approximate seconds of one turn."""


def run(options: WireOptions) -> Measured:
    """Measure."""
    for size in options.sizes:
        if size < 128 or size % 128:
            raise UsageError(f"--sizes {size}: must be a positive multiple of 128 bytes")
    if options.shards < 1:
        raise UsageError(f"--shards {options.shards}: must be 1 or more")
    with threads(1):
        measured = {
            str(size): _of_size(size, options.shards, options.repeats, options.seconds) for size in options.sizes
        }
    fields = {"shards": options.shards, "repeats": options.repeats, "sizes": measured}
    return Measured(fields, _figures(measured), _tables(measured))


def _of_size(size: int, shards: int, repeats: int, seconds: float) -> Json:
    """Measure all carriers and limits for one size."""
    with Peers() as peers, contextlib.ExitStack() as stack:
        contenders: dict[str, Ours | limits.Limit] = {
            name: Ours(peers, carrier, size, shards if spreads else 1, does)
            for name, (carrier, spreads, does) in OURS.items()
        }
        contenders |= {name: make(peers, size) for name, make in LIMITS.items()}
        for contender in contenders.values():
            stack.callback(contender.close)
        counts = {}
        for name, contender in contenders.items():
            contender.trips(2)  # the first round trips touch memory for the first time
            counts[name] = max(1, min(TRIPS_LIMIT, round(seconds / contender.trips(2))))
        taken = interleave(
            {name: partial(_turn, contender, counts[name]) for name, contender in contenders.items()}, repeats
        )
        for contender in contenders.values():
            contender.check()
    middle = medians(taken)
    return {
        "seconds": middle,
        "spread": {name: spread(values) for name, values in taken.items()},
        "gigabytes_per_second": {name: size / value / 1e9 for name, value in middle.items() if name != "doorbell"},
        "least_seconds": {name: min(values) for name, values in taken.items()},
        "of_direct": {name: ratio(taken["direct update"], taken[name]) for name in (*OURS, "direct update and copy")},
        "of_gloo": {name: ratio(taken["gloo"], taken[name]) for name in OURS},
        "of_raw_tcp": {name: ratio(taken["raw tcp"], taken[name]) for name in OURS},
        "of_tcp": {"tls": ratio(taken["tcp"], taken["tls"])},
        "doorbells": {name: ratio(taken[name], taken["doorbell"]) for name in OURS},
    }


def _turn(contender: Ours | limits.Limit, count: int) -> float:
    contender.trips(1)  # bring its data back into the caches, as in a separate run
    return contender.trips(count)


def _figures(measured: Json) -> list[Figure]:
    figures = []
    for size, told, landed, in_place in ((MIDDLE, "4 MB", 0.45, 0.5), (LARGE, "64 MB", 0.6, 0.8)):
        if one := measured.get(str(size)):
            for ours, promised in (("shared, landed", landed), ("shared, in place", in_place)):
                what = f"{ours}, {told}: relative to the direct update"
                figures.append(figure(what, one["of_direct"][ours], promised))
            figures += [
                figure(f"shared, landed, {told}: relative to gloo", one["of_gloo"]["shared, landed"], 4.0),
                figure(f"tcp, {told}: relative to a raw blocking socket", one["of_raw_tcp"]["tcp"], 0.85),
            ]
            if size == MIDDLE:
                figures.append(figure(f"tls, {told}: relative to plain tcp", one["of_tcp"]["tls"], 0.5))
    if one := measured.get(str(SMALL)):
        for name in ("a push alone", "a fetch alone"):
            figures.append(
                figure(f"shared, 4 kB, {name}: relative to a doorbell", one["doorbells"][name], 2.0, lower=True)
            )
    return figures


def _tables(measured: Json) -> list[Table]:
    names = [f"{int(size) >> 20} MB" if int(size) >= 1 << 20 else f"{int(size) >> 10} kB" for size in measured]
    speeds = []
    for name in (*OURS, *LIMITS):
        rates = [one["gigabytes_per_second"].get(name, 0.0) for one in measured.values()]
        times = [one["seconds"][name] * 1e6 for one in measured.values()]
        cells = [(number(time), number(rate) if rate else "") for time, rate in zip(times, rates, strict=True)]
        speeds.append([name, *itertools.chain.from_iterable(cells)])
    rows = [(f"{name}: speed, of {what}", key, name) for what, key in BESIDE.items() for name in OURS]
    rows += [("tls: speed relative to plain tcp", "of_tcp", "tls")]
    rows += [("direct update and copy: relative to the direct update", "of_direct", "direct update and copy")]
    shares = [[what, *(number(one[key][name]) for one in measured.values())] for what, key, name in rows]
    columns = [f"{name}, {unit}" for name in names for unit in ("us", "GB/s")]
    return [
        Table("a push and a fetch, the update applied; GB/s each way", ("", *columns), speeds),
        Table("ratios", ("", *names), shares),
    ]
