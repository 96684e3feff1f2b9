"""The form of a conversation as a table: who says which message to whom, and the states that something goes through."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from distbelief.core.messages import Message
from distbelief.core.roles import Kind
from distbelief.errors import LocalProtocolError

State = TypeVar("State", bound=StrEnum)


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


class Transition(NamedTuple):
    """One move of something from a state to another.

    Args:
        before: the state that it leaves.
        after: the state that it comes to.
        on: the events of which one moves it; none where any may.
    """

    before: StrEnum
    after: StrEnum
    on: tuple[type, ...] = ()


class TextEnum(StrEnum):
    """An enum of which each member is as quick a key as its text."""

    # the hash of an Enum is a Python function, and machines look into their tables with every message
    __hash__ = str.__hash__


class States(Generic[State]):
    """The states of something, what each means, and what moves it.

    Args:
        of: what has them.
        meaning: of each; the first is that in which it begins.
        moves: all that there are; what stays as it is has not moved.

    >>> from distbelief.core.conversations.checkpointing import CHECKPOINT, CheckpointStage
    >>> CHECKPOINT.move(CheckpointStage.NONE, CheckpointStage.HOLDING)
    <CheckpointStage.HOLDING: 'holding'>
    """

    forgotten = True
    """They are the same for all that have them, and no part of a machine's memory."""

    def __init__(self, of: str, meaning: Mapping[State, str], moves: tuple[Transition, ...]) -> None:
        self.of, self.meaning, self.moves = of, meaning, moves
        self._moves: dict[tuple[StrEnum, StrEnum], tuple[type, ...]] = {
            (move.before, move.after): move.on for move in moves
        }

    def move(self, before: State, after: State, on: type | None = None) -> State:
        """The state after a move; where the event is known that has moved it, that must be one of those that do.

        Raises:
            LocalProtocolError: no such move is in the table.
        """
        if before is after:
            return after
        known = self._moves.get((before, after))
        if known is None or (known and on is not None and on not in known):
            what = f" on {on.__name__}" if on is not None else ""
            raise LocalProtocolError(f"{self.of} cannot go from {before} to {after}{what}: its table has no such move")
        return after


class Conversation(NamedTuple):
    """One conversation.

    Args:
        title: of it.
        says: who says what to whom.
        states: of those who take part in it, as far as it moves them.
    """

    title: str
    says: tuple[Says, ...]
    states: tuple[States[Any], ...] = ()
