"""Measurement in turns: contenders take turns within one run, and results are medians, and ratios within rounds."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from distbelief.cli.tables import show
from distbelief.core.records import Json
from distbelief.errors import UsageError, unknown
from distbelief.lab import number
from distbelief.record.limits import machine

REPEATS_LIMIT = 1000


def check_repeats(repeats: int) -> None:
    """Refuse an impossible number of rounds."""
    if not 1 <= repeats <= REPEATS_LIMIT:
        raise UsageError(f"--repeats {repeats}: must be from 1 to {REPEATS_LIMIT}")


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse models, or parts, that a benchmark does not measure."""
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


def interleave(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure every contender once a round; every other round is in reverse order.

    >>> interleave({"a": lambda: 1.0, "b": lambda: 2.0}, 2)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    check_repeats(repeats)
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            taken[name].append(contenders[name]())
    return taken


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median over all rounds of `above / below` within a round.

    >>> ratio([2.0, 9.0, 6.0], [1.0, 3.0, 3.0])
    2.0
    """
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def spread(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles, relative to the median; 0 for fewer than 2 values.

    >>> spread([1.0, 2.0, 3.0])
    0.5
    """
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle else 0.0


def medians(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each contender's values."""
    return {name: statistics.median(values) for name, values in taken.items()}


def rates(taken: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return medians of samples per second, and the `spread` of each, as in results."""
    return {"samples_per_second": medians(taken), "spread": {name: spread(values) for name, values in taken.items()}}


class Figure(TypedDict):
    """A target figure in a result."""

    what: str
    measured: float
    promised: float
    better: str
    """"higher", or "lower" if less is better."""
    reached: bool


def figure(what: str, measured: float, promised: float, lower: bool = False) -> Figure:
    """Make a target figure with its measured value; `lower` if less is better.

    >>> figure("seconds to the first step", 2.5, 3.0, lower=True)["reached"]
    True
    """
    return {
        "what": what,
        "measured": measured,
        "promised": promised,
        "better": "lower" if lower else "higher",
        "reached": measured <= promised if lower else measured >= promised,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of every benchmark."""

    json: str | None = None
    """File for the result."""
    quick: bool = False
    """Run the shortest form, to see whether it works and not how fast it is."""
    quiet: bool = False
    """Print nothing."""


class Table(NamedTuple):
    """A table that a benchmark prints."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Measured(NamedTuple):
    """Fields of a benchmark's result, its target figures and its tables."""

    fields: Json
    figures: Sequence[Figure]
    tables: Sequence[Table]


def rate_rows(found: Json, *shares: Mapping[str, float]) -> list[list[str]]:
    """Make the rows of a table of `rates`: samples per second, their spread, and ratios."""
    return [
        [name, number(rate), f"{found['spread'][name]:.0%}", *(number(of[name]) if name in of else "" for of in shares)]
        for name, rate in found["samples_per_second"].items()
    ]


def report(name: str, measure: Callable[[Any], Measured], options: BenchOptions) -> Json:
    """Measure, show the tables and figures, write the result if the user asked for that, and return it."""
    facts, path, (fields, figures, tables) = machine(), options.json, measure(options)
    result = {"bench": name, "machine": facts, **fields, "figures": [*figures], "options": told_options(options)}
    if figures:
        columns = ("what", "measured", "promised", "")
        tables = [*tables, Table("figures to reach", columns, [figure_row(one) for one in figures])]
    for table in () if options.quiet else tables:
        show(*table)
    if path:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"--json {path}: cannot be written ({error}); name a file in a folder of yours") from error
    return result


def figure_row(one: Figure) -> list[str]:
    """Return a figure as text: its name, its measured and its promised value, and whether it is reached."""
    promised = f"{'<=' if one['better'] == 'lower' else '>='} {number(one['promised'])}"
    return [one["what"], number(one["measured"]), promised, "reached" if one["reached"] else "NOT REACHED"]


def told_options(options: BenchOptions) -> dict[str, object]:
    """Return the options that differ from their defaults, without those of the output."""
    # lists, as they are read again from JSON
    return {
        field.name: [*value] if isinstance(value, tuple) else value
        for field in dataclasses.fields(options)
        if field.name not in ("json", "quiet") and (value := getattr(options, field.name)) != field.default
    }
