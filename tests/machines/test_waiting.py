"""What a shard holds back under each consistency, message by message, and what it says about those who wait."""

from __future__ import annotations

from typing import Any

import pytest
from made import made

from distbelief.core import events
from distbelief.core.consistency import Key
from distbelief.core.conversations import agreement, attendance, initialising, pushing
from distbelief.core.conversations.agreement import Ruling
from distbelief.core.effects import Effect, Phantom, Send
from distbelief.core.messages import Message, Version
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server.shard import Shard
from distbelief.server.slice import PhantomSlice
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Tensor, lay_out

LAYOUT = lay_out([Tensor("weight", (128,), "float32")])


class Told:
    """One shard of two, and what it has said to whom."""

    def __init__(self, index: int = 0, attending: int = 3, **settings: Any) -> None:
        plan = Plan(made(**{"replicas": 3, **settings}), LAYOUT, cut(LAYOUT, 1, 2), samples=100)
        self.shard, self.range = Shard(index, PhantomSlice), plan.assignments[index].moving
        self.hear("coordinator", initialising.Restore(plan, ""))
        if plan.settings.policy.rounds and index == 0:
            self.hear("shard 1", agreement.Follow(0))
        for replica in range(attending):
            self.hear(f"replica {replica}", attendance.Attend(0, 0))

    def hear(self, sender: str, event: Any, payload: Phantom | None = None) -> list[tuple[str, Message]]:
        effects: list[Effect] = self.shard.handle(sender, event, payload)
        return [(effect.to, effect.message) for effect in effects if isinstance(effect, Send)]

    def push(
        self, replica: int, clock: int, tick: int | None = None, incarnation: int = 0
    ) -> list[tuple[str, Message]]:
        tick, version = clock - 1 if tick is None else tick, self.shard.version
        push = pushing.Push(
            0, self.range.start, self.range.stop, incarnation, clock, version, 1, 8, tick, ranges=(self.range,)
        )
        return self.hear(f"replica {replica}", push, Phantom(self.range.size))

    def fetch(self, who: str, tick: int) -> list[tuple[str, Message]]:
        return self.hear(who, pushing.Fetch(0, self.range.start, self.range.stop, tick))


def kinds(said: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(to, type(message).__name__) for to, message in said]


def test_a_round_answers_all_at_once_and_says_for_whom_it_waits() -> None:
    told = Told(strategy="synchronous")
    assert told.push(2, 1) == told.fetch("replica 2", 1) == told.push(0, 1) == []
    why = "round 0 has 2 of 3 gradients: waits for replica 1"
    assert told.shard.waiting() == {"replica 0": why, "replica 2": why}
    ruling = Ruling(0, tuple(Key(f"replica {i}", 0, 1) for i in range(3)), ())
    pushed = [(f"replica {i}", pushing.Pushed(0, 1, Version(0, 1))) for i in range(3)]
    said = told.push(1, 1)
    assert said[:4] == [("shard 1", ruling), *pushed]
    assert kinds(said[4:]) == [("replica 2", "Fetched")]
    assert told.shard.waiting() == {}


def test_a_shard_that_does_not_rule_waits_for_the_one_that_does() -> None:
    told = Told(1, strategy="synchronous")
    assert told.push(0, 1) == told.push(1, 1) == []
    assert told.shard.waiting() == dict.fromkeys(("replica 0", "replica 1"), "round 0 is not ruled yet")
    assert told.hear("shard 0", Ruling(0, tuple(Key(f"replica {i}", 0, 1) for i in range(3)), ())) == []
    assert (
        told.shard.waiting()["replica 0"]
        == "round 0 is ruled, and not all of its gradients are here: waits for replica 2"
    )
    assert kinds(told.push(2, 1)) == [(f"replica {i}", "Pushed") for i in range(3)]


@pytest.mark.parametrize(
    ("sender", "settings"), [("shard 1", {"strategy": "synchronous"}), ("shard 0", {"strategy": "bounded"})]
)
def test_nobody_but_the_first_shard_rules(sender: str, settings: dict[str, str]) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{sender} sent a ruling, and is not the shard that rules this job"):
        Told(1, **settings).hear(sender, Ruling(0, (), ()))


@pytest.mark.parametrize("death", [events.Lost("killed"), attendance.SitOut(0, 0)], ids=["dies", "sits out"])
def test_a_round_is_made_when_the_last_that_it_waits_for_is_gone(death: Any) -> None:
    told = Told(strategy="synchronous")
    told.push(0, 1)
    told.push(1, 1)
    said = told.hear("replica 2", death)
    assert ("replica 0", pushing.Pushed(0, 1, Version(0, 1))) in said
    assert told.shard.version.updates == 1


