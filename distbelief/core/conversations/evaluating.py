"""Evaluating: the messages by which the server's model is measured."""

from __future__ import annotations

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message
from distbelief.core.roles import Kind


class Evaluate(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Fetch the server's model and measure it."""

    number: int


class Evaluated(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The evaluator's measure of the server's model."""

    number: int
    loss: float
    accuracy: float


EVALUATING = Conversation(
    "Evaluating",
    (
        Says(Evaluate, by=(Kind.COORDINATOR,), to=(Kind.EVALUATOR,)),
        Says(Evaluated, by=(Kind.EVALUATOR,), to=(Kind.COORDINATOR,), answers=Evaluate),
    ),
)
