"""The lines of `metrics.jsonl`: every record of a run, written down as it came, and read back one at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from distbelief.core import records, roles
from distbelief.core.records import Json
from distbelief.errors import RemoteProtocolError

_encode = msgspec.json.Encoder().encode


class _Seconds(msgspec.Struct):
    seconds: float


_seconds = msgspec.json.Decoder(_Seconds)
_records: msgspec.json.Decoder[records.AnyRecord] = msgspec.json.Decoder(records.AnyRecord)
BLOCK = 1 << 16
"""Bytes that are read at a time, from the end of the file."""
GOES_BACK = (records.Started, records.Rewound)
"""Records after which the job goes on from fewer samples."""


def line(seconds: float, record: records.Record) -> bytes:
    r"""One line of `metrics.jsonl`: the record's fields as JSON, after `seconds` and `event`.

    >>> line(1.5, records.Note("hello"))
    b'{"seconds":1.500000,"event":"Note","text":"hello"}\n'
    """
    return b'{"seconds":%.6f,' % seconds + _encode(record)[1:] + b"\n"


def read_metrics(
    path: Path, start: int = 0, kinds: Sequence[type[records.Record]] = ()
) -> Iterator[tuple[float, records.Record]]:
    """The records of a `metrics.jsonl`, with their seconds; torn lines (a full disk, a kill) are left out.

    Args:
        path: of the file.
        start: the byte to begin with.
        kinds: of the records that are read; none for all.

    Raises:
        OSError: the file cannot be read.
    """
    marks = [b'"event":"%s"' % kind.__name__.encode() for kind in kinds]
    with path.open("rb") as file:
        file.seek(start)
        for text in file:
            if marks and not any(mark in text for mark in marks):
                continue
            try:
                seconds, record = _seconds.decode(text).seconds, _record(text)
                if role := getattr(record, "role", ""):
                    roles.parse(role)
            except (msgspec.DecodeError, RemoteProtocolError, UnicodeDecodeError, RecursionError):
                continue
            yield seconds, record


def _record(text: bytes) -> records.Record:
    if b'"event":"Tested"' not in text:
        return _records.decode(text)
    fields = msgspec.json.decode(text, type=Json)  # JSON has no NaN: it was written as null
    known = {key: math.nan if value is None else value for key, value in fields.items()}
    return msgspec.convert(known, records.Tested)


def goes_back(path: Path, start: int = 0) -> list[int]:
    """From how many samples the run has gone on, each time that it did.

    Raises:
        OSError: the file cannot be read.
    """
    return [record.samples for _, record in read_metrics(path, start, GOES_BACK) if isinstance(record, GOES_BACK)]


def in_effect(
    path: Path, ends: Sequence[int], start: int = 0, total: int = 0
) -> Iterator[tuple[float, records.Record]]:
    """The records without those that were gone back on; what was sent stays sent.

    Args:
        path: of the file.
        ends: from how many samples the run goes on, each time: what `goes_back` says, and the last.
        start: the byte to begin with.
        total: samples before it.

    Raises:
        OSError: the file cannot be read.
    """
    most = [*accumulate(reversed(ends), min)][::-1]
    """Samples up to which records stay: no later beginning is of fewer."""
    begun = 0
    for seconds, record in read_metrics(path, start):
        if isinstance(record, GOES_BACK):
            begun, total = begun + 1, record.samples
        elif isinstance(record, records.Stepped):
            total += record.samples
        if total <= most[begun] or isinstance(record, records.BytesCounted):
            yield seconds, record


def behind(path: Path, mark: bytes) -> int:
    """The byte behind the last line that has a mark in it; 0 where none has.

    Raises:
        OSError: the file cannot be read.
    """
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
