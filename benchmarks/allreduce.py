"""All-reduce in shared memory and by torch.distributed beside gloo's own, and on limited lines
beside its price.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from benchmarks.parts import lines
from benchmarks.parts.ranks import SWAPS, play
from benchmarks.parts.timing import BenchOptions, Figure, figure, finish, interleave, medians, ratio
from distbelief.cli.tables import number, show
from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.places.join.authority import Authority
from distbelief.places.processes.peers import Peer, Peers, lend
from distbelief.record.machine import machine
from distbelief.schedules.allreduce import ALGORITHMS, by_host, schedule
from distbelief.schedules.price import LinkModel, price

MB = 1_000_000
OWN, PLACE, COPY = "gloo", "shared memory, in place", "shared memory, copied in and out"
RING, ENCRYPTED = "our ring over gloo", "our ring over TLS"
LIMITED = (4_000, 64_000, MB, 16 * MB)
TIMES, TURN_SECONDS = 15, 4.0
"""Most times that each is measured between namespaces, and about how long."""
WITHIN = 5
"""Times that each is measured in its turn, where it is encrypted."""


@dataclass(frozen=True)
class AllreduceOptions(BenchOptions):
    """Options of the benchmark allreduce."""

    sizes: tuple[int, ...] = (MB, 16 * MB, 64 * MB)
    """Bytes that are added up, in float32."""
    ranks: tuple[int, ...] = (2, 4)
    """Processes that add them up."""
    repeats: int = 9
    """Rounds in which all contenders take their turns."""
    namespaces: tuple[int, ...] = ()
    """Network namespaces on a bridge, such as 4 8, each limited to --rate: every algorithm there beside its price.
    Needs root and iproute2.
    """
    encrypted: tuple[int, ...] = ()
    """Network namespaces on a bridge, such as 4, each limited to --rate: our ring over TLS beside gloo's own all-reduce
    in the clear, by turns. Needs root and iproute2.
    """
    rate: int = 100
    """Mbit/s of each namespace, both ways."""
    QUICK: ClassVar[Mapping[str, object]] = {"sizes": (100_000,), "ranks": (2,), "repeats": 1}
    """Defaults with --quick."""


def run(options: AllreduceOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: a number that cannot be, what describes a network where none is made, or namespaces where none can
            be.
    """
    facts = machine()
    _check(options)
    measured = {str(ranks): _on_one_host(ranks, options.sizes, options.repeats) for ranks in options.ranks}
    within = (4_000,) if options.quick else LIMITED
    limited = {str(ranks): _limited(lines.hosts(ranks, options.rate), within) for ranks in options.namespaces}
    encrypted = {
        str(ranks): _encrypted(lines.hosts(ranks, options.rate), options.sizes, options.repeats)
        for ranks in options.encrypted
    }
    figures = [*_figures(measured), *_of_prices(limited), *_of_encryption(encrypted, options.rate)]
    result = {"bench": "allreduce", "machine": facts, "repeats": options.repeats, "one_host": measured,
              "namespaces": limited, "encrypted": encrypted, "figures": figures}  # fmt: skip
    if not options.quiet:
        for ranks, by_size in measured.items():
            rows = [
                [name, *(number(1e3 * one["seconds"][name]) for one in by_size.values())]
                for name in (OWN, PLACE, COPY, RING)
            ]
            show(f"one host, {ranks} ranks: ms", ("", *(f"{int(size) / MB:g} MB" for size in by_size)), rows)
        for ranks, by_size in encrypted.items():
            rows = [
                [name, *(number(1e3 * one["seconds"][name]) for one in by_size.values())] for name in (OWN, ENCRYPTED)
            ]
            where = f"{ranks} namespaces of {options.rate} Mbit/s: ms"
            show(where, ("", *(f"{int(size) / MB:g} MB" for size in by_size)), rows)
        for ranks, by_size in limited.items():
            rows = [
                [name, size, number(1e3 * one["seconds"]), number(1e3 * one["price"])]
                for size, found in by_size.items()
                for name, one in found.items()
            ]
            show(f"{ranks} namespaces of {options.rate} Mbit/s: ms", ("", "bytes", "measured", "price"), rows)
    return finish(result, options)


def _check(options: AllreduceOptions) -> None:
    """Refuse what describes a network that is not there."""
    if options.rate != AllreduceOptions.rate and not (options.namespaces or options.encrypted):
        raise UsageError(
            f"--rate {options.rate}: is that of a network between --namespaces or --encrypted, and there is none: name "
            "one"
        )


