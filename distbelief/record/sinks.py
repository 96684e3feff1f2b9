"""Sinks, which show a run in the tools of others while it trains, and the entry points by which they are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from distbelief.core.records import Json, Record
from distbelief.errors import UsageError, unknown
from distbelief.record.folder import write_atomically
from distbelief.record.summary import Summary

GROUP = "distbelief.sinks"
"""Group of the entry points; each is a function from an argument, "" for none, to a `SinkMaker`."""


class Sink(Protocol):
    """Receiver of a run's records, which is dropped if it raises.

    The job's own thread calls it: it must return at once, and leave to a thread what may wait for a network or a disk.
    """

    def take(self, seconds: float, record: Record, summary: Summary) -> None:
        """Take a record and the sums that include it."""

    def close(self, result: Json) -> None:
        """End with the result of the run."""


@dataclass(frozen=True)
class ShownRun:
    """Run that a sink shows."""

    folder: Path
    """Run folder, in which a sink keeps what it needs to go on when the run is resumed."""
    job: Json
    """Contents of `job.json`."""
    note: Callable[[str], None]
    """Shows and records a sentence, on the job's own thread."""
    warn: Callable[[str], None]
    """Shows a warning; any thread may call it."""

    @property
    def parameters(self) -> dict[str, str | float]:
        """Return the settings and options of the job, without those that are not set."""
        named = {
            **self.job,
            **self.job.get("options", {}),
            **self.job.get("settings", {}),
            **self.job.get("versions", {}),
        }
        kept = {name: value for name, value in named.items() if value is not None and not isinstance(value, dict)}
        return {name: value if isinstance(value, int | float) else str(value) for name, value in kept.items()}

    def identity(self, tool: str, new: Callable[[], str], knows: Callable[[str], bool] = bool) -> str:
        """Return the name by which a tool knows the run, which is kept in the run folder.

        Args:
            tool: the tool, and the place where it keeps its runs.
            new: makes the name, if this tool there does not know the run yet.
            knows: returns whether the tool still has the run of a name there.
        """
        path = self.folder / f"{tool.partition(':')[0]}.id"
        known, _, identity = path.read_text().partition("\n") if path.exists() else ("", "", "")
        if known == tool:
            if knows(identity):
                return identity
            self.warn(f"{path} names run {identity}, which {path.stem} does not have any longer: another one begins")
        write_atomically(path, f"{tool}\n{(identity := new())}".encode())
        return identity


SinkMaker = Callable[[ShownRun], Sink]


def find(name: str, argument: str, option: str) -> SinkMaker:
    """Return the maker of a sink, once all that it needs is known to be there.

    Args:
        name: name of its entry point.
        argument: what the user wrote for it.
        option: the option, for messages.

    Raises:
        UsageError: no package has such a sink, its own package is missing, or it refuses the argument.
    """
    known = {each.name: each for each in entry_points(group=GROUP)}
    if name not in known:
        raise UsageError(f"{option}: {unknown('sink', name, known)}")
    try:
        maker: SinkMaker = known[name].load()(argument)
    except ImportError as error:
        remedy = f": pip install 'distbelief[{name}]'" if known[name].value.startswith("distbelief.") else ""
        raise UsageError(f"{option}: {error}{remedy}") from error
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error
    return maker


def need(package: str) -> None:
    """Raise the error of a missing package without importing it, which may take seconds."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}")


def values_of(result: Json) -> dict[str, float | str]:
    """Return the numbers of a result, and how it ended.

    >>> values_of({"steps": 3, "test_loss": None, "target": {}, "outcome": "done", "reason": "all epochs are done"})
    {'steps': 3, 'outcome': 'done', 'reason': 'all epochs are done'}
    """
    counted = {name: value for name, value in result.items() if isinstance(value, int | float)}
    return {**counted, **{name: str(result[name]) for name in ("outcome", "reason")}}
