"""The machines against the tables of the conversations: what each answers, and from whom it takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from distbelief.core import events
from distbelief.core.conversations import dealing, membership, mirroring, operations, pushing
from distbelief.core.portions import ANEW
from distbelief.core.protocol import BATCHED, GROUPED, SERVED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.settings import Settings
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.server.machine import Answers
from distbelief.server.shard import Shard
from distbelief.server.standby import Standby
from distbelief.strategies import Allreduce, Downpour, Sandblaster
from distbelief.strategies.grouped.players import coordinator as group_coordinator
from distbelief.strategies.parameter_server.players import coordinator
from distbelief.strategies.sandblaster.players import coordinator as batch_coordinator
from distbelief.strategies.sandblaster.shard import WorkUnitSums


def never(*_: Any) -> Any:
    raise AssertionError


MACHINES: Mapping[str, tuple[Any, Kind, Any]] = {
    "coordinator": (coordinator(Settings(strategy=Downpour()), True, ANEW), Kind.COORDINATOR, SERVED),
    "sandblaster": (batch_coordinator(Settings(strategy=Sandblaster()), True, ANEW), Kind.COORDINATOR, BATCHED),
    "of a group": (group_coordinator(Settings(strategy=Allreduce()), True, ANEW), Kind.COORDINATOR, GROUPED),
    "shard": (Shard(0, never), Kind.SHARD, SERVED),
    "shard in batches": (Shard(0, never, sums=WorkUnitSums), Kind.SHARD, BATCHED),
    "standby": (Standby(0, never), Kind.STANDBY, SERVED),
    "standby in batches": (Standby(0, never, sums=WorkUnitSums), Kind.STANDBY, BATCHED),
}
DEAF = {
    "sandblaster": {dealing.Progress, dealing.StreamEnded},
    "of a group": {membership.Here, dealing.StreamEnded},
    "shard in batches": {pushing.Push},
}
"""What a table lets a machine hear that is for others of its kind."""
LOCAL = {*events.TELLERS, events.Lost}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_answers_all_that_it_may_be_told_and_nothing_else(name: str) -> None:
    machine, kind, conversations = MACHINES[name]
    heard = {event for event in heard_by(kind, conversations) if event not in LOCAL}
    of_batches = {row.message for row in operations.OPERATIONS.says} | {
        mirroring.OperationsDone,
        mirroring.WorkUnitTaken,
    }
    if "in batches" not in name:
        heard -= of_batches - {row.message for row in operations.OPERATIONS.says if "sandblaster" in name}
    assert {event for event in machine._answers._by_event if event not in LOCAL} == heard - DEAF.get(name, set())


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_takes_each_message_from_those_who_say_it_and_from_nobody_else(name: str) -> None:
    machine, kind, conversations = MACHINES[name]
    for event in machine._answers._by_event.keys() - LOCAL:
        said_by = {
            by for one in conversations for row in one.says if row.message is event and kind in row.to for by in row.by
        }
        for other in Kind:
            sender = f"{other} 0" if other in (Kind.REPLICA, Kind.SHARD, Kind.STANDBY) else str(other)
            if other in said_by:
                machine._answers.to(sender, event)
            else:
                with pytest.raises(RemoteProtocolError, match=f"{sender} may not send {event.__name__}; it is for"):
                    machine._answers.to(sender, event)


def test_a_machine_cannot_be_made_that_answers_what_no_table_lets_it_hear() -> None:
    with pytest.raises(LocalProtocolError, match="a shard answers Progress, which no table sends to it"):
        Answers("a shard", heard_by(Kind.SHARD, SERVED), {dealing.Progress: never})
    with pytest.raises(LocalProtocolError, match="a shard answers Operate, "):
        Answers("a shard", heard_by(Kind.SHARD, SERVED), {pushing.Push: never, operations.Operate: never})


def test_a_sender_that_is_no_role_has_no_say() -> None:
    with pytest.raises(RemoteProtocolError, match="'process 7' is no role"):
        MACHINES["shard"][0].handle("process 7", pushing.Fetch(0, 0, 0), None)


def test_who_takes_gradients_otherwise_has_no_answer_to_a_push_and_to_progress() -> None:
    """A machine of a batch method is made without them: they are not taken out of another's."""
    for name, event in (("shard in batches", pushing.Push), ("sandblaster", dealing.Progress)):
        machine = MACHINES[name][0]
        with pytest.raises(RemoteProtocolError, match=f"does not take {event.__name__}"):
            machine._answers.to("replica 0", event)
    answers = Answers("a shard", heard_by(Kind.SHARD, SERVED), {pushing.Fetch: never})
    assert answers.to("replica 0", pushing.Fetch) is never
