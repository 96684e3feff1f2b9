"""The exchange of norms: every shard that holds a part is in the sum, in whatever order they say so."""

from __future__ import annotations

import itertools

import pytest
from made import made

from distbelief.core.conversations.agreement import Norms
from distbelief.core.effects import Send
from distbelief.core.norms import KEPT, Exchange, cut_layers
from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Tensor, lay_out

LAYOUT = lay_out(
    [Tensor("first", (32,), "float32"), Tensor("second", (120,), "float32"), Tensor("third", (40,), "float32")]
)


def plan(optimizer: str = "lars", shards: int = 3) -> Plan:
    settings = made("synchronous", optimizer=Optimizer(optimizer))
    return Plan(settings, LAYOUT, cut(LAYOUT, settings.partitions, shards), 8)


def exchanges(optimizer: str = "lars") -> list[Exchange]:
    return [Exchange(plan(optimizer), index) for index in range(3)]


PARTS = {0: ((1, 0.1, 1.0),), 1: ((1, 0.2, 2.0),), 2: ((1, 0.7, 4.0),)}


def test_the_layers_that_are_cut_are_those_that_lie_on_several_shards() -> None:
    assert cut_layers(plan()) == {1: {0, 1, 2}}
    assert cut_layers(plan(shards=1)) == {}


def test_nobody_takes_part_without_an_optimizer_that_asks_for_norms() -> None:
    assert [one.takes_part for one in exchanges("sgd")] == [False] * 3
    assert [one.takes_part for one in exchanges("lamb")] == [True] * 3


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_the_sum_is_the_same_whoever_is_first(order: tuple[int, ...]) -> None:
    shards = exchanges()
    told: list[Send] = []
    for index in order:
        said = shards[index].say(0, PARTS[index])
        told += (
            said if not index else [answer for one in said for answer in shards[0].take(f"shard {index}", one.message)]
        )  # type: ignore[arg-type]
    whole = ((1, 0.1 + 0.2 + 0.7, 7.0),)
    assert sorted(told, key=lambda one: one.to) == [Send(f"shard {i}", Norms(0, whole)) for i in (1, 2)]
    assert shards[0].whole(0) == whole
    assert shards[1].take("shard 0", Norms(0, whole)) == []
    assert shards[1].whole(0) == whole
    assert shards[2].whole(0) is None


def test_who_asks_again_is_told_again() -> None:
    shards = exchanges()
    for index in (2, 1):
        shards[0].take(f"shard {index}", Norms(0, PARTS[index]))
    shards[0].say(0, PARTS[0])
    assert shards[0].take("shard 1", Norms(0, PARTS[1])) == [Send("shard 1", Norms(0, ((1, 1.0, 7.0),)))]


def test_a_shard_says_of_the_rounds_in_which_it_made_nothing_that_it_adds_nothing() -> None:
    _, other, _ = exchanges()
    assert other.say(2, PARTS[1]) == [Send("shard 0", Norms(number, ())) for number in (0, 1)] + [
        Send("shard 0", Norms(2, PARTS[1]))
    ]
    assert other.pass_over(4) == [Send("shard 0", Norms(3, ()))]
    assert other.again() == [Send("shard 0", Norms(number, PARTS[1] if number == 2 else ())) for number in range(4)]


def test_a_new_ruler_knows_what_the_one_before_had_told_and_adds_up_the_rest_anew() -> None:
    shards, successor = exchanges(), Exchange(plan(), 0)
    for index in (1, 2):
        shards[index].say(6, ((1, 1.0, 1.0),))
        shards[index].say(7, PARTS[index])
    successor.resume(7, [Norms(6, ((1, 3.0, 3.0),))])
    assert successor.known() == (Norms(6, ((1, 3.0, 3.0),)),)
    told = [answer for i in (1, 2) for one in shards[i].again() for answer in successor.take(f"shard {i}", one.message)]  # type: ignore[arg-type]
    assert told == [Send(f"shard {i}", Norms(6, ((1, 3.0, 3.0),))) for i in (1, 2)]
    assert {one.to for one in successor.say(7, PARTS[0])} == {"shard 1", "shard 2"}
    assert successor.whole(7) == ((1, 1.0, 7.0),)


def test_only_the_latest_rounds_are_kept() -> None:
    _, other, _ = exchanges()
    for number in range(3 * KEPT):
        other.take("shard 0", Norms(number, ()))
        other.say(number, ())
    assert [norms.round for norms in other.known()] == list(range(2 * KEPT, 3 * KEPT))
    assert [(norms.round, norms.whole) for norms in (one.message for one in other.again())] == [  # type: ignore[attr-defined]
        (number, whole) for whole in (False, True) for number in range(2 * KEPT, 3 * KEPT)
    ]


@pytest.mark.parametrize(
    ("index", "sender", "round"),
    [(1, "shard 2", 0), (0, "shard 3", 0), (0, "shard 1", -1), (0, "shard 1", KEPT + 1)],
    ids=str,
)
def test_who_has_no_say_is_told_so(index: int, sender: str, round: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{sender} sends "):
        exchanges()[index].take(sender, Norms(round, ()))
