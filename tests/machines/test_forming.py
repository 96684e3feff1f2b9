"""What `status` says of a group of an allreduce that is formed: for whom whoever waits, step by step."""

from __future__ import annotations

import pytest
from made import sends

from distbelief.core import events, roles
from distbelief.core.conversations import checkpointing, dealing, grouping, initialising, membership
from distbelief.core.effects import RECEIVE, Arrival, Commit, Connect, Effect, Form, Send
from distbelief.core.events import CheckpointDue
from distbelief.core.messages import Address, Message
from distbelief.core.portions import ANEW
from distbelief.core.settings import Plan, Settings
from distbelief.errors import RemoteProtocolError
from distbelief.sharding.layout import Layout, Tensor, lay_out
from distbelief.strategies import Allreduce
from distbelief.strategies.grouped.players import coordinator
from distbelief.strategies.grouped.replica import AllreduceReplica, GroupSurroundings
from distbelief.strategies.grouped.whole import Whole

LAYOUT = lay_out([Tensor("weight", (4,), "float32")])
SETTINGS = Settings(strategy=Allreduce(3, algorithm="ring"))
ROLES = [f"replica {i}" for i in range(3)]


def join(layout: Layout = LAYOUT, partitions: int = 1) -> membership.Join:
    """What a replica of the group says first."""
    places = (membership.PartPlace(Address("", 0), ""),) * partitions
    return membership.Join(0, layout, 8, places=places, digest="digest")


HOLDS = initialising.Restored(loaded=True)


def test_the_coordinator_says_who_is_to_leave_a_group_and_who_is_to_meet_in_the_next() -> None:
    job = coordinator(SETTINGS, True, ANEW)

    def tell(role: str, event: Message | events.Lost) -> str:
        job.handle(role, event, None)
        return job.waits().rpartition("(")[2].rstrip(")")

    assert [tell(role, join()) for role in ROLES] == [
        "replica 1, replica 2",
        "replica 2",
        "replica 0 to meet in group 0, replica 1 to meet in group 0, replica 2 to meet in group 0",
    ]
    assert tell("replica 1", HOLDS) == "replica 0 to meet in group 0, replica 2 to meet in group 0"
    assert tell("replica 0", events.Lost("killed", 0)) == "replica 1 to leave group 0, replica 2 to leave group 0"
    assert tell("replica 1", grouping.Halted(1, 0)) == "replica 2 to leave group 0"
    assert tell("replica 2", grouping.Halted(1, 0)) == "replica 1 to meet in group 1, replica 2 to meet in group 1"
    tell("replica 1", HOLDS)
    assert tell("replica 2", HOLDS) == "replica 1 holds 1 minibatches"


def test_guests_whom_the_others_do_not_reach_are_sent_away_and_nobody_else_ever_is() -> None:
    job, guest = coordinator(SETTINGS, True, ANEW), "replica 3"

    def tell(role: str, event: Message | events.Lost) -> list[Effect]:
        return [*job.handle(role, event, None)]

    def assembled(effects: list[Effect]) -> list[str]:
        return [one.to for one in sends(effects, grouping.Assemble)]

    def form(number: int, those: list[str]) -> list[str]:
        told = [one for role in those for one in tell(role, grouping.Halted(number, 0))]
        return assembled(told)

    def breaks(number: int) -> list[str]:
        """Those who are refused."""
        told = tell("replica 0", grouping.Broken(number, "nobody answers there"))
        return [one.to for one in sends(told, membership.Refused)]

    for role in ROLES:
        tell(role, join())
    for role in ROLES:
        tell(role, HOLDS)
    tell(guest, join())
    assert form(1, ROLES) == [*ROLES, guest]
    assert breaks(1) == []
    assert form(2, [*ROLES, guest]) == [*ROLES, guest]
    assert breaks(2) == [guest]
    assert form(3, ROLES) == ROLES
    assert tell(guest, events.Lost("it was sent away", 0)) == []
    assert breaks(3) == []  # it was not the guest


