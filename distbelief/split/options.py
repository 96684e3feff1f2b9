"""Split: what a user says of how a model is split; no torch is needed to say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from distbelief.errors import UsageError
from distbelief.schedules.pipeline import named
from distbelief.split.registry import check_way

AUTO = "auto"
"""In the place of a way: the one with the least price."""
MOST = 1 << 10
"""Most partitions of a model."""


@dataclass(frozen=True)
class Split:
    """Split of a model over the partitions of a replica.

    Raises:
        UsageError: a way that is unknown; a partition that is not there; fewer than two partitions.

    >>> Split("stages", partitions=2)
    Split(ways='stages', partitions=2, chunks=0, modules=())
    >>> Split.parse("conv*=filters,fc*=neurons", 4).ways
    {'conv*': 'filters', 'fc*': 'neurons'}
    >>> Split({"encoder": 0, "decoder": 1}).of("encoder.layers.3")
    0
    """

    ways: str | Mapping[str, str | int]
    """One way for the whole model, or `auto`; or, by patterns of modules' names, a way or the number of a partition:
    the first pattern that fits counts, and what none fits follows what it takes.
    """
    partitions: int = 2
    """2 or more."""
    chunks: int = 0
    """For `time`: in how many runs of steps a sequence is cut; 0 is four for each partition, or as many as there are
    steps.
    """
    modules: tuple[str, ...] = ()
    """For a model that cannot be traced: the modules that follow each other."""
    own: str = field(default="", compare=False, repr=False, kw_only=True)
    """The task's own split as it is written there, where this is that one: for messages only."""

    def __post_init__(self) -> None:
        if not 2 <= self.partitions <= MOST:
            raise UsageError(f"partitions={self.partitions}: a model is split over 2 to {MOST}")
        ways = [self.ways] if isinstance(self.ways, str) else list(self.ways.values())
        if self.chunks < 0:
            raise UsageError(f"--chunks {self.chunks}: a sequence is cut in 1 chunk or more")
        if self.chunks and "time" not in ways:
            raise UsageError(
                f"--chunks {self.chunks}: cuts the sequence of a split by time, and {self.text} is none: name the way "
                "(--split time, or PATTERN=time), or leave it off"
            )
        for way in ways:
            if isinstance(way, str):
                if self.ways != AUTO:
                    check_way(way)
            elif not 0 <= way < self.partitions:
                raise UsageError(
                    f"partition {way}: with {self.partitions} partitions, partitions are 0 to {self.partitions - 1}"
                )

    @classmethod
    def parse(cls, text: str, partitions: int, chunks: int = 0, own: str | None = None) -> Split:
        """Return what was written on a command line: a way, or `PATTERN=WAY,...`, where a number is a partition.

        Args:
            text: what was written.
            partitions: as of `Split`.
            chunks: as of `Split`.
            own: of the task, what takes the place of `auto`.

        Raises:
            UsageError: as `Split`, and for what is neither.

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
                raise UsageError(f"--split {text}: {pattern} stands there twice; leave one out")
            ways[pattern] = int(way) if way.isdecimal() else way
        return cls(ways, partitions, chunks)

    @property
    def text(self) -> str:
        """Text of the split, as on a command line.

        >>> Split({"conv*": "filters", "fc*": 1}).text
        'conv*=filters,fc*=1'
        """
        if isinstance(self.ways, str):
            return self.ways
        return ",".join(f"{pattern}={way}" for pattern, way in self.ways.items())

    def of(self, path: str) -> str | int | None:
        """The way or the partition of a module, by its path; None where no pattern fits it or what it is in."""
        if isinstance(self.ways, str):
            return self.ways
        return next((way for pattern, way in self.ways.items() if fits(pattern, path)), None)


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """Way of a minibatch through the partitions of a model."""

    microbatches: int = 1
    """Parts of a minibatch that go through the partitions of a replica by themselves: one computes while another
    does."""
    schedule: str = "auto"
    """In which order microbatches go forward and back: gpipe, 1f1b, or sequential for one; auto is 1f1b for more than
    one."""


@dataclass(frozen=True, kw_only=True)
class Partitions(Pipelined):
    """Partitions of a model."""

    partitions: int = 1
    """Processes over which each replica is split."""
    split: str = "auto"
    """Way to split the model over them: a way (stages, neurons, ...), or ways by patterns of its modules
    (conv*=filters,fc*=neurons); auto takes the way with the least price."""
    chunks: int = 0
    """For --split time: in how many runs of steps a sequence is cut, of which one partition computes one while the next
    partition computes the one before; 0 is four for each partition."""


@dataclass(frozen=True, kw_only=True)
class SplitSteps(Pipelined):
    """Steps of a split model."""

    batch_size: int = 64
    """Samples in a minibatch."""

    @property
    def algorithm(self) -> str:
        """Name of the schedule."""
        return named(self.schedule, self.microbatches)


@contextmanager
def blamed_on_task(split: str) -> Iterator[None]:
    """Say in what is refused that the task brings this split; nothing where it is ""."""
    try:
        yield
    except UsageError as error:
        if not split:
            raise
        raise UsageError(f"the task's own split {split!r}: {error}; --split names another") from error


def fits(pattern: str, path: str) -> bool:
    """Return whether a pattern fits a module's path, or that of a module that it is in.

    >>> fits("conv*", "conv1"), fits("features", "features.conv1"), fits("conv*", "fc1")
    (True, True, False)
    """
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: count + 1]), pattern) for count in range(len(parts)))
