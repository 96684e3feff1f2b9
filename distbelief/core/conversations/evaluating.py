"""Evaluating: the messages by which the server's model is measured."""

from __future__ import annotations

import msgspec

from distbelief.core.conversations.membership import Join
from distbelief.core.conversations.table import Conversation, Says, States, TextEnum, Transition
from distbelief.core.events import Lost
from distbelief.core.messages import Message
from distbelief.core.roles import Kind


class Evaluate(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Fetch the server's model and measure it."""

    number: int


class Evaluated(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The evaluator's measure of the server's model: as `Measured`."""

    number: int
    loss: float
    accuracy: float | None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    seconds: float = 0.0


class EvaluatorStanding(TextEnum):
    """State of the evaluator, as the coordinator knows it."""

    EXPECTED = "expected"
    JOINED = "joined"
    NONE = "none"


EVALUATOR = States(
    "the evaluator",
    {
        EvaluatorStanding.EXPECTED: "it will come, or has come and is not welcomed yet",
        EvaluatorStanding.JOINED: "it is there",
        EvaluatorStanding.NONE: "nobody measures",
    },
    (
        Transition(EvaluatorStanding.EXPECTED, EvaluatorStanding.JOINED),
        Transition(EvaluatorStanding.JOINED, EvaluatorStanding.EXPECTED, (Lost, Join)),
        Transition(EvaluatorStanding.JOINED, EvaluatorStanding.NONE, (Lost,)),
        Transition(EvaluatorStanding.EXPECTED, EvaluatorStanding.NONE, (Lost,)),
        Transition(EvaluatorStanding.NONE, EvaluatorStanding.EXPECTED, (Join,)),
    ),
)

EVALUATING = Conversation(
    "Evaluating",
    (
        Says(Evaluate, by=(Kind.COORDINATOR,), to=(Kind.EVALUATOR,)),
        Says(Evaluated, by=(Kind.EVALUATOR,), to=(Kind.COORDINATOR,), answers=Evaluate),
    ),
    (EVALUATOR,),
)
