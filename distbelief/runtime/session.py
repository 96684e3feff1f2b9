"""Sessions: what two roles say to each other outlives the link between them, so that nothing is missed or taken twice
when it is opened again.
"""

from __future__ import annotations

from collections import deque

from distbelief.core.messages import Message
from distbelief.errors import RemoteProtocolError

KEPT = 4096
"""Messages that are kept, the last ones; more are not on their way to somebody who listens."""


class Session:
    """One side of it: counts what was said and heard, and keeps what was said last.

    Args:
        kept: how many of what is said.

    >>> from distbelief.core.conversations.checkpointing import Go
    >>> from distbelief.core.conversations.membership import Leave
    >>> here, there = Session(), Session()
    >>> here.say(Go()); here.say(Leave()); there.heard += 1  # the second is lost
    >>> here.missed(there.heard)
    [Leave(for_good=False, stops=False)]
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.heard = 0
        """Messages that have come from the other side."""
        self.said = 0
        self.kept: deque[Message] = deque(maxlen=kept)

    def say(self, message: Message) -> None:
        """Keep what is said now."""
        self.said += 1
        self.kept.append(message)

    def missed(self, heard: int) -> list[Message]:
        """Return the messages that the other side, which has heard so many, must be sent again.

        Raises:
            RemoteProtocolError: it has heard more than was said, or so much less that it is kept no more.
        """
        missing = self.said - heard
        if not 0 <= missing <= len(self.kept):
            raise RemoteProtocolError(
                f"{heard} messages are said to have come, of {self.said}; the last {len(self.kept)} are kept"
            )
        return list(self.kept)[len(self.kept) - missing :]
