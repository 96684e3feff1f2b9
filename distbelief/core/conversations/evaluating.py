"""Evaluating: the messages by which the server's model is measured."""

from __future__ import annotations

import msgspec

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Message
from distbelief.core.roles import Kind


class Evaluate(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to measure the model."""

    number: int


class Evaluated(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Measure of the model, as in `Measured`."""

    number: int
    loss: float
    accuracy: float | None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    seconds: float = 0.0


EVALUATING = Conversation(
    "Evaluating",
    (
        Says(Evaluate, by=(Kind.COORDINATOR,), to=(Kind.EVALUATOR,)),
        Says(Evaluated, by=(Kind.EVALUATOR,), to=(Kind.COORDINATOR,), answers=Evaluate),
    ),
)
