"""Curves of a run over its samples, and the TensorBoard events that they are written as."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from distbelief.core import records
from distbelief.core.records import Json
from distbelief.record.summary import Mean, Summary

POINTS = 200
"""Points of a training curve per epoch."""
UNKNOWN = 20_000
"""Assumed number of minibatches of an epoch of unknown length."""
PERIOD = 5.0
"""Least seconds between two writes of curves; those of short jobs are written at the end only."""
TENSORBOARD_PERIOD = 20.0
"""The same for TensorBoard, which is imported for it and opens a file each time."""
CLOSE_SECONDS = 60.0
"""Time limit for writing the last curves at the end of a job."""
SILENT = 10.0
"""Seconds of this time after which the user is told what the end waits for."""
WAITING = 50_000
"""Most points that wait to be written; after more, the oldest are lost."""
Scalar = tuple[str, float, int, float]
"""Tag, value, samples and time."""


class CurveWriter(Protocol):
    """Writer of curves to a folder or a service; a thread calls it, so it may wait.

    An error is shown once, with the text of the writer; then nothing more is written.
    """

    def __str__(self) -> str:
        """Say what is written where."""

    def open(self) -> None:
        """Begin before anything is written, or go on where an earlier attempt of the run ended."""

    def write(self, points: Sequence[Scalar], first: int) -> None:
        """Write points; a resumed run begins again at `first` samples, and older points beyond it are undone."""

    def close(self, result: Json) -> None:
        """End with the result of the run, after the last points."""


class Curves:
    """Sink that computes points, which a thread hands to a writer now and then, and at the end.

    Args:
        writer: the writer of the points.
        warn: called once if they cannot be written.
        period: least seconds between two writes.
    """

    def __init__(self, writer: CurveWriter, warn: Callable[[str], None], period: float = PERIOD) -> None:
        self._writer, self._warn, self._period = writer, warn, period
        self._due: deque[Scalar] = deque(maxlen=WAITING)
        self._loss = Mean()
        self._samples = self._from = self._first = 0
        self._seconds = 0.0
        self._wrote = time.monotonic()
        self._batches: queue.Queue[tuple[list[Scalar], int, Json | None]] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._write, name="curves", daemon=True)
        self._begun = self._broken = False

    def take(self, seconds: float, record: records.Record, summary: Summary) -> None:
        """Take a record and the sums that include it."""
        match record:
            case records.Started():
                self._samples = self._from = self._first = record.samples
                self._seconds = seconds
                self._begun = True
            case records.Stepped():
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
            case records.Finished():
                mean = summary.staleness()["mean"]
                if mean is not None:
                    self._add("staleness/mean", mean)
        if self._due and not self._broken and time.monotonic() >= self._wrote + self._period:
            self._pass()

    def _point(self, seconds: float) -> None:
        loss = self._loss.take()
        if loss is not None:
            self._add("train/loss", loss)
        if seconds > self._seconds:
            self._add("samples_per_second", (self._samples - self._from) / (seconds - self._seconds))
        self._from, self._seconds = self._samples, seconds

    def _add(self, tag: str, value: float) -> None:
        self._due.append((tag, value, self._samples, time.time()))

    def _pass(self, result: Json | None = None, wait: float = 0.0) -> None:
        """Pass what is due to the thread, unless it is still busy with what was passed before."""
        if self._thread.ident is None:
            self._thread.start()
        with contextlib.suppress(queue.Full):
            self._batches.put(([*self._due], self._first, result), wait > 0, wait)
            self._due.clear()
            self._wrote = time.monotonic()

    def _write(self) -> None:
        """Write batches until the last one, which has the result."""
        result = None
        try:
            self._writer.open()
            while result is None:
                due, first, result = self._batches.get()
                if due:
                    self._writer.write(due, first)
            self._writer.close(result)
        except Exception as error:  # a job must not fail because of its curves
            self._broken = True
            with contextlib.suppress(queue.Empty):
                self._batches.get_nowait()  # `close` may be waiting to pass the last one
            self._warn(f"{self._writer} cannot be written: {error}; the curves are in metrics.jsonl too")

    def close(self, result: Json) -> None:
        """Write the last curves, waiting at most `CLOSE_SECONDS`; nothing of a job that never began is written."""
        if not self._begun or self._broken:
            return
        end = time.monotonic() + CLOSE_SECONDS
        sentence = f"waits {CLOSE_SECONDS:g} s at most until {self._writer} are written; Ctrl-C ends the wait"
        notice = threading.Timer(SILENT, self._warn, [sentence])
        why = f"within {CLOSE_SECONDS:g} s"
        try:
            notice.start()
            self._pass(result, CLOSE_SECONDS)
            self._thread.join(max(0.0, end - time.monotonic()))
            late = self._thread.is_alive()
        except KeyboardInterrupt:
            late, why = True, "before Ctrl-C came"
        finally:
            notice.cancel()
        if late:
            self._warn(f"{self._writer} were not written {why}; the curves are in metrics.jsonl too")


class TensorBoardEvents:
    """Writer of the events that TensorBoard shows, in a run folder; it imports TensorBoard late, as that is slow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first: int | None = None

    def __str__(self) -> str:
        return f"TensorBoard events in {self._folder}"

    def open(self) -> None:
        """Open nothing: each write opens a file."""

    def write(self, points: Sequence[Scalar], first: int) -> None:
        """Add the points to the events; the first of a resumed run hide older points beyond them."""
        from torch.utils.tensorboard import SummaryWriter

        purged = None if first == self._first else first or None
        self._first = first
        with _no_traceback_of_threads(), SummaryWriter(str(self._folder), purge_step=purged) as writer:
            for tag, value, samples, when in points:
                writer.add_scalar(tag, value, samples, when)

    def close(self, result: Json) -> None:
        """Leave the events as they are."""


@contextlib.contextmanager
def _no_traceback_of_threads() -> Iterator[None]:
    """Silence TensorBoard's thread on a full disk, since its writer raises the same error."""
    before = threading.excepthook
    threading.excepthook = lambda args: None if issubclass(args.exc_type, OSError) else before(args)
    try:
        yield
    finally:
        threading.excepthook = before
