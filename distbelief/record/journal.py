"""The journal of a machine: what it held at some moment, and all it was told since; another goes on by it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import msgspec

from distbelief.core import events, wire
from distbelief.core.messages import Message

LONG = 1 << 20
"""Bytes of what a machine was told after which it is better to write down what it holds."""
LIMIT = 16 << 20
"""Longest journal in bytes: one that is full is of no use any more."""

_TOP = struct.Struct("<QI")  # how often a journal was begun anew, and the length of the memory that follows
_HEAD = struct.Struct("<I")
_ALONE: dict[str, type] = {kind.__name__: kind for kind in (events.Lost, events.Saved, events.Woke)}


class JournalEntry(NamedTuple):
    """Event that a machine took: sender, its incarnation (-1: it came by no link), and the event."""

    sender: str
    incarnation: int
    event: events.Event


class Journal:
    """Written before a machine acts on what it is told, so that nobody has seen more of it than stands there.

    Args:
        files: two, opened for reading and writing without a buffer, which outlive the process: it is begun anew in the
            other one, so that there is a whole one at any moment.

    >>> import io
    >>> from distbelief.core.conversations.checkpointing import Go
    >>> from distbelief.core.timers import CheckpointDue
    >>> files = io.BytesIO(), io.BytesIO()
    >>> journal = Journal(*files); journal.note("replica 0", 0, Go()); journal.begin(b"all"); journal.note("clock", -1,
    ...     events.Woke(CheckpointDue()))
    >>> again = Journal(*files); again.memory, list(again.entries())
    (b'all', [JournalEntry(sender='clock', incarnation=-1, event=Woke(timer=CheckpointDue()))])
    """

    def __init__(self, *files: BinaryIO) -> None:
        self._files = files
        self.memory = b""
        """State of the machine when the journal was begun; empty for a new machine."""
        self._begun, self.memory, self._told = max(map(_read, files), key=lambda journal: journal[0])
        self._since = len(self._told)
        self._size = _TOP.size + len(self.memory) + self._since
        if self._begun:
            self._file.seek(self._size)
            self._file.truncate()
        else:
            self.begin(b"")

    @property
    def _file(self) -> BinaryIO:
        return self._files[self._begun % len(self._files)]

    def begin(self, memory: bytes) -> None:
        """Begin anew with what the machine holds now."""
        self._begun += 1
        self._file.seek(0)
        self._file.truncate()
        self._file.write(_TOP.pack(self._begun, len(memory)) + memory)
        self.memory, self._told, self._since, self._size = memory, b"", 0, _TOP.size + len(memory)

    def note(self, sender: str, incarnation: int, event: events.Event) -> None:
        """Write down what a machine is about to be told."""
        if self._size > LIMIT:
            return
        if isinstance(event, Message):
            kind, body = "", wire.encode(event)[wire.PREFIX.size :]
        else:
            kind, body = type(event).__name__, msgspec.msgpack.encode(event)
        entry = msgspec.msgpack.encode((sender, incarnation, kind, body))
        self._file.write(_HEAD.pack(len(entry)) + entry)
        self._since += _HEAD.size + len(entry)
        self._size += _HEAD.size + len(entry)

    @property
    def long(self) -> bool:
        """Return whether it is so long that it should be begun anew."""
        return self._since > max(LONG, 2 * len(self.memory)) or (self._since > LONG and self._size > LIMIT // 2)

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the events that the machine took since then, until the journal was opened."""
        end = 0
        while end < len(self._told):
            begin, end = end + _HEAD.size, _end(self._told, end)
            sender, incarnation, kind, body = msgspec.msgpack.decode(self._told[begin:end])
            yield JournalEntry(
                sender, incarnation, msgspec.msgpack.decode(body, type=_ALONE[kind]) if kind else wire.decode(body)
            )


def _end(data: bytes, begin: int) -> int:
    """Return the end of the entry that begins there; 0 where it is not whole."""
    if len(data) < begin + _HEAD.size:
        return 0
    end = begin + _HEAD.size + int(_HEAD.unpack_from(data, begin)[0])
    return end if end <= len(data) else 0


def _read(file: BinaryIO) -> tuple[int, bytes, bytes]:
    """Return how often the journal was begun, its memory, and the whole entries that follow.

    Without a whole memory it was never begun.
    """
    file.seek(0)
    data = file.read()
    if len(data) < _TOP.size:
        return 0, b"", b""
    begun, length = _TOP.unpack_from(data)
    first = last = _TOP.size + length
    if len(data) < first:
        return 0, b"", b""
    while end := _end(data, last):
        last = end
    return begun, data[_TOP.size : first], data[first:last]