def test_a_guest_that_is_refused_halts_nobody_when_its_link_is_closed() -> None:
    job, guest = coordinator(SETTINGS, True, ANEW), "replica 3"
    for role in ROLES:
        job.handle(role, join(), None)
    other = lay_out([Tensor("weight", (5,), "float32")])
    [refused] = job.handle(guest, join(other), None)
    assert isinstance(refused.message, membership.Refused)
    assert not any(isinstance(effect, Send) for effect in job.handle(guest, events.Lost("closed", 0), None))
    with pytest.raises(RemoteProtocolError, match="replica 4 joins a group with 2 places for its partitions"):
        job.handle("replica 4", join(partitions=2), None)


def test_a_checkpoint_waits_for_a_round_that_only_the_dead_had_a_minibatch_of() -> None:
    """Whether that round was made is known once the others have met again: its minibatch is in both, or in neither."""
    job = coordinator(Settings(strategy=Allreduce(2), batch_size=1, epochs=2), False, ANEW)
    nine = membership.Join(0, LAYOUT, 9, places=(membership.PartPlace(Address("", 0), ""),), digest="digest")

    def snapshots(role: str, event: Message | events.Lost | events.Woke) -> list[str]:
        told = job.handle(role, event, None)
        return [one.to for one in sends(told, checkpointing.Snapshot)]

    for event in (nine, HOLDS, dealing.Progress(4, 8, 4, 0.0, 0, wants=False)):
        for role in ROLES[:2]:
            snapshots(role, event)
    assert snapshots(roles.CLOCK, events.Woke(CheckpointDue())) == []  # the ninth is replica 0's
    assert snapshots("replica 0", events.Lost("killed", 0)) == []
    assert snapshots("replica 1", grouping.Halted(1, 5)) == []  # it has made that round
    assert snapshots("replica 1", HOLDS) == ["replica 1"]
    done = checkpointing.SnapshotDone(1, "")
    [commit] = [one for one in job.handle("replica 1", done, None) if isinstance(one, Commit)]
    assert (commit.position.undone, commit.samples) == ((), 9)


def told_while_it_waits(role: str, reduces: bool, said: list[tuple[str, Message]]) -> list[str]:
    """What a replica says at each of its waits, when it is told one thing after the other."""
    replica, coming, answer, waits = (
        AllreduceReplica(role, Whole(LAYOUT), 8, surroundings=GroupSurroundings(reduces=reduces)),
        iter(said),
        None,
        [],
    )
    story = replica.story()
    while True:
        effect = story.send(answer)
        if effect is RECEIVE or isinstance(effect, Form):
            waits.append(replica.waits())
        answer = True if isinstance(effect, Connect | Form) else None
        if effect is RECEIVE:
            if (word := next(coming, None)) is None:
                return waits
            answer = Arrival(*word)


def assemble(needy: str = "") -> grouping.Assemble:
    members = tuple(grouping.Member(role, Address("", 0), role == needy, "") for role in ROLES)
    return grouping.Assemble(1, Plan(SETTINGS, LAYOUT, (), 8), members, 0, 0, 0)


def test_a_replica_says_whose_link_it_waits_for_while_torch_opens_the_links_of_its_group() -> None:
    assert told_while_it_waits("replica 1", True, [("coordinator", assemble()), ("coordinator", grouping.Halt(2))]) == [
        "for all replicas to be there",
        "for a link of group 1 from replica 0, replica 2",
        "for work from the coordinator",
        "for a group to be formed",
    ]


def test_a_replica_says_whose_link_and_whose_parameters_it_waits_for_as_its_group_is_formed() -> None:
    hails = [(role, grouping.GroupHello(1)) for role in ROLES[:2]]
    assert told_while_it_waits(
        "replica 2", False, [("coordinator", assemble("replica 2")), *hails, ("coordinator", grouping.Halt(2))]
    ) == [
        "for all replicas to be there",
        "for a link of group 1 from replica 0, replica 1",
        "for a link of group 1 from replica 1",
        "for parameters from replica 0",
        "for a group to be formed",
    ]
