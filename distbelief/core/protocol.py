"""Protocol: all conversations, and what follows from them: allowed senders, receivers, and messages on a wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distbelief.core import events
from distbelief.core.conversations.agreement import AGREEMENT
from distbelief.core.conversations.attendance import ATTENDANCE
from distbelief.core.conversations.checkpointing import CHECKPOINTING
from distbelief.core.conversations.dealing import DEALING
from distbelief.core.conversations.evaluating import EVALUATING
from distbelief.core.conversations.grouping import GROUPING
from distbelief.core.conversations.initialising import INITIALISING
from distbelief.core.conversations.linking import LINKED, LINKING
from distbelief.core.conversations.membership import MEMBERSHIP
from distbelief.core.conversations.mirroring import MIRRORING
from distbelief.core.conversations.operations import OPERATIONS
from distbelief.core.conversations.partitioning import PARTITIONING
from distbelief.core.conversations.pushing import PUSHING
from distbelief.core.conversations.table import Conversation
from distbelief.core.messages import Message
from distbelief.core.roles import Kind

SERVED = (
    MEMBERSHIP, INITIALISING, DEALING, PUSHING, ATTENDANCE, AGREEMENT, CHECKPOINTING, EVALUATING, MIRRORING,
    PARTITIONING,
)  # fmt: skip
"""Conversations of a job with a server."""
BATCHED = (*SERVED, OPERATIONS)
"""Conversations of a job in batches, whose server operates on vectors."""
GROUPED = (MEMBERSHIP, DEALING, CHECKPOINTING, EVALUATING, GROUPING, PARTITIONING)
"""Conversations of a job whose replicas reduce their gradients among themselves."""
CONVERSATIONS = (LINKING, *SERVED, OPERATIONS, GROUPING)
"""All conversations."""
MESSAGES: tuple[type[Message], ...] = tuple(
    dict.fromkeys(row.message for conversation in CONVERSATIONS for row in conversation.says)
)
"""Every message that may be on a wire."""
ANSWERS: Mapping[type[Message], type[Message]] = {
    row.message: row.answers for conversation in SERVED for row in conversation.says if row.answers is not None
}
"""Message that each answer in a job with a server is to."""


def heard_by(kind: Kind, conversations: Iterable[Conversation]) -> Mapping[type, tuple[Kind, ...]]:
    """Return the events that a machine of a kind may receive in conversations, each with the kinds of its senders.

    >>> heard = heard_by(Kind.COORDINATOR, (DEALING,))
    >>> {event.__name__: [*map(str, kinds)] for event, kinds in heard.items()}
    {'Progress': ['replica'], 'StreamEnded': ['replica'], 'Lost': ['replica'], 'Saved': ['store'], 'Loaded': ['store'],
     'Woke': ['clock'], 'Lent': ['carrier']}
    """
    heard: dict[type, tuple[Kind, ...]] = {}
    others: set[Kind] = set()
    for row in (row for conversation in conversations for row in conversation.says):
        if kind in row.to:
            heard[row.message] = tuple(dict.fromkeys((*heard.get(row.message, ()), *row.by)))
            others |= {*row.by}
        if kind in row.by:
            others |= {*row.to}
    heard[events.Lost] = tuple(linked for linked in LINKED if linked in others)
    return heard | {event: (teller,) for event, teller in events.TELLERS.items()}
