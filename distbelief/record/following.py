"""Follower of a run, which may still be running: its summary and timeline, without reading all of its metrics.

The recorder keeps both in a file now and then, with the position in `metrics.jsonl` up to which they count. A follower
begins there, and reads on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from distbelief.core.records import Json
from distbelief.record.folder import RunFolder, write_atomically
from distbelief.record.metrics import read_further
from distbelief.record.summary import Summary
from distbelief.record.timeline import Timeline

LIMIT = 256 << 20
"""Longest file of a timeline in bytes."""
AT_ONCE = 1 << 16
"""Most bytes of metrics that are read at once."""
UNKEPT = 64 << 20
"""Most bytes of metrics that are read of a run without such a file: its last ones."""


class RunSums(msgspec.Struct):
    """Sums of a run up to a position in its metrics."""

    position: int
    summary: Summary
    timeline: Timeline

    def write(self, path: Path) -> None:
        """Write them, or raise an `OSError`; a power cut may lose them."""
        kept = msgspec.structs.replace(self, summary=msgspec.structs.replace(self.summary, job={}))
        write_atomically(path, msgspec.msgpack.encode(kept), lasts=False)


def _read(path: Path) -> RunSums | None:
    """Read sums; None if they are missing or corrupt."""
    try:
        if path.stat().st_size <= LIMIT:
            return msgspec.msgpack.decode(path.read_bytes(), type=RunSums)
    except (OSError, msgspec.DecodeError):
        pass
    return None


class Follower:
    """Follower of a run.

    Args:
        folder: the run folder.
        job: contents of its `job.json`.
    """

    def __init__(self, folder: RunFolder, job: Json) -> None:
        self.folder, self.job = folder, job
        self._sums = self._begin()

    def _begin(self) -> RunSums:
        """Return the sums to go on from."""
        path = self.folder.metrics
        sums, size = _read(self.folder.timeline), path.stat().st_size if path.exists() else 0
        if sums is None or sums.position > size:
            # the first line may be torn, and is then skipped
            sums = RunSums(max(0, size - UNKEPT), Summary({}), Timeline.of(self.job))
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
        read, position = read_further(self.folder.metrics, sums.position, AT_ONCE)
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
