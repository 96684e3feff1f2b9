"""Split of a model as a user writes it, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from distbelief.errors import UsageError, unknown
from distbelief.schedules.pipeline import named
from distbelief.split.registry import DIVIDING, PLACING

AUTO = "auto"
"""Split that stands for the way with the least price."""
MOST = 1 << 10
"""Limit of a model's partitions."""


@dataclass(frozen=True)
class Split:
    """Split of a model over the partitions of a replica.

    >>> Split("stages", partitions=2)
    Split(ways='stages', partitions=2, chunks=0, modules=())
    >>> Split.parse("conv*=filters,fc*=neurons", 4).ways
    {'conv*': 'filters', 'fc*': 'neurons'}
    >>> Split({"encoder": 0, "decoder": 1}).of("encoder.layers.3")
    0
    """

    ways: str | Mapping[str, str | int]
    """One way for the whole model, or `auto`; or a way or partition by patterns of modules' names. The first matching
    pattern counts; unmatched modules follow their inputs."""
    partitions: int = 2
    chunks: int = 0
    """Number of chunks into which `time` cuts a sequence; 0 means four for each partition, but at most one for each
    step."""
    modules: tuple[str, ...] = ()
    own: str = field(default="", compare=False, repr=False, kw_only=True)
    """Text of the task's own split, if this is it; used in messages."""

    def __post_init__(self) -> None:
        if not 2 <= self.partitions <= MOST:
            raise UsageError(f"partitions={self.partitions}: a model is split over 2 to {MOST}")
        ways = [self.ways] if isinstance(self.ways, str) else list(self.ways.values())
        if self.chunks < 0:
            raise UsageError(f"--chunks {self.chunks}: a sequence is cut into 1 chunk or more")
        if self.chunks and "time" not in ways:
            raise UsageError(
                f"--chunks {self.chunks}: is for a split by time, and {self.text} is none: name one (--split time, or "
                "PATTERN=time), or leave it off"
            )
        for way in ways:
            if isinstance(way, str):
                if self.ways != AUTO and way not in (*PLACING, *DIVIDING):
                    raise unknown("way to split", way, (*PLACING, *DIVIDING))
            elif not 0 <= way < self.partitions:
                raise UsageError(
                    f"partition {way}: with {self.partitions} partitions, partitions are 0 to {self.partitions - 1}"
                )

    @classmethod
    def parse(cls, text: str, partitions: int, chunks: int = 0, own: str | None = None) -> Split:
        """Return the split from a command line: a way, or `PATTERN=WAY,...` in which a number is a partition.

        The task's `own` split, if it has one, replaces `auto`. A text of another form raises a `UsageError`.

        >>> Split.parse("auto", 2, own="groups").ways, Split.parse("stages", 2, own="groups").ways
        ('groups', 'stages')
        """
        if text == AUTO and own:
            with blamed_on_task(own):
                return replace(cls.parse(own, partitions, chunks), own=own)
        if "=" not in text:
            return cls(text, partitions, chunks)
        ways: dict[str, str | int] = {}
        for part in text.split(","):
            pattern, equals, way = part.strip().partition("=")
            if not (pattern and equals and way):
                raise UsageError(f"--split {text}: {part!r} is not PATTERN=WAY, as in conv*=filters")
            if pattern in ways:
                raise UsageError(f"--split {text}: {pattern} is listed twice; leave one out")
            ways[pattern] = int(way) if way.isdecimal() else way
        return cls(ways, partitions, chunks)

    @property
    def text(self) -> str:
        """Return the split as on a command line."""
        if isinstance(self.ways, str):
            return self.ways
        return ",".join(f"{pattern}={way}" for pattern, way in self.ways.items())

    def of(self, path: str) -> str | int | None:
        """Return the way or partition of a module by its path; None if no pattern matches it or its parents."""
        if isinstance(self.ways, str):
            return self.ways
        return next((way for pattern, way in self.ways.items() if fits(pattern, path)), None)


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """Pipelining of minibatches through a model's partitions."""

    microbatches: int = 1
    """Parts of a minibatch that pass through the partitions one after another, so that partitions compute at the same
    time."""
    schedule: str = "auto"
    """Order of microbatches forward and back: gpipe, 1f1b, or sequential for one; auto is 1f1b for several."""


@dataclass(frozen=True, kw_only=True)
class Partitions(Pipelined):
    """Partitions of a model."""

    partitions: int = 1
    """Processes over which each replica is split."""
    split: str = "auto"
    """Way to split the model over them: a way (stages, neurons, ...), or ways by patterns of its modules
    (conv*=filters,fc*=neurons); auto takes the way with the least price."""
    chunks: int = 0
    """Number of chunks into which --split time cuts a sequence, so that partitions compute at the same time; 0 means
    four for each partition."""


@dataclass(frozen=True, kw_only=True)
class SplitSteps(Pipelined):
    """Steps of a split model."""

    batch_size: int = 64
    """Samples in a minibatch."""

    @property
    def algorithm(self) -> str:
        """Return the name of the schedule."""
        return named(self.schedule, self.microbatches)


@contextmanager
def blamed_on_task(split: str) -> Iterator[None]:
    """Add to refusals that the split is the task's own, unless it is ""."""
    try:
        yield
    except UsageError as error:
        if not split:
            raise
        raise UsageError(f"the task's own split {split!r}: {error}; --split names another") from error


def fits(pattern: str, path: str) -> bool:
    """Return whether a pattern matches the path of a module or of one of its parents.

    >>> fits("conv*", "conv1"), fits("features", "features.conv1"), fits("conv*", "fc1")
    (True, True, False)
    """
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: count + 1]), pattern) for count in range(len(parts)))
