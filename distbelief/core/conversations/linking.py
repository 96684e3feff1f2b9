"""Linking: the messages that open a link, and those that take up one to a coordinator that has come again. No machine
hears them.
"""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Hello, Message
from distbelief.core.roles import Kind


class Resume(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Number of messages that a role had heard before it lost its link to the coordinator."""

    heard: int


class Resumed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Number of messages that have come from that role (-1: it counts as gone); what it has missed follows."""

    heard: int


LINKED = (Kind.REPLICA, Kind.SHARD, Kind.STANDBY, Kind.COORDINATOR, Kind.EVALUATOR)
"""Kinds of role that have links; which two may have one follows from the messages between them."""
CALLERS = tuple(kind for kind in LINKED if kind is not Kind.COORDINATOR)
"""Kinds of role with a link to the coordinator."""

LINKING = Conversation(
    "Linking",
    (
        Says(Hello, by=LINKED, to=LINKED),
        Says(Resume, by=CALLERS, to=(Kind.COORDINATOR,)),
        Says(Resumed, by=(Kind.COORDINATOR,), to=CALLERS, answers=Resume),
    ),
)
