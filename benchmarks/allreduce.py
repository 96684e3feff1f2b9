"""All-reduce in shared memory and over role links, compared with gloo's, and on limited lines with its prediction."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.parts import lines
from benchmarks.parts.peers import Peer, Peers
from benchmarks.parts.ranks import SWAPS, play
from benchmarks.parts.timing import BenchOptions, Figure, Measured, Table, figure, interleave, medians, ratio
from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.lab import number
from distbelief.places.join.authority import Authority
from distbelief.places.processes.lending import lend
from distbelief.schedules.allreduce import ALGORITHMS, by_host, schedule
from distbelief.schedules.price import LinkModel, price

MB = 1_000_000
OWN, PLACE, COPY = "gloo", "shared memory, in place", "shared memory, copied in and out"
RING, ENCRYPTED = "our ring over TCP", "our ring over TLS"
LIMITED = (4_000, 64_000, MB, 16 * MB)
TIMES, TURN_SECONDS = 15, 4.0
"""Most measurements of each algorithm between namespaces, and their approximate duration in seconds."""
WITHIN = 5
"""Measurements of each contender in its turn, with encryption."""


@dataclass(frozen=True)
class AllreduceOptions(BenchOptions):
    """Options of the benchmark allreduce."""

    sizes: tuple[int, ...] = (MB, 16 * MB, 64 * MB)
    """Bytes of float32 to add."""
    ranks: tuple[int, ...] = (2, 4)
    """Processes that add them."""
    repeats: int = 9
    """Rounds in which all contenders take turns."""
    namespaces: tuple[int, ...] = ()
    """Numbers of network namespaces on a bridge, such as 4 8, each limited to --rate: measures every algorithm there,
    beside its predicted time. Needs root and iproute2.
    """
    encrypted: tuple[int, ...] = ()
    """Numbers of network namespaces on a bridge, such as 4, each limited to --rate: compares our ring over TLS with
    gloo's own all-reduce without encryption, in turns. Needs root and iproute2.
    """
    rate: int = 100
    """Mbit/s of each namespace in each direction."""


def run(options: AllreduceOptions) -> Measured:
    """Measure."""
    if options.rate != AllreduceOptions.rate and not (options.namespaces or options.encrypted):
        raise UsageError(
            f"--rate {options.rate}: is for a network between --namespaces or --encrypted, and there is none: name one"
        )
    measured = {str(ranks): _on_one_host(ranks, options.sizes, options.repeats) for ranks in options.ranks}
    within = (4_000,) if options.quick else LIMITED
    limited = {str(ranks): _limited(lines.hosts(ranks, options.rate), within) for ranks in options.namespaces}
    encrypted = {
        str(ranks): _encrypted(lines.hosts(ranks, options.rate), options.sizes, options.repeats)
        for ranks in options.encrypted
    }
    lined = f"namespaces of {options.rate} Mbit/s"
    return Measured(
        {"repeats": options.repeats, "one_host": measured, "namespaces": limited, "encrypted": encrypted},
        [
            *_figures(measured, "ranks", {COPY: 3.0, PLACE: 6.0}, "gloo"),
            *_of_prices(limited),
            *_figures(encrypted, lined, {ENCRYPTED: 0.85}, "gloo's in the clear"),
        ],
        [
            *(_table(f"one host, {ranks} ranks: ms", by_size) for ranks, by_size in measured.items()),
            *(_table(f"{ranks} {lined}: ms", by_size) for ranks, by_size in encrypted.items()),
            *(_table_of_prices(f"{ranks} {lined}: ms", by_size) for ranks, by_size in limited.items()),
        ],
    )


def _table(title: str, by_size: Json) -> Table:
    names = dict.fromkeys(name for one in by_size.values() for name in one["seconds"])
    rows = [[name, *(number(1e3 * one["seconds"][name]) for one in by_size.values())] for name in names]
    return Table(title, ("", *(f"{int(size) / MB:g} MB" for size in by_size)), rows)


def _table_of_prices(title: str, by_size: Json) -> Table:
    rows = [
        [name, size, number(1e3 * one["seconds"]), number(1e3 * one["price"])]
        for size, found in by_size.items()
        for name, one in found.items()
    ]
    return Table(title, ("", "bytes", "measured", "price"), rows)


@contextmanager
def _processes(ranks: int, hosts: list[str] | None = None) -> Iterator[Callable[[str, int, int], float]]:
    """Yield a function of algorithm, bytes and times that returns the slowest rank's median of seconds."""
    with lend() as memory, Peers() as peers, tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        store = str(Path(folder) / "store")
        started: list[Peer] = []
        authority = Authority("bench")
        for rank in range(ranks):
            where = (hosts[rank], authority.issue(roles.replica(rank))) if hosts else ("", None)
            started.append(peers.start(f"rank {rank}", 1, play, rank, ranks, store, os.getpid(), memory, *where))

        def measure(how: str, size: int, times: int) -> float:
            for peer in started:
                peer.say(f"{how}|{size}|{times}")
            taken = [[float(one) for one in peer.hear().split()] for peer in started]
            return float(statistics.median([max(one) for one in zip(*taken, strict=True)]))

        for peer in started:
            peer.hear()
        yield measure
        for peer in started:
            peer.say("end||")
        for peer in started:
            peer.hear()


