"""The recorder: writes every record down as it comes, and the result at the end."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from distbelief.core import records, roles
from distbelief.core.records import Json
from distbelief.errors import RemoteProtocolError
from distbelief.record.curves import Curves
from distbelief.record.folder import RunFolder, write_atomically, written_whole
from distbelief.record.summary import Summary, in_effect

_encode = msgspec.json.Encoder().encode

BLOCK = 1 << 16
"""Bytes that are read at a time, from the end of the metrics of an earlier attempt, to find their last whole line."""


def line(seconds: float, record: records.Record) -> bytes:
    r"""One line of `metrics.jsonl`: the record's fields as JSON, after `seconds` and `event`.

    >>> line(1.5, records.Note("hello"))
    b'{"seconds":1.500000,"event":"Note","text":"hello"}\n'
    """
    return b'{"seconds":%.6f,' % seconds + _encode(record)[1:] + b"\n"


def read_metrics(path: Path) -> Iterator[tuple[float, records.Record]]:
    """The records of a `metrics.jsonl`, with their seconds; torn lines (a full disk, a kill) are left out.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for text in file:
            try:
                fields = msgspec.json.decode(text, type=Json)
                if fields.get("event") == "Tested":  # JSON has no NaN: it was written as null
                    fields = {key: math.nan if value is None else value for key, value in fields.items()}
                seconds, record = (
                    float(fields.pop("seconds")),
                    msgspec.convert(fields, records.AnyRecord, str_keys=True),
                )
                if role := getattr(record, "role", ""):
                    roles.parse(role)
            except (msgspec.DecodeError, RemoteProtocolError, KeyError, TypeError, ValueError):
                continue
            yield seconds, record


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
        self._warn = warn or _to_stderr
        self._file: io.FileIO | None = None
        self._curves = Curves(folder.path, self._warn) if folder else None
        self._earlier: list[tuple[float, records.Record]] = []
        self._torn = self._warned = False
        if folder:
            self._open(folder.metrics)

    def _open(self, path: Path) -> None:
        try:
            self._earlier = list(read_metrics(path)) if path.exists() else []
            self._file = path.open("ab", buffering=0)
            self._file.truncate(_whole(path))
        except OSError as error:
            self._complain(error)

    def take(self, seconds: float, record: records.Record) -> None:
        """Write a record down; `seconds` count from the beginning of this attempt of the job. A full disk is noted once
        and does not stop it.
        """
        if (
            isinstance(record, records.Started) and self.summary.started and self.folder
        ):  # the job has begun again from a checkpoint
            self._earlier = list(read_metrics(self.folder.metrics))
        if isinstance(record, records.Started) and self._earlier:
            self.summary = Summary(self.job)
            for then, earlier in in_effect([*self._earlier, (seconds, record)]):
                self.summary.take(then, earlier)
            self._earlier = []
        else:
            self.summary.take(seconds, record)
        self._write(line(seconds, record))
        if self._curves:
            self._curves.take(seconds, record, self.summary)

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
        """Write all metrics again, where their file is gone with its folder; what was open is there until it is
        closed.
        """
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
        """What `result.json` holds, or would hold if the run ended now."""
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


def _whole(path: Path) -> int:
    """The length in bytes of the whole lines of a file: a kill may have torn the last one."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position:
            start = max(0, position - BLOCK)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0


def _to_stderr(text: str) -> None:
    print(f"distbelief: {text}", file=sys.stderr)
