"""Journal of a state machine: its state at some moment and the events since, from which another machine continues."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import msgspec

from distbelief.core import events, wire
from distbelief.core.messages import Message

LONG = 1 << 20
"""Bytes of events after which the state is written again."""
LIMIT = 16 << 20
"""Longest journal in bytes; events beyond it are not noted, and the journal is useless."""

_TOP = struct.Struct("<QI")  # number of times the journal was begun, and length of the memory that follows
_HEAD = struct.Struct("<I")
_ALONE: dict[str, type] = {kind.__name__: kind for kind in (events.Lost, events.Saved, events.Woke)}


class JournalEntry(NamedTuple):
    """Event that a machine handled, with its sender and the sender's incarnation (-1 for events without a link)."""

    sender: str
    incarnation: int
    event: events.Event


class Journal:
    """Journal to which an event is written before the machine acts on it, so that it lacks nothing that others saw.

    Args:
        files: two unbuffered files that outlive the process. Each `begin` switches to the other file, so that one is
            complete at any moment.

    >>> import io
    >>> from distbelief.core.conversations.checkpointing import Go
    >>> from distbelief.core.events import CheckpointDue
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
        """Begin the journal again with the machine's present state."""
        self._begun += 1
        self._file.seek(0)
        self._file.truncate()
        self._file.write(_TOP.pack(self._begun, len(memory)) + memory)
        self.memory, self._told, self._since, self._size = memory, b"", 0, _TOP.size + len(memory)

    def note(self, sender: str, incarnation: int, event: events.Event) -> None:
        """Write down an event before the machine handles it."""
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
        """Return whether the journal should be begun again."""
        return self._since > max(LONG, 2 * len(self.memory)) or (self._since > LONG and self._size > LIMIT // 2)

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the events in the journal as it was opened."""
        end = 0
        while end < len(self._told):
            begin, end = end + _HEAD.size, _end(self._told, end)
            sender, incarnation, kind, body = msgspec.msgpack.decode(self._told[begin:end])
            yield JournalEntry(
                sender, incarnation, msgspec.msgpack.decode(body, type=_ALONE[kind]) if kind else wire.decode(body)
            )


def _end(data: bytes, begin: int) -> int:
    """Return the end of the entry at `begin`, or 0 if it is incomplete."""
    if len(data) < begin + _HEAD.size:
        return 0
    end = begin + _HEAD.size + int(_HEAD.unpack_from(data, begin)[0])
    return end if end <= len(data) else 0


def _read(file: BinaryIO) -> tuple[int, bytes, bytes]:
    """Return how many times the journal was begun (0 if its memory is incomplete), its memory, and its complete
    entries.
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
