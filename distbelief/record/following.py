"""Follower of a run, which may still be running: its summary and timeline, without reading all of its metrics.

The recorder keeps both in a file now and then, with the position in `metrics.jsonl` up to which they count. A follower
begins there, and reads on.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Annotated

import msgspec

from distbelief.core.records import Finished, Json, Record, Started
from distbelief.record.folder import RunFolder, read_packed, write_atomically
from distbelief.record.metrics import read_further
from distbelief.record.summary import Summary
from distbelief.record.timeline import Timeline

KEEP_SECONDS = 10.0
"""Least seconds between two writes of the timeline."""
AT_ONCE = 1 << 16
"""Most bytes of metrics that are read at once."""
UNKEPT = 64 << 20
"""Most bytes of metrics that are read of a run without such a file: its last ones."""


class RunSums(msgspec.Struct):
    """Sums of a run up to a position in its metrics."""

    position: Annotated[int, msgspec.Meta(ge=0)]
    summary: Summary
    timeline: Timeline

    def write(self, path: Path) -> None:
        """Write them, or raise an `OSError`; a power cut may lose them."""
        kept = msgspec.structs.replace(self, summary=msgspec.structs.replace(self.summary, job={}))
        write_atomically(path, msgspec.msgpack.encode(kept), lasts=False)


class Follower:
    """Follower of a run.

    Args:
        folder: the run folder.
        job: contents of its `job.json`.
    """

    def __init__(self, folder: RunFolder, job: Json) -> None:
        self.folder, self.job = folder, job
        self._sums = self._begin()
        self._resumed: int | None = None
        """Position before the start of a resumed job, until its sums are had, without what it has undone."""

    def _begin(self) -> RunSums:
        """Return the sums to go on from."""
        path = self.folder.metrics
        sums, size = self._read_kept(), path.stat().st_size if path.exists() else 0
        if sums is None or sums.position > size:
            # the first line may be torn, and is then skipped
            sums = RunSums(max(0, size - UNKEPT), Summary(self.job), Timeline.of(self.job))
        return sums

    def _read_kept(self) -> RunSums | None:
        """Return the sums that the recorder keeps; None if they are missing or corrupt."""
        if sums := read_packed(self.folder.timeline, RunSums):
            sums.summary.job = self.job
        return sums

    @property
    def summary(self) -> Summary:
        """Summary of all records that were read."""
        return self._sums.summary

    @property
    def timeline(self) -> Timeline:
        """Timeline of all records that were read."""
        return self._sums.timeline

    def read(self) -> bool:
        """Read what was written since, up to `AT_ONCE` bytes; return whether that was anything.

        Raises:
            OSError: the metrics cannot be read.
        """
        sums = self._sums
        if not self.folder.metrics.exists():
            return False
        if self.folder.metrics.stat().st_size < sums.position:  # another job writes here now
            sums = self._sums = self._begin()
        if self._resumed is not None:
            kept = self._read_kept()
            if kept and kept.position > self._resumed:
                self._resumed, self._sums = None, kept
                sums = kept
        read, position = read_further(self.folder.metrics, sums.position, AT_ONCE)
        if any(isinstance(record, Started) and record.samples for _, record in read):
            self._resumed = sums.position
        for seconds, record in read:
            sums.summary.take(seconds, record)
            sums.timeline.take(seconds, record, sums.summary)
        moved, sums.position = position != sums.position, position
        return moved

    def read_all(self) -> Follower:
        """Read until the present end of the metrics, or raise an `OSError`."""
        while self.read():
            pass
        return self


class TimelineKeeper:
    """Sink that keeps the timeline of a run, from which a `Follower` goes on.

    Args:
        folder: the run folder, perhaps with the metrics of earlier attempts.
        job: contents of its `job.json`.
    """

    def __init__(self, folder: RunFolder, job: Json) -> None:
        self._folder = folder
        self._kept = math.inf
        """Time of the last write; infinite until the attempt starts: until then a resumed job's sums are not known."""
        self.timeline = Follower(folder, job).read_all().timeline

    def take(self, seconds: float, record: Record, summary: Summary) -> None:
        """Add a record, which is in the metrics already; write the timeline if it is time."""
        self.timeline.take(seconds, record, summary)
        ends = isinstance(record, Finished) and self._kept < math.inf
        if isinstance(record, Started) or ends or time.monotonic() >= self._kept + KEEP_SECONDS:
            self._write(summary)

    def close(self, result: Json) -> None:
        """Do nothing: it was written with the last record."""

    def _write(self, summary: Summary) -> None:
        self._kept = time.monotonic()
        with contextlib.suppress(OSError):  # the metrics have it all
            RunSums(self._folder.metrics.stat().st_size, summary, self.timeline).write(self._folder.timeline)