@contextmanager
def _processes(ranks: int, hosts: lines.Namespaces | None = None) -> Iterator[Callable[[str, int, int], float]]:
    """Processes that add up; yields who has them do it: how, how many bytes, how often; seconds each time (the median),
    of the slowest.
    """
    with lend() as memory, Peers() as peers, tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        store = str(Path(folder) / "store")
        started: list[Peer] = []
        authority = Authority("bench")
        for rank in range(ranks):
            where = hosts.names[rank] if hosts else ""
            identity = authority.issue(roles.replica(rank)) if hosts else None
            started.append(
                peers.start(f"rank {rank}", 1, play, rank, ranks, store, os.getpid(), memory, where, identity)
            )

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


def _on_one_host(ranks: int, sizes: tuple[int, ...], repeats: int) -> Json:
    found: Json = {}
    with _processes(ranks) as measure:
        for size in sizes:
            times = max(1, min(50, 16 * MB // size))
            hows = {OWN: "native", PLACE: "place", COPY: "copy", RING: "ring"}
            for how in hows.values():
                measure(how, size, 1)
            taken = interleave({name: partial(measure, how, size, times) for name, how in hows.items()}, repeats)
            found[str(size)] = {
                "seconds": medians(taken),
                "faster_than_gloo": {name: ratio(taken[OWN], values) for name, values in taken.items()},
            }
    return found


def _figures(measured: Json) -> list[Figure]:
    figures = []
    for ranks, by_size in measured.items():
        for size, one in by_size.items():
            where = f"{int(size) / MB:g} MB, {ranks} ranks"
            for name, promised in ((COPY, 3.0), (PLACE, 6.0)):
                figures.append(
                    figure(f"{where}: {name}, times faster than gloo", one["faster_than_gloo"][name], promised)
                )
            if int(size) == 16 * MB:
                figures.append(figure(f"{where}: {RING}, of gloo's own speed", one["faster_than_gloo"][RING], 0.9))
    return figures


def _limited(place: AbstractContextManager[lines.Namespaces], sizes: tuple[int, ...]) -> Json:
    """Every algorithm between namespaces, beside its price by the latency and the bandwidth of this network, measured
    in this run.
    """
    found: Json = {}
    with place as hosts, _processes(len(hosts.names), hosts) as measure:
        ranks, link = len(hosts.names), _probe(measure)
        for size in sizes:
            length = size // 4
            found[str(size)] = {}
            for name in ALGORITHMS:
                made = schedule(name, ranks, length, by_host(ranks, 2) if name == "hierarchical" else ())
                expected = price(made, 4, link)
                times = max(1, min(TIMES, int(TURN_SECONDS / expected)))
                found[str(size)][name] = {"seconds": measure(name, size, times), "price": expected}
    return found


def _encrypted(place: AbstractContextManager[lines.Namespaces], sizes: tuple[int, ...], repeats: int) -> Json:
    """Our ring over TLS and gloo's own in the clear, by turns."""
    found: Json = {}
    with place as hosts, _processes(len(hosts.names), hosts) as measure:
        for size in sizes:
            hows = {OWN: "native", ENCRYPTED: "tls"}
            for how in hows.values():
                measure(how, size, 1)
            taken = interleave({name: partial(measure, how, size, WITHIN) for name, how in hows.items()}, repeats)
            found[str(size)] = {
                "seconds": medians(taken),
                "of_gloo": ratio(taken[OWN], taken[ENCRYPTED]),
            }
    return found


def _of_encryption(encrypted: Json, rate: int) -> list[Figure]:
    return [
        figure(
            f"{int(size) / MB:g} MB, {ranks} namespaces of {rate} Mbit/s: {ENCRYPTED}, of gloo's in the clear",
            one["of_gloo"],
            0.85,
        )
        for ranks, by_size in encrypted.items()
        for size, one in by_size.items()
    ]


def _probe(measure: Callable[[str, int, int], float]) -> LinkModel:
    """The latency and the bandwidth between neighbours that all swap: of few bytes, and what more bytes cost more."""
    few, some, many = (measure("latency", size, TIMES) / SWAPS for size in (8, MB // 4, MB))
    return LinkModel(few, (MB - MB // 4) / max(many - some, 1e-9))


def _of_prices(limited: Json) -> list[Figure]:
    figures = []
    for ranks, by_size in limited.items():
        for size, found in by_size.items():
            for name, one in found.items():
                away = abs(one["seconds"] / one["price"] - 1)
                figures.append(
                    figure(
                        f"{ranks} namespaces, {int(size):,} bytes, {name}: away from the price", away, 0.2, lower=True
                    )
                )
    return figures
