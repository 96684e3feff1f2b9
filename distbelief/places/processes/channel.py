"""The channel between a process of a job and its supervisor, on which they say words to each other."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from distbelief.places.channel_messages import AnyChannelMessage, ChannelMessage, Failed

MESSAGE_LIMIT = 1 << 24
"""Longest message on a channel, in bytes."""
TEXT_LIMIT = 8000
"""Longest text of a failure, in characters: a word that is written in one piece is never half there."""


_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(AnyChannelMessage).decode


class Channel:
    """One end of a channel. Only bytes are sent on the connection, never a pickle."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def say(self, word: ChannelMessage) -> None:
        """Send a word; to a peer that is gone, nothing."""
        if isinstance(word, Failed) and len(word.text) > TEXT_LIMIT:
            word = Failed(word.kind, "..." + word.text[-TEXT_LIMIT:])
        try:
            self.connection.send_bytes(_encode(word))
        except (BrokenPipeError, ConnectionResetError):
            return

    def hear(self) -> ChannelMessage | None:
        """The next word; None when the other end is gone, be it in the middle of a word."""
        try:
            return _decode(self.connection.recv_bytes(MESSAGE_LIMIT))
        except (EOFError, OSError):
            return None

    def hear_all(self, take: Callable[[ChannelMessage], None]) -> bool:
        """Hand over every word that is here; False when the other end is gone."""
        while self.connection.poll():
            word = self.hear()
            if word is None:
                return False
            take(word)
        return True