def _by_turns(
    measure: Callable[[str, int, int], float], hows: Mapping[str, str], size: int, times: int, repeats: int
) -> Json:
    """Measure the ways to add some bytes after a warm-up, relative to gloo's own all-reduce."""
    for how in hows.values():
        measure(how, size, 1)
    taken = interleave({name: partial(measure, how, size, times) for name, how in hows.items()}, repeats)
    shares = {name: ratio(taken[OWN], values) for name, values in taken.items()}
    return {"seconds": medians(taken), "faster_than_gloo": shares}


def _on_one_host(ranks: int, sizes: tuple[int, ...], repeats: int) -> Json:
    hows = {OWN: "native", PLACE: "place", COPY: "copy", RING: "ring"}
    with _processes(ranks) as measure:
        return {str(size): _by_turns(measure, hows, size, max(1, min(50, 16 * MB // size)), repeats) for size in sizes}


def _figures(measured: Json, where: str, promises: Mapping[str, float], beside: str) -> list[Figure]:
    figures = []
    for ranks, by_size in measured.items():
        for size, one in by_size.items():
            for name, promised in promises.items():
                what = f"{int(size) / MB:g} MB, {ranks} {where}: {name}, relative to {beside}"
                figures.append(figure(what, one["faster_than_gloo"][name], promised))
    return figures


def _limited(place: AbstractContextManager[list[str]], sizes: tuple[int, ...]) -> Json:
    """Measure every algorithm between namespaces, with its prediction by the latency and bandwidth of this run."""
    found: Json = {}
    with place as hosts, _processes(len(hosts), hosts) as measure:
        ranks, link = len(hosts), _probe(measure)
        for size in sizes:
            length = size // 4
            found[str(size)] = {}
            for name in ALGORITHMS:
                made = schedule(name, ranks, length, by_host(ranks, 2) if name == "hierarchical" else ())
                expected = price(made, 4, link)
                times = max(1, min(TIMES, int(TURN_SECONDS / expected)))
                found[str(size)][name] = {"seconds": measure(name, size, times), "price": expected}
    return found


def _encrypted(place: AbstractContextManager[list[str]], sizes: tuple[int, ...], repeats: int) -> Json:
    """Measure our ring over TLS and gloo's own without encryption, in turns."""
    hows = {OWN: "native", ENCRYPTED: "tls"}
    with place as hosts, _processes(len(hosts), hosts) as measure:
        return {str(size): _by_turns(measure, hows, size, WITHIN, repeats) for size in sizes}


def _probe(measure: Callable[[str, int, int], float]) -> LinkModel:
    """Measure latency and bandwidth between neighbours that all swap at once, from few and from many bytes."""
    few, some, many = (measure("latency", size, TIMES) / SWAPS for size in (8, MB // 4, MB))
    return LinkModel(few, (MB - MB // 4) / max(many - some, 1e-9))


def _of_prices(limited: Json) -> list[Figure]:
    figures = []
    for ranks, by_size in limited.items():
        for size, found in by_size.items():
            for name, one in found.items():
                what = f"{ranks} namespaces, {int(size):,} bytes, {name}: relative error of the price"
                figures.append(figure(what, abs(one["seconds"] / one["price"] - 1), 0.2, lower=True))
    return figures
