"""The journal of a machine: everything that it was told, in order, from which another becomes what it was."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import msgspec

from distbelief.core import events, wire
from distbelief.core.messages import Message

LIMIT = 64 << 20
"""Longest journal in bytes: one that is full is of no use any more."""

_HEAD = struct.Struct("<I")
_ALONE: dict[str, type] = {kind.__name__: kind for kind in (events.Lost, events.Saved, events.Woke)}


class Entry(NamedTuple):
    """What a machine was told: by whom, in which life of that role (-1: it came by no link), and what."""

    sender: str
    life: int
    event: events.Event


class Journal:
    """Written before a machine acts on what it is told, so that nobody has seen more of it than stands there.

    Args:
        file: opened for reading and writing without a buffer, which outlives the process.

    >>> import io
    >>> from distbelief.core.messages import Go
    >>> journal = Journal(io.BytesIO())
    >>> journal.note("replica 0", 0, Go()); journal.note("clock", -1, events.Woke("now"))
    >>> [entry.event for entry in journal.entries()]
    [Go(), Woke(what='now')]
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = file.seek(0, 2)

    def note(self, sender: str, life: int, event: events.Event) -> None:
        """Write down what a machine is about to be told."""
        if self._size > LIMIT:
            return
        if isinstance(event, Message):
            kind, body = "", wire.encode(event)[wire.PREFIX.size :]
        else:
            kind, body = type(event).__name__, msgspec.msgpack.encode(event)
        entry = msgspec.msgpack.encode((sender, life, kind, body))
        self._file.write(_HEAD.pack(len(entry)) + entry)
        self._size += _HEAD.size + len(entry)

    @property
    def full(self) -> bool:
        """Whether something stands no longer in it."""
        return self._size > LIMIT

    def entries(self) -> Iterator[Entry]:
        """All that stands in it; what was being written as its writer died does not."""
        self._file.seek(0)
        data, begin = self._file.read(), 0
        while begin + _HEAD.size <= len(data):
            (length,) = _HEAD.unpack_from(data, begin)
            begin, end = begin + _HEAD.size, begin + _HEAD.size + length
            if end > len(data):
                break
            sender, life, kind, body = msgspec.msgpack.decode(data[begin:end])
            yield Entry(sender, life, msgspec.msgpack.decode(body, type=_ALONE[kind]) if kind else wire.decode(body))
            begin = end
