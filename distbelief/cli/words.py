"""The small languages of the command line: durations, rates, networks, stragglers, faults, optimizer options.

Each function reads the text of an option, or raises a `UsageError` that names the option and shows an example.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distbelief.core.roles import Kind, Role
from distbelief.errors import UsageError, unknown
from distbelief.places.compute_model import SPREADS

PER_SECOND: Mapping[str, float] = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60}
BYTES: Mapping[str, float] = {
    f"{prefix}{unit}": scale * size
    for prefix, scale in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
    for unit, size in (("bit", 0.125), ("B", 1.0))
}
Read = Callable[[str, str], float]
"""Function that reads a value; its second argument is the place of the text, for errors."""
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(.*)")


def duration(text: str, where: str = "duration") -> float:
    """Read seconds: a number and ns, us, ms, s or min.

    >>> duration("1.5ms")
    0.0015
    """
    # not multiplied: 50 * 1e-6 is not 50e-6
    number, per_second = _quantity(text, where, PER_SECOND, "50us, 1ms or 2s")
    return number / per_second


def rate(text: str, where: str = "bandwidth") -> float:
    """Read bytes per second: a number and bit, kbit, Mbit, Gbit, B, kB, MB or GB, with or without "/s".

    >>> rate("10Gbit"), rate("4 MB/s")
    (1250000000.0, 4000000.0)
    """
    number, unit = _quantity(text.removesuffix("/s"), where, BYTES, "10Gbit or 1GB")
    return number * unit


def size(text: str, where: str) -> float:
    """Read bytes: a number and B, kB, MB, GB or TB.

    >>> size("1.5GB", "--max-memory")
    1500000000.0
    """
    number, unit = _quantity(text, where, {unit: of for unit, of in BYTES.items() if unit.endswith("B")}, "2GB")
    return number * unit


def _quantity(text: str, where: str, units: Mapping[str, float], example: str) -> tuple[float, float]:
    match = _QUANTITY.fullmatch(text.strip())
    number = _float(match[1]) if match else None
    if match is None or number is None:
        raise UsageError(f"{where} {text!r}: write a number and its unit, such as {example}")
    if number == 0 and not match[2]:
        return 0.0, 1.0
    folded = {unit.lower(): scale for unit, scale in units.items()}
    if not match[2]:
        raise UsageError(f"{where} {text!r}: its unit is missing, as in {example}")
    if match[2].lower() not in folded:
        raise unknown(f"unit in {where}", match[2], units)
    return number, folded[match[2].lower()]


def fraction(text: str, where: str) -> float:
    """Read a probability: 5% or 0.05.

    >>> fraction("5%", "chance")
    0.05
    """
    number = _float(text.removesuffix("%"))
    value = None if number is None else number / 100 if text.endswith("%") else number
    if value is None or not 0 <= value <= 1:
        raise UsageError(f"{where} {text!r}: write a chance such as 5% or 0.05")
    return value


def network(text: str) -> dict[str, Any]:
    """Read the fields of a `NetworkModel` from `--network`.

    >>> network("latency=50us,bandwidth=10Gbit,jitter=0.1")
    {'latency': 5e-05, 'bandwidth': 1250000000.0, 'jitter': 0.1}
    >>> network("local-latency=2us,local-bandwidth=100Gbit,reduce=10GB")
    {'local_latency': 2e-06, 'local_bandwidth': 12500000000.0, 'reduction': 1e-10}
    """
    lines: dict[str, Read] = {"latency": duration, "bandwidth": rate, "jitter": _number}
    known = {**lines, "local-latency": duration, "local-bandwidth": rate, "reduce": rate}
    fields = _fields(text, "--network", "latency=50us,bandwidth=10Gbit,jitter=0.1", known)
    if "reduce" in fields:
        fields["reduction"] = 1 / (fields.pop("reduce") or math.inf)
    if fields.get("jitter") and fields.get("latency") == 0:
        raise UsageError(
            f"--network jitter {fields['jitter']:g}: is a fraction of the latency, which is 0: set a latency, or leave "
            "it off"
        )
    return fields


def handling(text: str) -> dict[str, float]:
    """Read the fields of a `Handling` from `--handling`.

    >>> handling("message=6us,memory=26GB"), handling("message=0")
    ({'message': 6e-06, 'memory': 26000000000.0}, {'message': 0.0})
    """
    return _fields(text, "--handling", "message=6us,memory=26GB", {"message": duration, "memory": rate})


def hosts(text: str) -> dict[str, Any]:
    """Read the fields of `Hosts` from `--hosts`; return none if no hosts are shared.

    >>> hosts("cores=2,replicas=4,together=0.9"), hosts("")
    ({'cores': 2, 'replicas': 4, 'together': 0.9}, {})
    """
    known: dict[str, Read] = {"cores": _count, "replicas": _count, "together": fraction, "busy": duration}
    return _fields(text, "--hosts", "cores=2,replicas=4", known)


def compute(text: str) -> dict[str, Any]:
    """Read the fields of a `ComputeModel` from `--compute`: a time, or a spread, a mean and (lognormal) a variation.

    >>> compute("1ms"), compute("lognormal:2ms:0.5")
    ({'step': 0.001}, {'spread': 'lognormal', 'step': 0.002, 'variation': 0.5})
    """
    spread, *rest = text.split(":")
    if not rest:
        return {"step": duration(spread, "--compute")} if spread else {}
    if spread not in SPREADS:
        raise unknown("spread in --compute", spread, SPREADS)
    if len(rest) > (2 if spread == "lognormal" else 1):
        raise UsageError(f"--compute {text!r}: write 1ms, constant:1ms, exponential:1ms or lognormal:1ms:0.2")
    fields: dict[str, Any] = {"spread": spread, "step": duration(rest[0], "--compute")}
    return fields | ({"variation": _number(rest[1], "--compute variation")} if rest[1:] else {})


def stragglers(texts: Iterable[str], name: str = "--stragglers") -> dict[str, Any]:
    """Read the fields of a `ComputeModel` from `--stragglers` or `--straggle`: slow replicas, occasional slow steps.

    >>> stragglers(["1:4,3:2", "5%x10"])
    {'slow': {1: 4.0, 3: 2.0}, 'straggle_chance': 0.05, 'straggle_factor': 10.0}
    """
    slow: dict[int, float] = {}
    fields: dict[str, Any] = {}
    for item in _items(texts):
        if ":" in item:
            replica, factor = _pair(item, ":", name, "1:4")
            number = _count(replica, f"{name} replica")
            _once(slow, number, f"{name} {number}:")
            slow[number] = _number(factor, f"{name} factor of replica {replica}")
        else:
            chance, factor = _pair(
                item, "x", name, "1:4 (replica 1 takes 4 times as long) or 5%x10 (5 % of the steps, 10 times)"
            )
            _once(fields, "straggle_chance", f"{name} CHANCExFACTOR")
            fields = {"straggle_chance": fraction(chance, name), "straggle_factor": _number(factor, f"{name} factor")}
    return {"slow": slow, **fields}


def slow_replicas(texts: Iterable[str]) -> dict[int, float]:
    """Read the replicas that are always slow, and their factors.

    >>> slow_replicas(["1:4"])
    {1: 4.0}
    """
    settings = stragglers(texts)
    if "straggle_chance" in settings:
        raise UsageError(
            "--stragglers: a plan knows only replicas on slower machines, such as 1:4; occasional slow steps are for "
            "distbelief simulate"
        )
    slow: dict[int, float] = settings["slow"]
    return slow


class Faults(NamedTuple):
    """Settings of `--faults`."""

    crashes: list[tuple[str, int]]
    """Role that dies, and the number of the message that it is sending when it dies."""
    outages: list[tuple[float, float, tuple[str, ...]]]
    """Start, end, and the roles of one side."""
    delays: dict[str, float]
    """Fields of `NetworkModel`."""
    place: dict[str, float]
    """Fields of `Simulated` for restarts."""
    leaves: list[tuple[str, int, float]]
    """Replica whose host leaves, the number of the message at which it learns this, and its seconds to leave."""


def faults(texts: Iterable[str]) -> Faults:
    """Read `--faults`.

    >>> faults(["crash=1@500", "crash=shard0@9", "delay=1%x50ms", "restart=2s"])
    Faults(crashes=[('replica 1', 500), ('shard 0', 9)], outages=[], delays={'delay_chance': 0.01, 'delay': 0.05},
           place={'restart_seconds': 2.0}, leaves=[])
    >>> faults(["leave=1@500+2s"]).leaves
    [('replica 1', 500, 2.0)]
    >>> faults(["crash=coordinator@9"]).crashes
    [('coordinator', 9)]
    >>> faults(["outage=2s+500ms@replica1/shard0"]).outages
    [(2.0, 2.5, ('replica 1', 'shard 0'))]
    """
    faults = Faults([], [], {}, {}, [])
    for item in _items(texts):
        kind, value = _pair(
            item,
            "=",
            "--faults",
            "crash=1@500, crash=shard0@500, leave=1@500+2s, outage=2s+500ms@1/shard0, delay=1%x50ms or restart=2s",
        )
        if kind == "crash":
            who, message = _pair(
                value, "@", "--faults crash", "crash=1@500: replica 1 dies as it sends its 500th message"
            )
            faults.crashes.append(
                (_role(who, "--faults crash", ("coordinator",)), _count(message, "--faults crash message"))
            )
        elif kind == "leave":
            faults.leaves.append(_leave(value))
        elif kind == "outage":
            faults.outages.append(_outage(value))
        elif kind == "delay":
            _once(faults.delays, "delay", "--faults delay=")
            chance, time = _pair(value, "x", "--faults delay", "delay=1%x50ms: 1 % of the messages take 50 ms longer")
            faults.delays.update(
                delay_chance=fraction(chance, "--faults delay"), delay=duration(time, "--faults delay")
            )
        elif kind == "restart":
            _once(faults.place, "restart_seconds", "--faults restart=")
            faults.place.update(restart_seconds=duration(value, "--faults restart"))
        else:
            raise unknown("fault in --faults", kind, ("crash", "leave", "outage", "delay", "restart"))
    if faults.place and not faults.crashes:
        raise UsageError(
            "--faults restart: sets when crashed roles come back, but none crashes: add crash=1@500, or leave it off"
        )
    return faults


def _leave(text: str) -> tuple[str, int, float]:
    where = "--faults leave"
    example = "leave=1@500+2s: at the 500th message of replica 1 its host is told to leave within 2 s"
    who, rest = _pair(text, "@", where, example)
    message, seconds = _pair(rest, "+", where, example)
    return _role(who, where), _count(message, f"{where} message"), duration(seconds, f"{where} time")


def _outage(text: str) -> tuple[float, float, tuple[str, ...]]:
    where, example = (
        "--faults outage",
        "outage=2s+500ms@1/shard0: from 2 s on, for 500 ms, replica 1 and shard 0 cannot reach the others",
    )
    when, side = _pair(text, "@", where, example)
    start, lasts = _pair(when, "+", where, example)
    begins, seconds = duration(start, f"{where} start"), duration(lasts, f"{where} length")
    if not seconds:
        raise UsageError(f"{where} {text!r}: its length is 0; write it as {example}")
    return (
        begins,
        begins + seconds,
        tuple(_role(role.strip(), where, ("coordinator", "evaluator")) for role in side.split("/")),
    )


def _role(text: str, where: str, alone: Sequence[str] = ()) -> str:
    """Read a role: 1, replica1, shard0 or one of `alone`."""
    if text in alone:
        return text
    kind = next((kind for kind in (Kind.SHARD, Kind.STANDBY) if text.startswith(kind)), Kind.REPLICA)
    number = text.removeprefix(kind)
    if alone and not number.strip().isdecimal():
        raise UsageError(
            f"{where} {text!r}: is not a role; write 1 or replica1, shard0, standby0, {' or '.join(alone)}"
        )
    return str(Role(kind, _count(number.strip(), f"{where} {kind}")))


def optimizer_options(
    texts: Iterable[str], where: str = "--optimizer-options"
) -> dict[str, float | bool | tuple[float, ...]]:
    """Read options of a torch optimizer: numbers, true or false, or numbers with commas.

    >>> optimizer_options(["eps=1e-8", "nesterov=true", "betas=0.9,0.95"])
    {'eps': 1e-08, 'nesterov': True, 'betas': (0.9, 0.95)}
    """
    options: dict[str, float | bool | tuple[float, ...]] = {}
    for name, value in _pairs(texts, where, "eps=1e-8"):
        if value.lower() in ("true", "false"):
            options[name] = value.lower() == "true"
        else:
            numbers = tuple(_number(part, f"{where} {name}") for part in value.split(","))
            options[name] = numbers if len(numbers) > 1 else numbers[0]
    return options


def counts(text: str, where: str, most: int) -> tuple[int, ...]:
    """Read numbers of replicas or partitions, the smallest first; a range is doubled up to its end.

    >>> counts("1-64", "--replicas", 256), counts("8,3-10", "--replicas", 256)
    ((1, 2, 4, 8, 16, 32, 64), (3, 6, 8, 10))
    """
    numbers: set[int] = set()
    for item in _items([text]) or [text]:
        first, dash, last = item.partition("-")
        ends = (first, last if dash else first)
        low, high = map(int, ends) if all(map(str.isdecimal, ends)) else (0, 0)
        if not 1 <= low <= high <= most:
            raise UsageError(f"{where} {item}: numbers are from 1 to {most}, the smaller of a range first, as in 1-64")
        numbers |= {high, *(low << power for power in range(high.bit_length()) if low << power < high)}
    return tuple(sorted(numbers))


def _items(texts: Iterable[str]) -> list[str]:
    return [item.strip() for text in texts for item in text.split(",") if item.strip()]


def _fields(text: str, where: str, example: str, known: Mapping[str, Read]) -> dict[str, Any]:
    """Read `name=value,...`, each value by the function of its name in `known`."""
    fields = {}
    for name, value in _pairs(_items([text]), where, example):
        if name not in known:
            raise unknown(f"word in {where}", name, known)
        fields[name.replace("-", "_")] = known[name](value, f"{where} {name}")
    return fields


def _pairs(texts: Iterable[str], where: str, example: str) -> Iterator[tuple[str, str]]:
    """Yield names and values, each name once."""
    seen: dict[str, str] = {}
    for text in texts:
        name, value = _pair(text, "=", where, example)
        _once(seen, name, f"{where} {name}=")
        seen[name] = value
        yield name, value


def _once(fields: Mapping[Any, object], name: object, where: str) -> None:
    if name in fields:
        raise UsageError(f"{where}: is given twice; leave one off")


def _pair(text: str, between: str, where: str, example: str) -> tuple[str, str]:
    before, separator, after = text.partition(between)
    if not (before.strip() and separator and after.strip()):
        raise UsageError(f"{where} {text!r}: write it as {example}")
    return before.strip(), after.strip()


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _number(text: str, where: str) -> float:
    value = _float(text)
    if value is None:
        raise UsageError(f"{where} {text!r}: is not a number")
    return value


def _count(text: str, where: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{where} {text!r}: is not a whole number of 0 or more")
    return int(text)
