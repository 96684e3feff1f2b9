"""Scripting: the messages by which a replica whose loop is the user's learns where the job is before it takes part."""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message
from distbelief.core.roles import Kind


class AskReached(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Question of a script that is about to begin its loop: where is the job?"""


class JobReached(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Earliest epoch in which the job has minibatches left, and its newest checkpoint ("" for none)."""

    epoch: int
    checkpoint: str
    resumed: bool
    """True where the job goes on from an earlier attempt."""


SCRIPTING = Conversation(
    "Scripting",
    (
        Says(AskReached, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,)),
        Says(JobReached, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,), answers=AskReached),
    ),
)
