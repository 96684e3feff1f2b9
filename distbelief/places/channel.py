"""Channel between whoever starts and watches processes and one of these, or the agent of another host."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from distbelief.errors import RemoteProtocolError
from distbelief.places.messages import ChannelMessage, Failed, HostMessage, PredictionMessage, ProcessMessage

MESSAGE_LIMIT = 1 << 24
"""Longest message on a channel, in bytes."""
TEXT_LIMIT = 8000
"""Longest text of a failure, in characters: a message that is written in one piece is never half there."""
BEAT_SECONDS = 1.0
"""Between two signs of life of an agent."""
SILENCE_SECONDS = 45.0
"""Without a sign of life, after which the other end is gone. A cable that was cut for 15 s is heard from again within
30; links between roles give up a peer no earlier."""
MARK = b"\0distbelief agent\n"
"""First bytes of an agent: whatever a login shell prints before them is none of its messages."""

_encode = msgspec.msgpack.Encoder().encode
OF_PROCESS: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(ProcessMessage).decode
OF_HOST: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(HostMessage).decode
OF_PREDICTION: Callable[[bytes], ChannelMessage] = msgspec.msgpack.Decoder(PredictionMessage).decode


class Channel:
    """One end of a channel: in both directions a message is its length in 4 bytes, and itself; never a pickle.

    Args:
        connection: to read from.
        writes: to write to, where that is another.
        decode: of what the other end may say.
    """

    def __init__(
        self,
        connection: Connection,
        writes: Connection | None = None,
        decode: Callable[[bytes], ChannelMessage] = OF_PROCESS,
    ) -> None:
        self.connection, self._writes, self._decode = connection, writes or connection, decode

    def say(self, message: ChannelMessage) -> None:
        """Send a message; to an end that is gone, nothing."""
        if isinstance(message, Failed) and len(message.text) > TEXT_LIMIT:
            message = Failed(message.kind, "..." + message.text[-TEXT_LIMIT:])
        try:
            self._writes.send_bytes(_encode(message))
        except OSError:
            return

    def hear(self) -> ChannelMessage | None:
        """The next message; None when the other end is gone, be it in the middle of one.

        Raises:
            RemoteProtocolError: what comes is no message.
        """
        try:
            return self._decode(self.connection.recv_bytes(MESSAGE_LIMIT))
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the other end says what is no message: {error}") from error
        except (EOFError, OSError):
            return None

    def hear_all(self, take: Callable[[ChannelMessage], None]) -> bool:
        """Hand over every message that is here; False when the other end is gone.

        Raises:
            RemoteProtocolError: what is here is no message.
        """
        try:
            while self.connection.poll():
                if (message := self.hear()) is None:
                    return False
                take(message)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Say no more; the other end sees that."""
        self.connection.close()
        self._writes.close()
