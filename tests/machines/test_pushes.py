"""What becomes of a replica's pushes, acknowledgement by acknowledgement."""

from __future__ import annotations

from typing import Any

import pytest

from distbelief.core.conversations.pushing import Pushed
from distbelief.core.effects import Send
from distbelief.core.messages import Version
from distbelief.replica.work import Pushes

SHARDS = ("shard 0", "shard 1")


def pushed(clock: int, **told: Any) -> Pushed:
    return Pushed(slot=0, clock=clock, version=Version(0, clock), **{"incarnation": 1, **told})


def applied(pushes: Pushes, shard: str, told: Pushed) -> None:
    pushes.applied(shard, told.incarnation, told.clock, told.dropped)


def two(made: int = 2) -> Pushes:
    """So many pushes, of three steps and eight samples each, of a replica's second life."""
    pushes = Pushes(1, SHARDS, slots=1)
    for clock in range(1, made + 1):
        pushes.make(0, 3, 8, {shard: Send(shard, pushed(clock)) for shard in SHARDS}, {})
    return pushes


def test_a_push_is_done_once_all_shards_have_acknowledged_it_in_the_order_of_pushes() -> None:
    pushes = two()
    for shard, clock in (("shard 0", 2), ("shard 1", 2), ("shard 0", 1)):
        applied(pushes, shard, pushed(clock))
        assert pushes.take() == (0, 0, 0, ())
    applied(pushes, "shard 1", pushed(1))
    assert pushes.take() == (6, 16, 2, ())
    assert not pushes.waiting


def test_a_push_that_one_shard_dropped_is_no_step_and_is_told_where_it_stood() -> None:
    pushes = two()
    for shard, clock in ((shard, clock) for clock in (1, 2) for shard in SHARDS):
        applied(pushes, shard, pushed(clock, dropped=(shard, clock) == ("shard 1", 2)))
    assert pushes.take() == (3, 8, 1, ((3, 3),))


@pytest.mark.parametrize(
    "told",
    [pushed(1, incarnation=0), pushed(1, incarnation=2), pushed(3), pushed(0)],
    ids=["life before", "life to come", "not made", "clock 0"],
)
def test_an_acknowledgement_of_what_this_life_has_not_pushed_is_nobodys(told: Pushed) -> None:
    pushes = two()
    for shard in SHARDS:
        applied(pushes, shard, told)
    assert pushes.take() == (0, 0, 0, ())
    assert pushes.acknowledged == dict.fromkeys(SHARDS, 0)
    assert len(pushes.owed("shard 0")) == 2


def test_who_acknowledges_twice_counts_once() -> None:
    pushes = two(made=1)
    applied(pushes, "shard 0", pushed(1))
    applied(pushes, "shard 0", pushed(1))
    assert pushes.waiting
    assert pushes.busy == [1]
