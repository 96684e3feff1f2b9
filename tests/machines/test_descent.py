"""The shard of a job that descends, message by message: its operations, what it sums and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made import made, mixed, sends
from made import numbers as numbers_of

from distbelief.coordination.coordinator import Coordinator
from distbelief.core import events, messages
from distbelief.core.conversations import (
    checkpointing,
    dealing,
    initialising,
    membership,
    mirroring,
    operations,
    pushing,
)
from distbelief.core.conversations.operations import (
    AbsoluteNorms,
    Add,
    Combine,
    Copy,
    Dots,
    Gather,
    Operate,
    Scale,
    Zero,
)
from distbelief.core.effects import Effect, Send
from distbelief.core.messages import Version
from distbelief.core.portions import ANEW, Portion, WorkUnit
from distbelief.core.settings import Plan, Settings
from distbelief.errors import RemoteProtocolError
from distbelief.server.shard import Shard
from distbelief.server.standby import Standby
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Range, Tensor, lay_out
from distbelief.strategies import Sandblaster
from distbelief.strategies.sandblaster.players import coordinator as batch_coordinator
from distbelief.strategies.sandblaster.settings import OVERLAPPING
from distbelief.strategies.sandblaster.shard import WorkUnitSums
from distbelief.strategies.sandblaster.vectors import BLOCK, PhantomVectorSlice, TorchVectorSlice

LAYOUT = mixed()
MOVING = LAYOUT.moving
PLAN = Plan(Settings(batch_size=5, strategy=Sandblaster(shards=1)), LAYOUT, cut(LAYOUT, 1, 1), samples=100)


def numbers(seed: int) -> torch.Tensor:
    return numbers_of(LAYOUT, Range(0, MOVING), seed)


def trained(values: torch.Tensor) -> torch.Tensor:
    """The trained elements of bytes of the layout, in float64."""
    return torch.cat([
        values[s.start : s.stop].view(getattr(torch, s.dtype)).double() for s in LAYOUT.sections_in(Range(0,
            MOVING)) if s.kind == "parameter"
    ])  # fmt: skip


def shard() -> Shard:
    one = Shard(0, TorchVectorSlice, sums=WorkUnitSums)
    one.handle("coordinator", initialising.Restore(PLAN, ""), None)
    one.handle("replica 0", initialising.Initialise(0, 0, MOVING), numbers(0))
    return one


def do(one: Shard, *commands: Any) -> tuple[float, ...]:
    effects = one.handle("coordinator", Operate(one.sums._newest.number + 1, commands), None)
    told = sends(effects, operations.Operated)
    return told[0].message.scalars if told else ()


def vector(one: Shard, name: str) -> torch.Tensor:
    return torch.cat([piece.view(-1).double() for piece in one.held.vector(name)])  # type: ignore[attr-defined]  # a slice of torch's


def contribute(
    one: Shard, number: int, seed: int, evaluation: int = 1, part: int = 0, who: str = "replica 0"
) -> list[Effect]:
    return one.handle(who, operations.Contribute(0, 0, MOVING, 0, evaluation, number, part), numbers(seed))


def summed(one: Shard, name: str, seed: int) -> None:
    """Make a vector of random numbers, as a work unit would be."""
    do(one, Gather(one.policy.floor + 1, (name,)))
    contribute(one, 0, seed, one.policy.floor)


def test_operations_are_those_of_vectors_in_every_dtype_and_group() -> None:
    one = shard()
    x, a, b = trained(numbers(0)), trained(numbers(1)), trained(numbers(2))
    summed(one, "a", 1)
    summed(one, "b", 2)
    do(
        one,
        Copy("a", "c"),
        Scale(3.0, "c"),
        Add(-2.0, "b", "c"),
        Combine(((0.5, "c"), (2.0, "x"), (1.0, "a")), "c"),
        Zero("z"),
    )
    expected = 0.5 * (3 * a - 2 * b) + 2 * x + a
    torch.testing.assert_close(vector(one, "c"), expected, rtol=1e-5, atol=1e-5)
    assert not vector(one, "z").any()
    found = do(
        one, Dots((("a", "b"), ("x", "x"), ("a", "z"))), AbsoluteNorms("max", ("a", "z")), AbsoluteNorms("sum", ("b",))
    )
    wanted = (a @ b, x @ x, 0.0, a.abs().max(), 0.0, b.abs().sum())
    assert found == pytest.approx([float(value) for value in wanted], rel=1e-6, abs=1e-6)


def test_dot_products_are_summed_in_float64() -> None:
    layout = lay_out([Tensor("long", (3 * BLOCK + 5,), "float32")])
    plan = Plan(Settings(strategy=Sandblaster()), layout, cut(layout, 1, 1), samples=100)
    one = Shard(0, TorchVectorSlice, sums=WorkUnitSums)
    one.handle("coordinator", initialising.Restore(plan, ""), None)
    values = torch.full((3 * BLOCK + 5,), 0.1) + 1e3 * torch.randn(
        3 * BLOCK + 5, generator=torch.Generator().manual_seed(1)
    )
    one.handle("replica 0", initialising.Initialise(0, 0, layout.moving), values.view(torch.uint8))
    [square] = do(one, Dots((("x", "x"),)))
    assert square == pytest.approx(float(values.double() @ values.double()), rel=1e-14)


def test_parameters_follow_what_is_done_to_them_and_an_evaluator_sees_the_accepted_ones() -> None:
    one = shard()
    before = trained(numbers(0))
    do(one, Scale(2.0, "x"))
    [sent] = one.handle("replica 0", pushing.Fetch(0, 0, MOVING), None)
    [seen] = one.handle("evaluator", pushing.Fetch(0, 0, MOVING), None)
    torch.testing.assert_close(trained(sent.payload), 2 * before)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(trained(seen.payload), before)  # type: ignore[union-attr, arg-type]
    do(one, Copy("x", "x0"))
    [seen] = one.handle("evaluator", pushing.Fetch(0, 0, MOVING), None)
    torch.testing.assert_close(trained(seen.payload), 2 * before)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_work_unit_is_summed_once_whoever_sends_it_again(ordered: bool) -> None:
    one = shard()
    do(one, Gather(1, ("g",), ordered))
    for number, who in ((1, "replica 0"), (0, "replica 1"), (1, "replica 2"), (0, "replica 0"), (2, "replica 1")):
        [told] = contribute(one, number, 10 + number, who=who)
        assert told == Send(who, operations.Contributed(0, 1, number))
    whole: Any = sum(trained(numbers(seed)) for seed in (10, 11, 12))
    torch.testing.assert_close(vector(one, "g"), whole, rtol=1e-5, atol=1e-5)


def test_in_order_the_sum_has_the_same_bits() -> None:
    sums = []
    for order in ((0, 1, 2, 3, 4), (4, 2, 3, 0, 1), (1, 0, 4, 3, 2)):
        one = shard()
        do(one, Gather(1, ("g",), True))
        for number in order:
            contribute(one, number, 20 + number)
        sums.append(vector(one, "g"))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_parts_of_a_batch_are_summed_apart() -> None:
    one = shard()
    do(one, Gather(1, OVERLAPPING))
    for part in (0, 1, 2):
        contribute(one, part, 30 + part, part=part)
    for part, name in enumerate(OVERLAPPING):
        torch.testing.assert_close(vector(one, name), trained(numbers(30 + part)))


def test_what_comes_after_its_evaluation_is_acknowledged_and_ignored() -> None:
    one = shard()
    do(one, Gather(1, ("g",)))
    do(one, Gather(2, ("g",)))
    assert contribute(one, 0, 1, evaluation=1) == [Send("replica 0", operations.Contributed(0, 1, 0))]
    assert not vector(one, "g").any()


def test_parameters_are_sent_once_their_evaluation_has_begun() -> None:
    one = shard()
    assert one.handle("replica 1", pushing.Fetch(0, 0, MOVING, 1), None) == []
    assert one.waiting() == {"replica 1": "evaluation 1 has not begun"}
    effects = one.handle("coordinator", Operate(9, (Scale(0.5, "x"), Gather(1, ("g",)))), None)
    [fetched] = sends(effects)
    assert isinstance(fetched.message, pushing.Fetched)
    assert (fetched.to, fetched.message.version) == ("replica 1", Version(0, 1))
    torch.testing.assert_close(trained(fetched.payload), 0.5 * trained(numbers(0)))  # type: ignore[arg-type]


def test_the_history_is_saved_and_nothing_else_that_is_made_anew() -> None:
    one = shard()
    summed(one, "g", 5)
    do(one, Copy("g", "history.s0"), Copy("x", "history.y0"))
    [saved] = one.handle("coordinator", checkpointing.Snapshot(1), None)
    assert {name.split(".", 2)[2] for name in saved.arrays if name.startswith("state.")} == {"history.s0", "history.y0"}
    other = Shard(0, TorchVectorSlice, 1, sums=WorkUnitSums)
    other.handle("coordinator", initialising.Restore(PLAN, "there"), None)
    other.handle(
        "store", events.Loaded({name: value.clone() for name, value in saved.arrays.items()}, saved.facts), None
    )
    for name in ("x", "x0", "history.s0", "history.y0"):
        assert torch.equal(vector(other, name), vector(one, name))


WRONG: dict[str, tuple[str, Any]] = {
    "there is no vector 'nobody'": ("coordinator", Operate(9, (Copy("nobody", "x"),))),
    "may not send Operate": ("replica 0", Operate(9, ())),
    "a shard does not take Push": ("replica 0", pushing.Push(0, 0, MOVING, 0, 1, Version(0, 0), 1, 1)),
    "which does not hold that": ("replica 0", operations.Contribute(0, 0, 4, 0, 1, 0, 0)),
    "of evaluation 9; shard 0 is at 1": ("replica 0", operations.Contribute(0, 0, MOVING, 0, 9, 0, 0)),
    "part 1, of evaluation 1": ("replica 0", operations.Contribute(0, 0, MOVING, 0, 1, 0, 1)),
    "work unit -1": ("replica 0", operations.Contribute(0, 0, MOVING, 0, 1, -1, 0)),
    "evaluation 1 is to begin after 1": ("coordinator", Operate(9, (Gather(1, ("g",)),))),
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_wrong_word_is_the_senders_error(reason: str) -> None:
    one = shard()
    do(one, Gather(1, ("g",)))
    sender, message = WRONG[reason]
    with pytest.raises(RemoteProtocolError, match=reason):
        one.handle(sender, message, numbers(1) if isinstance(message, messages.Bulk) else None)


def test_a_shard_without_its_range_refuses() -> None:
    one = Shard(0, TorchVectorSlice, sums=WorkUnitSums)
    for sender, message in (
        ("coordinator", Operate(9, (Zero("x"),))),
        ("replica 0", operations.Contribute(0, 0, MOVING, 0, 1, 0, 0)),
    ):
        with pytest.raises(RemoteProtocolError):
            one.handle(sender, message, numbers(1))


def test_a_phantom_answers_as_many_scalars() -> None:
    one = PhantomVectorSlice(PLAN, 0)
    assert one.operate(Dots((("a", "b"), ("b", "b")))) == [1.0, 1.0]
    assert one.operate(Zero("a")) == []


# the standby


class Pair:
    """A shard and its standby, which hears of the shard when it is let."""

    def __init__(self, one: Shard) -> None:
        self.shard, self.standby = one, Standby(0, TorchVectorSlice, sums=WorkUnitSums)
        self.standby.handle("coordinator", mirroring.Stand(PLAN, 0), None)
        self.said: list[Any] = []
        self._ways: list[Send] = []
        self.do(one.handle("coordinator", mirroring.BeginMirroring(messages.Address("there", 0)), None))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                (self._ways if effect.to == "standby 0" else self.said).append(effect)

    def let(self) -> list[Any]:
        """Let the standby hear all; returns what the shard says since this was last asked."""
        while self._ways:
            sent = self._ways.pop(0)
            for answer in self.standby.handle("shard 0", sent.message, sent.payload):
                self.do(self.shard.handle("standby 0", answer.message, None))
        return self.heard()

    def heard(self) -> list[Any]:
        said, self.said = self.said, []
        return [type(effect.message) for effect in said]

    def succeed(self) -> Shard:
        [become] = self.standby.handle("coordinator", mirroring.Succeed(1), None)
        heir: Any = become.machine
        heir.handle("coordinator", initialising.Restore(PLAN, "", (("replica 0", 0),)), None)
        return heir  # type: ignore[no-any-return]


def test_a_shard_says_nothing_that_its_standby_does_not_hold() -> None:
    pair = Pair(shard())
    assert pair.let() == [mirroring.Mirrored]
    pair.do(pair.shard.handle("replica 0", pushing.Fetch(0, 0, MOVING, 1), None))
    pair.do(pair.shard.handle("coordinator", Operate(1, (Scale(2.0, "x"), Gather(1, ("g",)))), None))
    assert pair.heard() == []
    assert pair.let() == [pushing.Fetched]
    pair.do(contribute(pair.shard, 0, 10))
    pair.do(contribute(pair.shard, 0, 10))
    pair.do(pair.shard.handle("coordinator", Operate(2, (Dots((("g", "g"),)),)), None))
    assert pair.heard() == []
    assert pair.let() == [operations.Contributed, operations.Contributed, operations.Operated]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("moment", range(5))
def test_an_heir_is_as_far_as_its_shard_whenever_its_standby_has_come(ordered: bool, moment: int) -> None:
    one, pair = shard(), None
    steps: list[Any] = [lambda: one.handle("coordinator", Operate(1, (Gather(1, ("g",), ordered),)), None)]
    steps += [lambda number=number: contribute(one, number, number) for number in (2, 1, 0, 3)]
    steps.append(lambda: one.handle("coordinator", Operate(2, (Scale(0.5, "g"), Dots((("g", "g"),)))), None))
    for number, step in enumerate(steps):
        if number == moment:
            pair = Pair(one)
        effects = step()
        if pair:
            pair.do(effects)
    pair.let()
    heir = pair.succeed()
    torch.testing.assert_close(vector(heir, "g"), vector(one, "g"), rtol=0, atol=0)
    again = heir.handle("coordinator", Operate(2, (Scale(0.5, "g"), Dots((("g", "g"),)))), None)
    assert again == [Send("coordinator", one.sums._newest)], "what was told again is answered again, and not done again"
    torch.testing.assert_close(vector(heir, "g"), vector(one, "g"), rtol=0, atol=0)
    assert contribute(heir, 2, 2) == [Send("replica 0", operations.Contributed(0, 1, 2))]
    torch.testing.assert_close(vector(heir, "g"), vector(one, "g"), rtol=0, atol=0)
    assert heir.version == Version(1, 1)


def test_a_standby_refuses_what_its_shard_cannot_have_done() -> None:
    standby = Standby(0, TorchVectorSlice, sums=WorkUnitSums)
    standby.handle("coordinator", mirroring.Stand(PLAN, 0), None)
    with pytest.raises(RemoteProtocolError, match="operations before the state"):
        standby.handle("shard 0", mirroring.OperationsDone(0, 1, Operate(1, (Zero("g"),)), ()), None)
    with pytest.raises(RemoteProtocolError, match="another kind of shard"):
        standby.handle("shard 0", mirroring.StateSent(0, 1, 0, 0, {}, (), 0, ()), None)
    for part, size in ((1, MOVING), (0, 8)):
        with pytest.raises(RemoteProtocolError, match="none of its own"):
            standby.handle(
                "shard 0", mirroring.WorkUnitTaken(0, 0, size, 0, 1, 0, part), torch.zeros(size, dtype=torch.uint8)
            )
    assert standby.handle("shard 0", mirroring.OperationsDone(7, 1, Operate(1, (Zero("g"),)), ()), None) == []


# the coordinator


def coordinator() -> Coordinator:
    """One that waits for the answer of its only shard to the first evaluation of two work units."""
    settings = made(
        "sandblaster", batch_size=50, replicas=1, shards=1, evaluate_every=0, snapshot_every="0", checkpoint_every=0,
        send_every=1,
    )  # fmt: skip
    one = batch_coordinator(settings, False, ANEW)
    one.handle("shard 0", membership.Here(0, "here"), None)
    one.handle("replica 0", membership.Join(0, LAYOUT, 100), None)
    one.handle("shard 0", initialising.Restored(loaded=False), None)
    one.handle("replica 0", initialising.Ready((0,)), None)
    return one


def done(number: int, evaluation: int = 1, loss: float = 50.0) -> operations.Done:
    return operations.Done(evaluation, number, loss)


def test_the_coordinator_takes_each_work_unit_once_and_then_asks_the_shards() -> None:
    one = coordinator()
    assert one.standing()["of"] == {"replica 0": {"minibatches": 2}}
    for _ in range(2):
        assert not sends(one.handle("replica 0", done(0), None), Operate)
    [asked] = sends(one.handle("replica 0", done(1), None), Operate)
    assert asked.message.commands[0] == Scale(0.5, "g")


def test_a_work_unit_says_what_it_is_of() -> None:
    one = coordinator()
    one.handle("replica 0", events.Lost("it died", 0), None)
    effects = one.handle("replica 0", membership.Join(1, LAYOUT, 100), None)
    assigned = [send.message for send in sends(effects, operations.Assign)]
    assert assigned == [operations.Assign(1, number, WorkUnit(Portion(0, number, 1))) for number in (0, 1)]


def test_who_asks_where_a_shard_is_keeps_what_it_was_dealt() -> None:
    one = coordinator()
    effects = one.handle("replica 0", membership.Rejoin(), None)
    assert [type(send.message) for send in sends(effects)] == [membership.Welcome]


def test_the_next_life_of_a_shard_is_told_what_the_last_may_not_have_done() -> None:
    one = coordinator()
    one.standbys._standing["standby 0"] = "mirrors"
    one.registry.addresses["standby 0"] = messages.Address("there", 0)
    one.handle("replica 0", done(0), None)
    [asked] = sends(one.handle("replica 0", done(1), None), Operate)
    one.handle("shard 0", events.Lost("it died", 0), None)
    one.handle("shard 0", membership.Here(1, "there"), None)
    told = [send.message for send in sends(one.handle("shard 0", initialising.Restored(loaded=True), None), Operate)]
    assert [message.number for message in told] == [asked.message.number - 1, asked.message.number]
    assert told[-1] == asked.message


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        ("replica 0", done(2)), ("replica 0", done(-1)), ("replica 0", done(0, evaluation=2)), ("replica 9", done(0)),
        ("shard 0", operations.Operated(3, (1.0,))), ("replica 0", dealing.Progress(1, 1, 1, 0.0, 0, False)),
    ],
)  # fmt: skip
def test_what_the_coordinator_did_not_ask_for_is_refused(sender: str, message: Any) -> None:
    one = coordinator()
    if sender == "shard 0":
        one.handle("replica 0", done(0), None)
        one.handle("replica 0", done(1), None)
        message = operations.Operated(one.work._operation, (1.0,))  # four are wanted
    with pytest.raises(RemoteProtocolError):
        one.handle(sender, message, None)
