"""Conversations as tables: which roles send which message to which, and the states that it moves."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from distbelief.core.messages import Message
from distbelief.core.roles import Kind
from distbelief.errors import LocalProtocolError

State = TypeVar("State", bound=StrEnum)


class Says(NamedTuple):
    """Row of a conversation: a message, its senders and its receivers, and the message that it answers, if any."""

    message: type[Message]
    by: tuple[Kind, ...]
    to: tuple[Kind, ...]
    answers: type[Message] | None = None


class Transition(NamedTuple):
    """Move from one state to another, caused by one of these events, or by any event if none is listed."""

    before: StrEnum
    after: StrEnum
    on: tuple[type, ...] = ()


class TextEnum(StrEnum):
    """Enum whose members are as fast as keys as their texts."""

    # the hash of an Enum is a Python function, and machines look up their tables with every message
    __hash__ = str.__hash__


class States(Generic[State]):
    """States of a thing, their meanings, and the allowed moves between them.

    The first state is the initial one. Staying in a state is not a move.

    >>> from distbelief.core.conversations.checkpointing import CHECKPOINT, CheckpointStage
    >>> CHECKPOINT.move(CheckpointStage.NONE, CheckpointStage.HOLDING)
    <CheckpointStage.HOLDING: 'holding'>
    """

    forgotten = True
    """True since this is a constant, and no part of a machine's state."""

    def __init__(self, of: str, meaning: Mapping[State, str], moves: tuple[Transition, ...]) -> None:
        self.of, self.meaning, self.moves = of, meaning, moves
        self._moves = {(move.before, move.after) for move in moves}

    def move(self, before: State, after: State) -> State:
        """Return the state after a move that the table allows."""
        if before is not after and (before, after) not in self._moves:
            raise LocalProtocolError(f"{self.of} cannot go from {before} to {after}: its table has no such move")
        return after


class Conversation(NamedTuple):
    """Conversation: its title, its rows, and the states that it moves."""

    title: str
    says: tuple[Says, ...]
    states: tuple[States[Any], ...] = ()
