"""The recorder: writes every record down as it comes, and the result at the end."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import msgspec

from distbelief.core import records
from distbelief.core.records import Json
from distbelief.errors import CheckpointError
from distbelief.record.checkpoints import Checkpoints, read_manifest
from distbelief.record.curves import Curves
from distbelief.record.folder import RunFolder, write_atomically, written_whole
from distbelief.record.metrics import GOES_BACK, behind, goes_back, in_effect, line
from distbelief.record.summary import Summary

RECENT = 10_000
"""Most records that may come while a checkpoint is sealed, for it to have its sums."""
SUMS = "sums.msgpack"
"""The file of a checkpoint that holds what the run had done by then; who lacks it reads all metrics."""
SUMS_LIMIT = 64 << 20


class CheckpointSums(msgspec.Struct):
    """Sums of a run at a checkpoint."""

    sums: Summary
    reported: int
    """Samples that it had done when the checkpoint was sealed: some more than are in it."""


class Recorder:
    """Takes the records of a job in the order of time.

    In a resumed run the metrics are appended to; the sums and the history go on from the samples that `Started` names,
    without what came after them.

    Args:
        folder: where to write; None writes nothing.
        job: what `job.json` holds (see `Summary`).
        warn: is told, once each, that the metrics or the result cannot be written; by default it goes to stderr.
    """

    def __init__(self, folder: RunFolder | None, job: Json, warn: Callable[[str], None] | None = None) -> None:
        self.folder, self.job = folder, dict(job)
        self.summary = Summary(self.job)
        self._settled = Summary(self.job)
        """The sums up to the records that the next checkpoint may lack."""
        self._recent: deque[tuple[float, records.Record, int]] = deque()
        """Those, and the samples that were done with each."""
        self._warn = warn or _to_stderr
        self._file: io.FileIO | None = None
        self._curves = Curves(folder.path, self._warn) if folder else None
        self._torn = self._warned = False
        if folder:
            try:
                self._file = folder.metrics.open("ab", buffering=0)
                if self._file.tell():
                    self._file.truncate(behind(folder.metrics, b"\n"))  # a kill may have torn the last line
            except OSError as error:
                self._complain(error)

    def take(self, seconds: float, record: records.Record) -> None:
        """Write a record down; `seconds` count from this attempt's beginning. A full disk is noted once, and no end."""
        if self.folder and isinstance(record, GOES_BACK):
            self._settled = self._sums(self.folder, record.samples)
            self._recent.clear()
            if isinstance(record, records.Started):
                self.summary = deepcopy(self._settled)
                self.summary.job = self.job
        self.summary.take(seconds, record)
        self._write(line(seconds, record))
        if self.folder:
            self._recent.append((seconds, record, self.summary.samples))
            if len(self._recent) > RECENT:
                self._settled.take(*self._recent.popleft()[:2])
            if isinstance(record, records.Checkpointed) and not record.error:
                self._keep_sums(self.folder, record.number)
        if self._curves:
            self._curves.take(seconds, record, self.summary)

    def _keep_sums(self, folder: RunFolder, number: int) -> None:
        """Put what the run had done at a checkpoint beside it."""
        checkpoint = Checkpoints(folder.path).folder_of(number)
        with contextlib.suppress(OSError, CheckpointError):  # it goes on from the one before, or from all metrics
            samples = read_manifest(checkpoint).samples
            while self._recent and self._recent[0][2] <= samples:
                self._settled.take(*self._recent.popleft()[:2])
            for _ in range(len(self._recent)):  # what was sent stays sent, whatever is gone back on
                entry = self._recent.popleft()
                if isinstance(entry[1], records.BytesCounted):
                    self._settled.take(*entry[:2])
                else:
                    self._recent.append(entry)
            if self._settled.samples <= samples:
                sums = CheckpointSums(msgspec.structs.replace(self._settled, job={}), self.summary.samples)
                write_atomically(checkpoint / SUMS, msgspec.msgpack.encode(sums))

    def _sums(self, folder: RunFolder, samples: int) -> Summary:
        """Return the summary at so many samples: the sums beside a checkpoint, and the records that came after."""
        path = folder.metrics
        try:
            for checkpoint in Checkpoints(folder.path).newest():
                if (kept := _read_sums(checkpoint / SUMS)) is None:
                    continue
                mark = b'"event":"Checkpointed","number":%d,"error":""' % int(checkpoint.name)
                start = behind(path, mark) or path.stat().st_size  # of metrics that are lost nothing came after
                ends = [*goes_back(path, start), samples]
                if kept.sums.samples <= min(ends):
                    break
            else:
                kept, start, ends = CheckpointSums(Summary({}), 0), 0, [*goes_back(path), samples]
            kept.sums.job = self.job
            for record in in_effect(path, ends, start, kept.reported):
                kept.sums.take(*record)
        except OSError as error:
            self._complain(error)
            return Summary(self.job)
        return kept.sums

    def _write(self, text: bytes) -> None:
        if self._file is None:
            return
        try:
            whole = b"\n" + text if self._torn else text
            self._torn = self._file.write(whole) != len(whole)
        except OSError as error:
            self._torn = True
            self._complain(error)

    def write_again(self) -> None:
        """Write all metrics again where their file is gone with its folder; an open file stays until it is closed."""
        if self._file is None or self.folder is None:
            return
        try:
            with open(f"/proc/self/fd/{self._file.fileno()}", "rb") as old, written_whole(self.folder.metrics) as new:
                shutil.copyfileobj(old, new)
            self._file.close()
            self._file = self.folder.metrics.open("ab", buffering=0)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._warned and self.folder:
            self._warned = True
            self._warn(
                f"metrics cannot be written to {self.folder.metrics}: {error.strerror}; the job goes on without them"
            )

    def result(self) -> Json:
        """Return the contents of `result.json`, as if the run ended now."""
        return self.summary.result()

    def finish(self, write: bool = True) -> Json:
        """Write `result.json` (where asked to) and the last of the curves, close the files, and return the result."""
        result = self.result()
        if self.folder and write:
            try:
                write_atomically(self.folder.result, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
            except OSError as error:
                self._warn(f"{self.folder.result} cannot be written: {error.strerror}; the result is only shown")
        if self._file:
            self._file.close()
            self._file = None
        if self._curves:
            self._curves.close()
        return result


def _read_sums(path: Path) -> CheckpointSums | None:
    """Read the sums beside a checkpoint; None where there are none, or they are spoilt."""
    try:
        if path.stat().st_size <= SUMS_LIMIT:
            return msgspec.msgpack.decode(path.read_bytes(), type=CheckpointSums)
    except (OSError, msgspec.DecodeError):
        pass
    return None


def _to_stderr(text: str) -> None:
    print(f"distbelief: {text}", file=sys.stderr)
