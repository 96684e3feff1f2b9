"""The curves that TensorBoard shows, over samples.

They are gathered while the job runs and written beside it in a thread, since TensorBoard is slow to import.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distbelief.core import records
from distbelief.record.summary import Mean, Summary

POINTS = 200
"""Points of a training curve per epoch."""
UNKNOWN = 20_000
"""Minibatches that an epoch is taken for where nobody knows how many it has."""
PERIOD = 20.0
"""Least seconds of the wall between two writings; short jobs are written at their end only."""

CLOSE_SECONDS = 60.0
"""Limit of a job's end for writing the last of them."""

Scalar = tuple[str, float, int, float]
"""Tag, value, samples, time of the wall."""


class Curves:
    """Gathers scalars and writes them as TensorBoard events into a folder.

    Args:
        folder: where the events go.
        warn: is told, once, that they cannot be written.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._due: list[Scalar] = []
        self._loss = Mean()
        self._samples = self._from = 0
        self._seconds = 0.0
        self._wrote = time.monotonic()
        self._thread: threading.Thread | None = None
        self._first: int | None = None  # where a resumed run goes on: older points beyond it are hidden
        self._broken = False

    def take(self, seconds: float, record: records.Record, summary: Summary) -> None:
        """Take a record and the sums that contain it."""
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
        except Exception as error:  # whatever TensorBoard raises, a curve is not worth a job
            self._broken = True
            self._warn(
                f"TensorBoard events cannot be written to {self._folder}: {error}; the curves are in metrics.jsonl too"
            )

    def close(self) -> None:
        """Write what is left and wait until it is on disk, for `CLOSE_SECONDS` at most."""
        end = time.monotonic() + CLOSE_SECONDS
        for _ in range(2):  # what is being written, and the rest
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
    """Silence TensorBoard's own thread on a full disk: its writer raises the same, which is told in one line."""
    before = threading.excepthook
    threading.excepthook = lambda args: None if issubclass(args.exc_type, OSError) else before(args)
    try:
        yield
    finally:
        threading.excepthook = before
