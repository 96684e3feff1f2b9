"""The tables of the conversations: each is whole, and what follows from them is refused where they do not have it."""

from __future__ import annotations

from typing import Any

import pytest

from distbelief.core import events
from distbelief.core.conversations.checkpointing import CHECKPOINT, CheckpointStage
from distbelief.core.conversations.phases import ALLOWED, PHASES, May, Phase
from distbelief.core.conversations.table import States
from distbelief.core.messages import Message
from distbelief.core.protocol import CONVERSATIONS
from distbelief.errors import LocalProtocolError

STATES: list[States[Any]] = [PHASES, *(states for conversation in CONVERSATIONS for states in conversation.states)]
TOLD = (Message, events.Lost, events.Saved, events.Woke)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=[one.title for one in CONVERSATIONS])
def test_every_row_names_a_message_and_those_who_say_and_hear_it(conversation: Any) -> None:
    rows = conversation.says
    assert all(issubclass(row.message, Message) and row.by and row.to for row in rows)
    assert len({(row.message, by, to) for row in rows for by in row.by for to in row.to}) == sum(
        len(row.by) * len(row.to) for row in rows
    )
    for row in rows:  # an answer goes back to where the question came from
        asked = [one for other in CONVERSATIONS for one in other.says if one.message is row.answers]
        assert row.answers is None or any({*row.to} <= {*one.by} and {*row.by} <= {*one.to} for one in asked), row


@pytest.mark.parametrize("states", STATES, ids=[states.of for states in STATES])
def test_all_states_can_be_reached_and_have_a_meaning(states: States[Any]) -> None:
    first, *_ = states.meaning
    assert set(states.meaning) == set(type(first))
    reached = {first}
    for _ in states.meaning:
        reached |= {move.after for move in states.moves if move.before in reached}
    assert reached == set(states.meaning)
    assert all(move.before is not move.after for move in states.moves)
    assert all(issubclass(event, TOLD) for move in states.moves for event in move.on)
    assert len({(move.before, move.after) for move in states.moves}) == len(states.moves)


def test_every_phase_allows_something_and_every_act_has_its_phase() -> None:
    assert set(ALLOWED) == set(Phase)
    assert all(ALLOWED.values())
    assert frozenset().union(*ALLOWED.values()) == set(May)


def test_a_move_that_no_table_has_is_a_bug_of_ours() -> None:
    with pytest.raises(
        LocalProtocolError, match="a job cannot go from gathering to training: its table has no such move"
    ):
        PHASES.move(Phase.GATHERING, Phase.TRAINING)
    assert PHASES.move(Phase.RESTORING, Phase.TRAINING) is Phase.TRAINING
    assert CHECKPOINT.move(CheckpointStage.NONE, CheckpointStage.HOLDING) is CheckpointStage.HOLDING
    assert CHECKPOINT.move(CheckpointStage.NONE, CheckpointStage.NONE) is CheckpointStage.NONE
