"""Recorder, which writes records as they come, passes them to sinks, and writes the result at the end."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy

import msgspec

from distbelief.core import records
from distbelief.core.records import Json
from distbelief.errors import CheckpointError
from distbelief.record.checkpoints import Checkpoints, read_manifest
from distbelief.record.curves import TENSORBOARD_PERIOD, Curves, TensorBoardEvents
from distbelief.record.diagnosis import diagnose
from distbelief.record.folder import RunFolder, read_packed, write_atomically, written_whole
from distbelief.record.following import TimelineKeeper
from distbelief.record.metrics import GOES_BACK, behind, goes_back, in_effect, line
from distbelief.record.sinks import Sink
from distbelief.record.summary import Summary
from distbelief.record.timeline import Timeline

RECENT = 10_000
"""Most records that may come while a checkpoint is sealed; after more records it has no sums."""
SUMS = "sums.msgpack"
"""Checkpoint's file with the sums of the run until then; without it all metrics are read."""


class CheckpointSums(msgspec.Struct):
    """Sums of a run at a checkpoint."""

    sums: Summary
    reported: int
    """Samples done when the checkpoint was sealed, perhaps more than it contains."""


class Recorder:
    """Recorder of a job, which takes its records in the order of time.

    A resumed run appends to the metrics; its sums and history continue from the samples that `Started` names.

    Args:
        folder: the run folder, or None to write nothing.
        job: contents of `job.json`, as in `Summary`.
        warn: called once each if the metrics or the result cannot be written; prints to stderr by default.
    """

    def __init__(self, folder: RunFolder | None, job: Json, warn: Callable[[str], None] | None = None) -> None:
        self.folder, self.job = folder, dict(job)
        self.summary = Summary(self.job)
        self._settled = Summary(self.job)
        """Sums over all records before `_recent`."""
        self._recent: deque[tuple[float, records.Record, int]] = deque()
        """Records that the next checkpoint may lack, each with its seconds and the samples done until then."""
        self.warn = warn or _to_stderr
        self._file: io.FileIO | None = None
        self.sinks: list[Sink] = []
        """Receivers of each record."""
        self.timeline: Timeline | None = None
        if folder:
            keeper = TimelineKeeper(folder, self.job)
            self.timeline = keeper.timeline
            self.sinks += [Curves(TensorBoardEvents(folder.path), self.warn, TENSORBOARD_PERIOD), keeper]
        self._torn = self._warned = False
        if folder:
            try:
                self._file = folder.metrics.open("ab", buffering=0)
                if self._file.tell():
                    self._file.truncate(behind(folder.metrics, b"\n"))  # a kill may have torn the last line
            except OSError as error:
                self._complain(error)

    def take(self, seconds: float, record: records.Record) -> None:
        """Write a record from `seconds` after the attempt began; a full disk is reported once and does not end the
        job.
        """
        if self.folder and isinstance(record, GOES_BACK):
            self._settled = self._sums(self.folder, record.samples)
            self._recent.clear()
            if isinstance(record, records.Started):
                begun, self.summary = self.summary, deepcopy(self._settled)
                self.summary.job = self.job
                # these are of the attempt, which began before its start
                self.summary.members, self.summary.failures = begun.members, begun.failures
        self.summary.take(seconds, record)
        self._write(line(seconds, record))
        if self.folder:
            self._recent.append((seconds, record, self.summary.samples))
            if len(self._recent) > RECENT:
                self._settled.take(*self._recent.popleft()[:2])
            if isinstance(record, records.Checkpointed) and not record.error:
                self._keep_sums(self.folder, record.number)
        for sink in [*self.sinks]:
            self._pass(sink, lambda sink: sink.take(seconds, record, self.summary))

    def _pass(self, sink: Sink, give: Callable[[Sink], None]) -> None:
        """Pass something to a sink; drop one that raises, since a job must not fail because it is shown."""
        try:
            give(sink)
        except Exception as error:
            self.sinks.remove(sink)
            self.warn(f"{type(sink).__name__} fails ({error!r}); the job continues without it")

    def _keep_sums(self, folder: RunFolder, number: int) -> None:
        """Write the sums of the run at a checkpoint into its folder."""
        checkpoint = Checkpoints(folder.path).folder_of(number)
        with contextlib.suppress(OSError, CheckpointError):  # earlier sums, or all metrics, are used instead
            samples = read_manifest(checkpoint).samples
            while self._recent and self._recent[0][2] <= samples:
                self._settled.take(*self._recent.popleft()[:2])
            for _ in range(len(self._recent)):  # bytes stay counted when a job goes back to a checkpoint
                entry = self._recent.popleft()
                if isinstance(entry[1], records.BytesCounted):
                    self._settled.take(*entry[:2])
                else:
                    self._recent.append(entry)
            if self._settled.samples <= samples:
                sums = CheckpointSums(msgspec.structs.replace(self._settled, job={}), self.summary.samples)
                write_atomically(checkpoint / SUMS, msgspec.msgpack.encode(sums))

    def _sums(self, folder: RunFolder, samples: int) -> Summary:
        """Return the summary at some number of samples: the sums of a checkpoint and the records after it."""
        path = folder.metrics
        try:
            for checkpoint in Checkpoints(folder.path).newest():
                if (kept := read_packed(checkpoint / SUMS, CheckpointSums)) is None:
                    continue
                mark = b'"event":"Checkpointed","number":%d,"error":""' % int(checkpoint.name)
                start = behind(path, mark) or path.stat().st_size  # without its record, later metrics are lost
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
        """Write all metrics again after their folder was deleted: the open file still has them."""
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
            self.warn(
                f"metrics cannot be written to {self.folder.metrics}: {error.strerror}; the job continues without them"
            )

    def result(self) -> Json:
        """Return the contents of `result.json`, as if the run ended now."""
        return {**self.summary.result(), "diagnosis": msgspec.to_builtins(diagnose(self.summary, self.timeline))}

    def finish(
        self, write: bool = True, interruptible: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> Json:
        """Write `result.json` (unless `write` is false) and the last curves, close the files, and return the result.

        Each sink is waited for in the context that `interruptible` makes: a KeyboardInterrupt there ends that wait.
        """
        result = self.result()
        if self.folder and write:
            try:
                write_atomically(self.folder.result, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
            except OSError as error:
                self.warn(f"{self.folder.result} cannot be written: {error.strerror}; the result is only shown")
        if self._file:
            self._file.close()
            self._file = None
        for sink in [*self.sinks]:
            with contextlib.suppress(KeyboardInterrupt), interruptible():
                self._pass(sink, lambda sink: sink.close(result))
        return result


def _to_stderr(text: str) -> None:
    print(f"distbelief: {text}", file=sys.stderr)
