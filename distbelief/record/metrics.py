"""Lines of `metrics.jsonl`: every record of a run in order, and how they are read back."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import msgspec

from distbelief.core import records, roles
from distbelief.core.records import Json
from distbelief.errors import RemoteProtocolError

_encode = msgspec.json.Encoder().encode


SECONDS_LIMIT = 1e9
"""Most seconds of a run, some thirty years; a line with more is spoilt."""


class _Seconds(msgspec.Struct):
    seconds: Annotated[float, msgspec.Meta(ge=-SECONDS_LIMIT, le=SECONDS_LIMIT)]


_seconds = msgspec.json.Decoder(_Seconds)
_records: msgspec.json.Decoder[records.AnyRecord] = msgspec.json.Decoder(records.AnyRecord)
LONGEST = 1 << 20
"""Most bytes of a line, beyond the limit of a reading."""
BLOCK = 1 << 16
"""Bytes read at a time from the end of a file."""
GOES_BACK = (records.Started, records.Rewound)
"""Kinds of records after which a job may continue from fewer samples."""


def line(seconds: float, record: records.Record) -> bytes:
    r"""Return a line of `metrics.jsonl`: `seconds`, `event` and the fields of the record as JSON.

    >>> line(1.5, records.Note("hello"))
    b'{"seconds":1.500000,"event":"Note","text":"hello"}\n'
    """
    return b'{"seconds":%.6f,' % seconds + _encode(record)[1:] + b"\n"


def read_metrics(
    path: Path, start: int = 0, kinds: Sequence[type[records.Record]] = ()
) -> Iterator[tuple[float, records.Record]]:
    """Yield the records of a `metrics.jsonl` with their seconds; lines that a kill or a full disk has torn are skipped.

    Args:
        path: path of the file.
        start: first byte to read.
        kinds: kinds of records to read; all by default.

    Raises:
        OSError: the file cannot be read.
    """
    marks = [b'"event":"%s"' % kind.__name__.encode() for kind in kinds]
    with path.open("rb") as file:
        file.seek(start)
        for text in file:
            if marks and not any(mark in text for mark in marks):
                continue
            if (read := _parsed(text)) is not None:
                yield read


def read_further(path: Path, start: int, limit: int) -> tuple[list[tuple[float, records.Record]], int]:
    """Return the records of the complete lines from byte `start` on, and the byte after them.

    At most `limit` bytes and the rest of a line are read; a line longer than `LONGEST` is skipped. Raises an `OSError`
    if the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(limit) + file.readline(LONGEST)
    whole = text.rfind(b"\n") + 1 or (len(text) if len(text) > LONGEST else 0)
    read = [_parsed(line) for line in text[:whole].splitlines()]
    return [each for each in read if each is not None], start + whole


def _parsed(text: bytes) -> tuple[float, records.Record] | None:
    """Return the seconds and the record of a line; None if it is torn."""
    try:
        seconds, record = _seconds.decode(text).seconds, _record(text)
        if role := getattr(record, "role", ""):
            roles.parse(role)
    except (msgspec.DecodeError, RemoteProtocolError, UnicodeDecodeError, RecursionError):
        return None
    return seconds, record


def _record(text: bytes) -> records.Record:
    if b'"event":"Tested"' not in text:
        return _records.decode(text)
    fields = msgspec.json.decode(text, type=Json)  # JSON has no NaN: it was written as null
    known = {key: math.nan if value is None else value for key, value in fields.items()}
    return msgspec.convert(known, records.Tested)


def goes_back(path: Path, start: int = 0) -> list[int]:
    """Return the numbers of samples from which the run has continued, or raise an `OSError`."""
    return [record.samples for _, record in read_metrics(path, start, GOES_BACK) if isinstance(record, GOES_BACK)]


def in_effect(
    path: Path, ends: Sequence[int], start: int = 0, total: int = 0
) -> Iterator[tuple[float, records.Record]]:
    """Yield the records that still count after all returns to checkpoints; counts of bytes always count.

    Args:
        path: path of the file.
        ends: the numbers of samples that `goes_back` returns, and the last such number.
        start: first byte to read.
        total: number of samples before that byte.

    Raises:
        OSError: the file cannot be read.
    """
    # a record counts unless the run later continues from fewer samples
    most = [*accumulate(reversed(ends), min)][::-1]
    begun = 0
    for seconds, record in read_metrics(path, start):
        if isinstance(record, GOES_BACK):
            begun, total = begun + 1, record.samples
        elif isinstance(record, records.Stepped):
            total += record.samples
        if total <= most[begun] or isinstance(record, records.BytesCounted):
            yield seconds, record


def behind(path: Path, mark: bytes) -> int:
    """Return the position after the last line that contains a mark, or 0; or raise an `OSError`."""
    with path.open("rb") as file:
        position, later = file.seek(0, os.SEEK_END), b""
        while position:
            start = max(0, position - BLOCK)
            file.seek(start)
            text = file.read(position - start) + later
            if (at := text.rfind(mark)) >= 0:
                file.seek(start + at)
                file.readline()
                return file.tell()
            position, later = start, text[: len(mark) - 1]
    return 0
