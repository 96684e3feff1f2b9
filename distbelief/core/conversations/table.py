"""The form of a conversation as a table: who says which message to whom."""

from __future__ import annotations

from typing import NamedTuple

from distbelief.core.messages import Message
from distbelief.core.roles import Kind


class Says(NamedTuple):
    """One row: a message, the kinds of role that say it, and those that are told.

    Args:
        message: its class.
        by: who says it.
        to: who is told.
        answers: the message that it answers, where it answers one.
    """

    message: type[Message]
    by: tuple[Kind, ...]
    to: tuple[Kind, ...]
    answers: type[Message] | None = None


class Conversation(NamedTuple):
    """One conversation.

    Args:
        title: of it.
        says: who says what to whom.
    """

    title: str
    says: tuple[Says, ...]
