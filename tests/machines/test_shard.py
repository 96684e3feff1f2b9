"""The shard, message by message: what it applies and refuses, and that a slice that was saved goes on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from made import made, mixed, sends
from made import numbers as numbers_of

from distbelief.core import events
from distbelief.core.conversations import attendance, checkpointing, initialising, membership, mirroring, pushing
from distbelief.core.effects import Effect, End, Load, Phantom, Send
from distbelief.core.events import Event
from distbelief.core.messages import Address, Version
from distbelief.core.optimizer import LEARNING_RATES, OUTER, GroupOption, Optimizer
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server import slice as slices
from distbelief.server.optimizers import OPTIMIZERS
from distbelief.server.shard import Shard
from distbelief.server.slice import PhantomSlice, TorchSlice
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Layout, Range

LAYOUT = mixed(lr=0.5)
MOVING, FROZEN = LAYOUT.moving, LAYOUT.total


def plan(layout: Layout = LAYOUT, shards: int = 1, **settings: Any) -> Plan:
    return Plan(made(**settings), layout, cut(layout, 1, shards), samples=100)


def numbers(size: int, seed: int) -> torch.Tensor:
    return numbers_of(LAYOUT, Range(0, size), seed)


def shard(the_plan: Plan | None = None, blank: bool = False) -> Shard:
    one = Shard(0, TorchSlice)
    one.handle("coordinator", initialising.Restore(the_plan or plan(), ""), None)
    if not blank:
        one.handle("replica 0", initialising.Initialise(0, 0, MOVING), numbers(MOVING, 0))
    return one


def push(
    clock: int, version: int = 0, incarnation: int = 0, slot: int = 0, samples: int = 4, stop: int = MOVING
) -> pushing.Push:
    return pushing.Push(slot, 0, stop, incarnation, clock, Version(0, version), 1, samples, ranges=(Range(0, stop),))


def test_values_take_the_place_of_what_is_there_where_one_replica_alone_trains() -> None:
    one = shard(plan(replicas=1, optimizer=Optimizer("momentum", 0.1)))
    twin = shard(plan(replicas=1, optimizer=Optimizer("momentum", 0.1)))
    for each in (one, twin):
        each.handle("replica 0", push(1), numbers(MOVING, 1))
    kept = one.held.moving()
    values = kept.clone()
    first, *others = sorted(
        (entry for entry in LAYOUT.entries if entry.tensor.kind == "parameter"),
        key=lambda one: one.tensor.name != "weight",
    )
    values[first.start : first.stop].view(torch.float32).fill_(3.0)
    answered = one.handle("replica 0", initialising.Initialise(0, 0, MOVING, replaces=True), values)
    assert answer(answered) == initialising.Initialised(Version(0, 1))
    assert kept.equal(values)
    for each in (one, twin):
        each.handle("replica 0", push(2, 1), numbers(MOVING, 2))
    for entry in others:  # they go on as if nothing were, their masters too
        assert kept[entry.start : entry.stop].equal(twin.held.moving()[entry.start : entry.stop])
    one.handle("replica 1", push(1, 2), numbers(MOVING, 3))
    refused = one.handle("replica 0", initialising.Initialise(0, 0, MOVING, replaces=True), values)
    assert isinstance(answer(refused), membership.Refused)


@pytest.mark.parametrize("settings", [{"strategy": "synchronous", "batch_size": 4}, {"strategy": "softsync"}], ids=str)
@pytest.mark.parametrize("name", ["momentum", "adagrad"])
def test_two_pushes_make_one_step_with_their_mean_in_every_dtype_and_group(name: str, settings: dict[str, Any]) -> None:
    one = shard(plan(replicas=2, optimizer=Optimizer(name, 0.1), **settings))
    twin = shard(plan(optimizer=Optimizer(name, 0.1)))
    for replica in (0, 1):
        one.handle(f"replica {replica}", attendance.Attend(0, 0), None)
    for clock in (1, 2, 3):
        payloads = [numbers(MOVING, 10 * clock + replica) for replica in (0, 1)]
        mean = torch.zeros(MOVING, dtype=torch.uint8)
        for section in LAYOUT.sections_in(Range(0, MOVING)):
            a, b, both = (
                values[section.start : section.stop].view(getattr(torch, section.dtype)) for values in (*payloads, mean)
            )
            average = section.kind == "parameter" or settings["strategy"] == "synchronous"
            both.copy_((a.float() + b.float()) / 2 if average else b)  # buffers are the last push's, but in rounds
        for replica, payload in enumerate(payloads):
            one.handle(
                f"replica {replica}",
                pushing.Push(
                    0, 0, MOVING, 0, clock, Version(0, clock - 1), 1, 4, clock - 1, ranges=(Range(0, MOVING),)
                ),
                payload,
            )
        twin.handle("replica 0", push(clock, version=clock - 1), mean)
    assert one.version == twin.version == Version(0, 3)
    for section in LAYOUT.sections_in(Range(0, MOVING)):
        where, dtype = slice(section.start, section.stop), getattr(torch, section.dtype)
        torch.testing.assert_close(one.held.moving()[where].view(dtype), twin.held.moving()[where].view(dtype))  # type: ignore[index]


def answer(effects: list[Effect]) -> Any:
    (effect,) = effects
    return effect.message


def held(one: Shard) -> torch.Tensor:
    moving = one.held.moving()
    return moving.clone()


@pytest.mark.parametrize("strategy", ["downpour", "synchronous", "softsync"])
def test_what_a_push_does_not_cover_is_not_stepped(strategy: str) -> None:
    one = shard(plan(replicas=1, optimizer=Optimizer("momentum", 0.1), strategy=strategy, batch_size=4))
    if strategy != "downpour":
        one.handle("replica 0", attendance.Attend(0, 0), None)
    part = next(Range(entry.start, entry.stop) for entry in LAYOUT.entries if entry.tensor.name == "weight")
    rest = [Range(e.start, e.stop) for e in LAYOUT.trained_entries if e.tensor.name != "weight"]
    for clock, ranges in enumerate(((Range(0, MOVING),), Range(0, MOVING).without([part])), start=1):
        before, payload = held(one).clone(), numbers(MOVING, clock)
        one.handle("replica 0", msgspec.structs.replace(push(clock, clock - 1), ranges=ranges, tick=clock - 1), payload)
        assert one.version.updates == clock
        stepped = [
            not held(one)[span.start : span.stop].equal(before[span.start : span.stop]) for span in (part, *rest)
        ]
        assert stepped == [clock == 1, *(True for _ in rest)]


@pytest.mark.parametrize("strategy", ["downpour", "synchronous"])
def test_options_of_a_push_are_stepped_with_and_refused_where_they_cannot_be(strategy: str) -> None:
    one = shard(plan(replicas=1, optimizer=Optimizer("sgd", 0.1), strategy=strategy, batch_size=4))
    if strategy != "downpour":
        one.handle("replica 0", attendance.Attend(0, 0), None)
    before, own = held(one), msgspec.structs.replace(push(1), options=(GroupOption(1, "lr", (0.0,)),))
    one.handle("replica 0", own, numbers(MOVING, 1))
    assert one.version.updates == 1
    moved = {
        entry.tensor.name: not held(one)[entry.start : entry.stop].equal(before[entry.start : entry.stop])
        for entry in LAYOUT.trained_entries
    }
    assert moved == {"weight": True, "half": True, "other": False}
    for option, says in (
        (GroupOption(1, "lr", (-1.0,)), r"sets 'lr' to \(-1.0,\)"),
        (GroupOption(1, "zip", (1.0,)), "sets 'zip'"),
        (GroupOption(1, "lr", ()), r"sets 'lr' to \(\): the optimizer of shard 0 has 1 of lr"),
    ):
        with pytest.raises(RemoteProtocolError, match=says):
            one.handle("replica 0", msgspec.structs.replace(push(2, 1), tick=1, options=(option,)), numbers(MOVING, 1))


def test_where_there_is_a_standby_what_a_push_does_not_cover_counts_as_zero() -> None:
    """In both: what is left out by one and stepped by the other would be lost with the first."""
    one = shard(plan(replicas=1, optimizer=Optimizer("momentum", 0.1), standby=1))
    part = next(Range(entry.start, entry.stop) for entry in LAYOUT.entries if entry.tensor.name == "weight")
    one.handle("replica 0", push(1), numbers(MOVING, 1))
    before = held(one)
    partial = msgspec.structs.replace(push(2, 1), ranges=Range(0, MOVING).without([part]))
    one.handle("replica 0", partial, numbers(MOVING, 2))
    assert not held(one)[part.start : part.stop].equal(before[part.start : part.stop])


def test_a_push_is_applied_counted_and_acknowledged_with_the_version_that_has_it() -> None:
    one, before = shard(), None
    for clock, version, staleness in ((1, 0, 0), (2, 0, 1), (3, 2, 0)):
        before = held(one)
        assert answer(one.handle("replica 0", push(clock, version), numbers(MOVING, clock))) == pushing.Pushed(
            0, clock, Version(0, clock)
        )
        assert not torch.equal(held(one), before)
        assert staleness in one.staleness
    assert (one.samples, one.staleness, one.version) == (12, {0: 2, 1: 1}, Version(0, 3))


def test_a_push_that_was_applied_is_acknowledged_again_and_not_applied() -> None:
    one = shard()
    one.handle("replica 0", push(1), numbers(MOVING, 1))
    once = held(one)
    assert answer(one.handle("replica 0", push(1), numbers(MOVING, 1))) == pushing.Pushed(0, 1, Version(0, 1))
    assert torch.equal(held(one), once)
    assert (one.samples, one.staleness) == (4, {0: 1})


def test_a_push_of_the_dead_is_neither_applied_nor_acknowledged() -> None:
    one = shard()
    one.handle("replica 0", push(1, incarnation=1), numbers(MOVING, 1))
    once = held(one)
    assert one.handle("replica 0", push(1, incarnation=0), numbers(MOVING, 2)) == []
    assert torch.equal(held(one), once)


def test_initial_values_are_taken_once_since_a_dead_replicas_may_be_heard_after_its_successors() -> None:
    one = shard(blank=True)
    first, late = numbers(MOVING, 1), numbers(MOVING, 2)
    assert answer(one.handle("replica 1", initialising.Initialise(0, 0, MOVING), first)) == initialising.Initialised(
        Version(0, 0)
    )
    one.handle("replica 1", initialising.Initialise(0, MOVING, FROZEN), torch.ones(FROZEN - MOVING, dtype=torch.uint8))
    assert answer(one.handle("replica 0", initialising.Initialise(0, 0, MOVING), late)) == initialising.Initialised(
        Version(0, 0)
    )
    one.handle("replica 0", initialising.Initialise(0, MOVING, FROZEN), torch.zeros(FROZEN - MOVING, dtype=torch.uint8))
    assert torch.equal(held(one), first)
    frozen = one.held.frozen()
    assert frozen.all()


def test_the_partitions_of_a_replica_number_their_pushes_each_by_itself() -> None:
    one = shard()
    halves = [msgspec.structs.replace(push(1), partition=partition) for partition in (0, 1)]
    for partition, half in enumerate(halves):
        [said] = one.handle(f"replica 0.{partition}", half, numbers(MOVING, partition))
        assert isinstance(said, Send)
        assert one.version.updates == partition + 1
    one.handle("replica 0.1", halves[1], numbers(MOVING, 1))
    assert one.version.updates == 2, "a push of the same partition that comes again"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_buffer_that_all_pushes_have_stays_what_it_is_and_others_are_averaged(dtype: torch.dtype) -> None:
    """A mask may have the smallest number there is, or an infinity."""
    far = torch.finfo(dtype)
    mask = torch.tensor([far.min, far.max, 0.1, -torch.inf, far.tiny], dtype=dtype)
    some = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept, mean = mask.clone(), some[0].clone()
    for count in range(2, 6):
        slices._average(kept, mask, count)
        slices._average(mean, some[count - 1], count)
    assert torch.equal(kept.view(torch.uint8), mask.view(torch.uint8))
    torch.testing.assert_close(mean.double(), some.double().mean(0), rtol=4 * far.eps, atol=4 * far.eps)
    slices._average(mean, torch.full_like(mean, torch.inf), 6)
    slices._average(mean, some[0], 7)
    assert torch.isposinf(mean).all()


def test_buffers_are_the_latest_pushs_and_frozen_parameters_stay() -> None:
    one, payload = shard(), numbers(MOVING, 5)
    one.handle("replica 0", push(1), payload)
    (buffer,) = [s for s in LAYOUT.sections if s.kind == "buffer"]
    assert torch.equal(held(one)[buffer.start :], payload[buffer.start :])
    assert answer(one.handle("replica 0", pushing.Fetch(0, MOVING, FROZEN), None)) == pushing.Fetched(
        0, MOVING, FROZEN, Version(0, 1), samples=push(1).samples
    )


def changed(**fields: Any) -> pushing.Push:
    """The first push, but for some fields."""
    return msgspec.structs.replace(push(1), **fields)


VALUES = numbers(MOVING, 0)


@pytest.mark.parametrize(
    ("event", "payload", "says"),
    [
        (push(2), VALUES, "sent push 2 after push 0"),
        (push(1, version=1), VALUES, "pushed to version 1 of shard 0, which is at 0"),
        (push(1, stop=MOVING - 128), VALUES[:-128], r"pushed \[0, \d+\) to shard 0, which holds"),
        (push(1), None, "to shard 0, which holds"),
        (changed(encoding="zip"), VALUES, "'zip', which shard 0 does not know: it knows dense; install the same distb"),
        (changed(ranges=()), VALUES, r"pushed to shard 0 what covers nothing; it holds \[0, \d+\)"),
        (
            changed(ranges=(Range(128, MOVING), Range(0, 128))),
            VALUES,
            r"what covers \[128, \d+\), \[0, 128\); it holds",
        ),
        (changed(partition=1), VALUES, "replica 0 pushed for partition 1, but is another"),
        (pushing.Fetch(0, 0, 128), None, r"names \[0, 128\), which is not what shard 0 holds"),
        (initialising.Initialise(0, 4, MOVING), VALUES[4:], "which is not what shard 0 holds"),
        (membership.Leave(), None, "a shard does not take Leave"),
    ],
)
def test_what_breaks_the_protocol_changes_nothing(event: Event, payload: torch.Tensor | None, says: str) -> None:
    one = shard()
    before = held(one)
    with pytest.raises(RemoteProtocolError, match=says):
        one.handle("replica 0", event, payload)
    assert torch.equal(held(one), before)
    assert (one.version, one.samples, one.staleness, one.ledger.taken()) == (Version(0, 0), 0, {}, ())


@pytest.mark.parametrize(
    "event",
    [push(1), pushing.Fetch(0, 0, MOVING), initialising.Initialise(0, 0, MOVING), checkpointing.Snapshot(1)],
    ids=repr,
)
def test_a_shard_that_knows_no_range_says_so(event: Event) -> None:
    sender = "coordinator" if isinstance(event, checkpointing.Snapshot) else "replica 0"
    with pytest.raises(RemoteProtocolError, match="shard 0"):
        Shard(0, TorchSlice).handle(sender, event, numbers(MOVING, 0))


def test_a_shard_ends_with_its_coordinator_and_not_with_a_replica() -> None:
    assert shard().handle("replica 0", events.Lost("killed"), None) == []
    assert shard().handle("coordinator", events.Lost("killed"), None) == [End("the coordinator is gone")]
    assert shard().handle("coordinator", membership.Stop("done"), None) == [End("done")]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_slice_that_was_saved_and_loaded_goes_on_bit_for_bit(name: str) -> None:
    decay = {} if name in OUTER else {"weight_decay": 0.01}
    the_plan = plan(optimizer=Optimizer(name, LEARNING_RATES[name], decay), lr_schedule="linear")
    one = shard(the_plan)
    for clock in range(1, 4):
        one.handle("replica 0", push(clock), numbers(MOVING, clock))
    (save,) = one.handle("coordinator", checkpointing.Snapshot(1), None)
    arrays = {key: value.clone() for key, value in save.arrays.items()}
    other = Shard(0, TorchSlice)
    (load,) = other.handle("coordinator", initialising.Restore(the_plan, "checkpoint"), None)
    assert load == Load("checkpoint", the_plan, 0)
    assert answer(other.handle("store", events.Loaded(arrays, save.facts), None)) == initialising.Restored(loaded=True)
    other.handle("replica 9", initialising.Initialise(0, 0, MOVING), numbers(MOVING, 77))
    for clock in range(1, 4):
        one.handle("replica 0", push(clock + 3), numbers(MOVING, 10 + clock))
        other.handle("replica 0", push(clock), numbers(MOVING, 10 + clock))
    assert torch.equal(held(one), held(other))
    assert (one.version, one.samples) == (other.version, other.samples)


def test_what_a_shard_tells_of_a_snapshot_is_what_the_store_said() -> None:
    assert answer(shard().handle("store", events.Saved(3, "the disk is full"), None)) == checkpointing.SnapshotDone(
        3, "the disk is full"
    )


def test_a_phantom_counts_as_the_real_one_does() -> None:
    real, phantom = shard(), Shard(0, PhantomSlice)
    phantom.handle("coordinator", initialising.Restore(plan(), ""), None)
    for one, payload in ((real, numbers(MOVING, 1)), (phantom, Phantom(MOVING))):
        one.handle("replica 0", initialising.Initialise(0, 0, MOVING), payload)
        one.handle("replica 0", push(1), payload)
    assert real.handle("coordinator", checkpointing.Describe(), None) == phantom.handle(
        "coordinator", checkpointing.Describe(), None
    )
    for part in ("moving", "frozen"):
        assert getattr(real.held, part)().nbytes == getattr(phantom.held, part)().nbytes
    (save,) = phantom.handle("coordinator", checkpointing.Snapshot(1), None)
    assert save.arrays == {}
    phantom.handle("store", events.Loaded({}, save.facts), None)
    assert phantom.version == Version(0, 1)


@pytest.mark.parametrize("samples", [-1, (1 << 64) - 1])
def test_a_push_of_samples_that_cannot_be_is_refused(samples: int) -> None:
    """Their sum could not be sent to the coordinator any more."""
    one = shard()
    with pytest.raises(RemoteProtocolError, match=f"pushed the gradient of {samples} samples"):
        one.handle("replica 0", push(1, samples=samples), numbers(MOVING, 1))
    assert one.version.updates == 0


def test_a_fetch_that_waits_is_answered_once_and_asking_again_is_refused_but_to_a_next_life() -> None:
    one = shard(plan(strategy="bounded", staleness=0, replicas=2))
    for replica in (0, 1):
        one.handle(f"replica {replica}", attendance.Attend(0, 0), None)
    ahead = pushing.Fetch(0, 0, MOVING, tick=1)
    assert one.handle("replica 0", ahead, None) == []
    with pytest.raises(
        RemoteProtocolError, match=rf"replica 0 fetches \[0, {MOVING}\) of shard 0 again, while its first fetch waits"
    ):
        one.handle("replica 0", ahead, None)
    assert one.handle("replica 0", pushing.Fetch(0, 0, MOVING, tick=1, incarnation=1), None) == []
    done = [
        effect for replica in (0, 1) for effect in one.handle(f"replica {replica}", push(1), numbers(MOVING, replica))
    ]
    assert [(send.to, send.message.floor) for send in sends(done, pushing.Fetched)] == [("replica 0", 1)]


@pytest.mark.parametrize("dies", [False, True])
def test_an_evaluator_waits_for_the_standby_and_what_it_waited_for_is_not_sent_to_its_next_life(dies: bool) -> None:
    one = shard(plan(strategy="synchronous", replicas=1, standby=1, batch_size=4))
    one.handle("replica 0", attendance.Attend(0, 0), None)
    one.handle("coordinator", mirroring.BeginMirroring(Address("unix:@standby", 0)), None)
    one.handle(
        "replica 0",
        pushing.Push(0, 0, MOVING, 0, 1, Version(0, 0), 1, 4, 0, ranges=(Range(0, MOVING),)),
        numbers(MOVING, 1),
    )
    assert one.handle("evaluator", pushing.Fetch(0, 0, MOVING), None) == []
    assert one.waiting() == {"evaluator": "the standby has not confirmed the latest round"}
    if dies:
        assert one.handle("evaluator", events.Lost("killed", 0), None) == []
    confirmed = [
        effect for number in range(1, 20) for effect in one.handle("standby 0", mirroring.Confirmed(0, number), None)
    ]
    assert [send.to for send in sends(confirmed, pushing.Fetched)] == ([] if dies else ["evaluator"])
