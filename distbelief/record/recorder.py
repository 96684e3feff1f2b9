"""Recorder, which writes records as they come, the curves that TensorBoard shows, and the result at the end."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import msgspec

from distbelief.core import records
from distbelief.core.records import Json
from distbelief.errors import CheckpointError
from distbelief.record.checkpoints import Checkpoints, read_manifest
from distbelief.record.diagnosis import diagnose
from distbelief.record.folder import RunFolder, write_atomically, written_whole
from distbelief.record.following import Follower, RunSums
from distbelief.record.metrics import GOES_BACK, behind, goes_back, in_effect, line
from distbelief.record.summary import Mean, Summary
from distbelief.record.timeline import Timeline

RECENT = 10_000
"""Most records that may come while a checkpoint is sealed; after more records it has no sums."""
KEEP_SECONDS = 10.0
"""Least seconds between two writes of the timeline."""
SUMS = "sums.msgpack"
"""Checkpoint's file with the sums of the run until then; without it all metrics are read."""
SUMS_LIMIT = 64 << 20
POINTS = 200
"""Points of a training curve per epoch."""
UNKNOWN = 20_000
"""Assumed number of minibatches of an epoch of unknown length."""
PERIOD = 20.0
"""Least seconds between two writes of curves; those of short jobs are written at the end only."""
CLOSE_SECONDS = 60.0
"""Time limit for writing the last curves at the end of a job."""
Scalar = tuple[str, float, int, float]
"""Tag, value, samples and time."""


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
        self._warn = warn or _to_stderr
        self._file: io.FileIO | None = None
        self._curves = Curves(folder.path, self._warn) if folder else None
        self._torn = self._warned = False
        self.timeline = Timeline()
        self._kept = -math.inf
        """Time at which the timeline was written."""
        if folder:
            try:
                if folder.metrics.exists():
                    self.timeline = Follower(folder, self.job).read_all().timeline
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
                self.summary = deepcopy(self._settled)
                self.summary.job = self.job
        self.summary.take(seconds, record)
        self.timeline.take(seconds, record)
        self._write(line(seconds, record))
        if self.folder and (isinstance(record, records.Started) or time.monotonic() >= self._kept + KEEP_SECONDS):
            self._keep_timeline(self.folder)
        if self.folder:
            self._recent.append((seconds, record, self.summary.samples))
            if len(self._recent) > RECENT:
                self._settled.take(*self._recent.popleft()[:2])
            if isinstance(record, records.Checkpointed) and not record.error:
                self._keep_sums(self.folder, record.number)
        if self._curves:
            self._curves.take(seconds, record, self.summary)

    def _keep_timeline(self, folder: RunFolder) -> None:
        """Write the timeline, from which readers go on by the metrics."""
        self._kept = time.monotonic()
        with contextlib.suppress(OSError):  # the metrics have it all
            RunSums(folder.metrics.stat().st_size, self.summary, self.timeline).write(folder.timeline)

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
                if (kept := _read_sums(checkpoint / SUMS)) is None:
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
            self._warn(
                f"metrics cannot be written to {self.folder.metrics}: {error.strerror}; the job continues without them"
            )

    def result(self) -> Json:
        """Return the contents of `result.json`, as if the run ended now."""
        return {**self.summary.result(), "diagnosis": msgspec.to_builtins(diagnose(self.summary, self.timeline))}

    def finish(self, write: bool = True) -> Json:
        """Write `result.json` (unless `write` is false) and the last curves, close the files, and return the result."""
        result = self.result()
        if self.folder and write:
            try:
                write_atomically(self.folder.result, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
            except OSError as error:
                self._warn(f"{self.folder.result} cannot be written: {error.strerror}; the result is only shown")
        if self.folder:
            self._keep_timeline(self.folder)
        if self._file:
            self._file.close()
            self._file = None
        if self._curves:
            self._curves.close()
        return result


def _read_sums(path: Path) -> CheckpointSums | None:
    """Read the sums of a checkpoint; None if they are missing or corrupt."""
    try:
        if path.stat().st_size <= SUMS_LIMIT:
            return msgspec.msgpack.decode(path.read_bytes(), type=CheckpointSums)
    except (OSError, msgspec.DecodeError):
        pass
    return None


def _to_stderr(text: str) -> None:
    print(f"distbelief: {text}", file=sys.stderr)


class Curves:
    """Scalars over samples, which a thread writes to a folder as TensorBoard events, since TensorBoard imports slowly.

    Args:
        folder: folder of the events.
        warn: called once if they cannot be written.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._due: list[Scalar] = []
        self._loss = Mean()
        self._samples = self._from = 0
        self._seconds = 0.0
        self._wrote = time.monotonic()
        self._thread: threading.Thread | None = None
        self._first: int | None = None  # the start of a resumed run hides older points beyond it
        self._broken = False

    def take(self, seconds: float, record: records.Record, summary: Summary) -> None:
        """Take a record and the sums that include it."""
        match record:
            case records.Started():
                self._samples = self._from = record.samples
                self._first = record.samples or None
                self._seconds = seconds
            case records.Stepped():
                if record.loss is not None:
                    self._loss.add(record.loss, record.losses)
                self._samples = summary.samples
                started = summary.started
                per_epoch = started.samples_per_epoch or UNKNOWN * started.batch_size if started else 0
                if (self._samples - self._from) * POINTS >= per_epoch:
                    self._point(seconds)
            case records.Iterated():
                self._add("train/batch_loss", record.loss)
                self._add("train/gradient", record.gradient)
            case records.Tested():
                accuracy = {} if record.accuracy is None else {"accuracy": record.accuracy}
                for name, value in {"loss": record.loss, **accuracy, **record.metrics}.items():
                    self._add(f"test/{name}", value)
            case records.EpochDone():
                if time.monotonic() - self._wrote >= PERIOD:
                    self._write_beside()
            case records.Finished():
                mean = summary.staleness()["mean"]
                if mean is not None:
                    self._add("staleness/mean", mean)

    def _point(self, seconds: float) -> None:
        loss = self._loss.take()
        if loss is not None:
            self._add("train/loss", loss)
        if seconds > self._seconds:
            self._add("samples_per_second", (self._samples - self._from) / (seconds - self._seconds))
        self._from, self._seconds = self._samples, seconds

    def _add(self, tag: str, value: float) -> None:
        self._due.append((tag, value, self._samples, time.time()))

    def _write_beside(self) -> None:
        if self._due and not self._broken and (self._thread is None or not self._thread.is_alive()):
            due, self._due = self._due, []
            self._wrote = time.monotonic()
            self._thread = threading.Thread(target=self._write, args=(due,), name="curves", daemon=True)
            self._thread.start()

    def _write(self, due: list[Scalar]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter

            with _no_traceback_of_threads(), SummaryWriter(str(self._folder), purge_step=self._first) as writer:
                self._first = None
                for tag, value, samples, when in due:
                    writer.add_scalar(tag, value, samples, when)
        except Exception as error:  # a job must not fail because of its curves
            self._broken = True
            self._warn(
                f"TensorBoard events cannot be written to {self._folder}: {error}; the curves are in metrics.jsonl too"
            )

    def close(self) -> None:
        """Write the last curves, waiting at most `CLOSE_SECONDS`."""
        end = time.monotonic() + CLOSE_SECONDS
        for _ in range(2):  # wait for a write under way, and for the rest
            if self._thread:
                self._thread.join(max(0.0, end - time.monotonic()))
            self._write_beside()
        if self._thread and self._thread.is_alive():
            self._warn(
                f"TensorBoard events were not written to {self._folder} within {CLOSE_SECONDS:g} s; the curves are in "
                "metrics.jsonl too"
            )


@contextlib.contextmanager
def _no_traceback_of_threads() -> Iterator[None]:
    """Silence TensorBoard's thread on a full disk, since its writer raises the same error."""
    before = threading.excepthook
    threading.excepthook = lambda args: None if issubclass(args.exc_type, OSError) else before(args)
    try:
        yield
    finally:
        threading.excepthook = before