def test_what_the_dead_have_pushed_is_in_no_round_and_what_those_who_sit_out_have_is() -> None:
    told = Told(strategy="synchronous")
    told.push(0, 1)
    told.push(1, 1)
    dropped = ("replica 0", pushing.Pushed(0, 1, Version(0, 0), dropped=True))
    assert dropped in told.hear("replica 0", events.Lost("killed"))
    assert told.hear("replica 1", attendance.SitOut(0, 0)) == [("replica 1", attendance.Excused())]
    said = told.push(2, 1)
    assert said[0] == ("shard 1", Ruling(0, (Key("replica 1", 0, 1), Key("replica 2", 0, 1)), ()))


def test_a_push_that_comes_after_its_replica_was_given_up_is_dropped() -> None:
    """The coordinator has heard of the death first, and deals the minibatches again."""
    told = Told(strategy="synchronous")
    told.hear("coordinator", attendance.Departed("replica 0", 0))
    assert told.push(0, 1)[-1] == ("replica 0", pushing.Pushed(0, 1, Version(0, 0), dropped=True))
    told.push(1, 1)
    assert len(told.push(2, 1)) == 3, "a ruling and two acknowledgements"


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    told = Told(strategy="synchronous")
    told.push(0, 1)
    assert told.hear("replica 0", attendance.Attend(1, -1))[0] == ("replica 0", attendance.Admitted(0))
    told.hear("replica 0", events.Lost("the old link"))  # what the link of the old incarnation tells late
    told.hear("replica 0", attendance.Attend(1, -1))
    told.push(1, 1)
    told.push(2, 1)
    assert told.shard.version.updates == 0
    assert told.push(0, 1, tick=0, incarnation=1)
    assert told.shard.version.updates == 1


def test_a_late_gradient_is_dropped_and_its_replica_goes_on_with_the_next_round() -> None:
    told = Told(strategy="synchronous", backup_workers=1)
    told.push(0, 1)
    told.push(1, 1)
    late = told.push(2, 1)
    assert late == [
        ("shard 1", Ruling(1, (), (Key("replica 2", 0, 1),))),
        ("replica 2", pushing.Pushed(0, 1, Version(0, 1), dropped=True)),
    ]
    [(_, fetched)] = told.fetch("replica 2", 1)
    assert isinstance(fetched, pushing.Fetched)
    assert fetched.floor == 1
    assert told.push(2, 2, tick=1) == []
    assert told.shard.waiting() == {"replica 2": "round 1 has 1 of 2 gradients: waits for replica 0, replica 1"}


def test_a_bound_holds_the_fast_until_the_slowest_has_pushed() -> None:
    told = Told(strategy="bounded", staleness=1)
    for clock in (1, 2):
        assert kinds(told.push(0, clock)) == [("replica 0", "Pushed")]
    assert kinds(told.fetch("replica 0", 1)) == [("replica 0", "Fetched")]
    assert told.fetch("replica 0", 2) == []
    why = "tick 2 may begin when all are at tick 1 or later (--staleness 1); the slowest is at 0"
    assert told.shard.waiting() == {"replica 0": f"{why}: waits for replica 1, replica 2"}
    assert kinds(told.push(1, 1)) == [("replica 1", "Pushed")]
    said = told.push(2, 1)
    assert kinds(said) == [("replica 2", "Pushed"), ("replica 0", "Fetched")]
    assert said[1][1].floor == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("leaving", [events.Lost("killed"), attendance.SitOut(0, 0)], ids=["dies", "sits out"])
def test_a_bound_waits_for_nobody_who_is_gone(leaving: Any) -> None:
    told = Told(strategy="bounded", staleness=0)
    told.push(0, 1)
    told.push(1, 1)
    told.fetch("replica 0", 1)
    assert ("replica 0", "Fetched") in kinds(told.hear("replica 2", leaving))


def test_the_evaluator_waits_for_nobody() -> None:
    for settings in ({"strategy": "synchronous"}, {"strategy": "bounded", "staleness": 0}, {"strategy": "softsync"}):
        told = Told(**settings)
        told.push(0, 1)
        assert kinds(told.fetch("evaluator", 0)) == [("evaluator", "Fetched")]


def test_softsync_acknowledges_at_once_and_updates_when_there_are_enough() -> None:
    told = Told(strategy="softsync", n=1)
    for clock in (1, 2):  # one may be in an update twice
        assert told.push(0, clock) == [("replica 0", pushing.Pushed(0, clock, Version(0, 1)))]
    assert (told.shard.version.updates, told.shard.waiting()) == (0, {})
    told.push(1, 1)
    assert (told.shard.version.updates, told.shard.samples, told.shard.staleness) == (1, 24, {0: 3})
    told.push(0, 3)
    told.hear("replica 1", events.Lost("killed"))
    assert told.shard.version.updates == 1
    told.hear("replica 2", attendance.SitOut(0, 0))
    assert told.shard.version.updates == 2
