"""A slice that several processes update by turns has the bits of one that is updated in place."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from made import made, mixed, numbers
from torch import nn

from distbelief.core.optimizer import LEARNING_RATES, GroupOption, Optimizer
from distbelief.core.settings import Plan
from distbelief.errors import TrainingError
from distbelief.server.optimizers import OPTIMIZERS
from distbelief.server.passed import PassedLayout, PassedSlice
from distbelief.server.slice import TorchSlice
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Layout, Range, Tensor, lay_out
from distbelief.tasks.flat import FlatModule

LAYOUT = mixed(lr=0.5)
FLOATS = lay_out([Tensor("weight", (5, 7), "float32"), Tensor("frozen", (2,), "float32", "frozen")])


def plan(optimizer: Optimizer, layout: Layout, shards: int) -> Plan:
    return Plan(made(replicas=2, optimizer=optimizer), layout, cut(layout, 1, shards), samples=100)


def shared(the_plan: Plan) -> list[list[PassedSlice]]:
    """By place, the slices of all shards."""
    layout = PassedLayout(the_plan)
    memory = torch.zeros(layout.length, dtype=torch.uint8)
    shards = range(len(the_plan.assignments))
    return [[PassedSlice(layout, shard, memory, place) for shard in shards] for place in range(layout.places)]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", LEARNING_RATES)
@pytest.mark.parametrize("layout", [LAYOUT, FLOATS], ids=["every dtype", "floats"])
def test_whoever_makes_an_update_makes_the_bits_of_one_slice(name: str, layout: Layout, shards: int) -> None:
    if name in ("lars", "lamb") and shards > 1:
        pytest.skip("needs the norms of whole layers")
    the_plan = plan(Optimizer(name, 0.1), layout, shards)
    *replicas, owners = shared(the_plan)
    order = torch.randint(2, (8,), generator=torch.Generator().manual_seed(3)).tolist()
    for shard, own in enumerate(the_plan.assignments):
        one = TorchSlice(the_plan, shard)
        owner = owners[shard]
        for frozen, part in ((False, own.moving), (True, own.frozen)):
            if part.size:
                for held in (one, owner):
                    held.fill(numbers(layout, part, 1), frozen)
        owner.publish(b"begun")
        for step, who in enumerate(order):
            payload = numbers(layout, own.moving, 10 + step)
            factor = 1.0 if step % 3 else 0.5
            one.apply("replica 0", 0, payload, factor)
            mine = replicas[who][shard]
            mine.apply("replica 0", 0, payload, factor)
            mine.publish(f"{step}".encode())
            for reader in (owner, replicas[1 - who][shard]):
                assert torch.equal(reader.moving(), one.moving()), f"step {step}"
                assert reader.note() == f"{step}".encode()
        kept, expected = owner.arrays(), one.arrays()
        assert kept.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(kept[key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), key


CUT = lay_out(
    [
        Tensor("weight", (5, 70), "float32"),
        Tensor("other", (33,), "float32", group=1),
        Tensor("last", (9, 9), "float32"),
    ],
    groups=({}, {"lr": 0.5}),
)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_gradients_that_were_left_where_they_were_made_step_as_those_in_a_slot(shards: int) -> None:
    the_plan = plan(Optimizer("sgd", 0.1), CUT, shards)
    first, second, owners = shared(the_plan)
    empty = torch.zeros(CUT.moving, dtype=torch.uint8)
    for own, here, there, owner in zip(the_plan.assignments, first, second, owners, strict=True):
        assert here.adds
        owner.fill(numbers(CUT, own.moving, 1), frozen=False)
        owner.publish(b"begun")
        one = TorchSlice(the_plan, owners.index(owner))
        one.fill(numbers(CUT, own.moving, 1), frozen=False)
        for step, mine in enumerate((here, there, there, here)):
            whole = numbers(CUT, Range(0, CUT.moving), 10 + step)
            made = [whole[e.start : e.stop].view(torch.float32).view(e.shape) for e in CUT.trained_entries]
            mine.lying = {3: made}.__getitem__
            mine.apply("replica 0", 3, empty[own.moving.start : own.moving.stop], 0.5)
            mine.publish(b"")
            one.apply("replica 0", 0, whole[own.moving.start : own.moving.stop], 0.5)
            assert torch.equal(owner.moving(), one.moving()), f"step {step}"


def test_parameters_in_shared_memory_are_rounded_after_each_step() -> None:
    """Also by plain SGD, whose steps are additions otherwise."""
    settings = made(replicas=2, optimizer=Optimizer("sgd", 0.1), fixed_point="dynamic:2,3")
    the_plan = Plan(settings, FLOATS, cut(FLOATS, 1, 1), samples=100)
    here, _, owner = (slices[0] for slices in shared(the_plan))
    moving = the_plan.assignments[0].moving
    owner.fill(numbers(FLOATS, moving, 1), frozen=False)
    owner.publish(b"")
    here.apply("replica 0", 0, numbers(FLOATS, moving, 2), 1.0)
    here.publish(b"")
    assert len(owner.moving().view(torch.float32).unique()) <= 2**3


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad"])
def test_what_was_saved_goes_on_in_shared_memory_as_it_would_have(name: str) -> None:
    the_plan = plan(Optimizer(name, 0.1), LAYOUT, 1)
    one, twin = TorchSlice(the_plan, 0), shared(the_plan)[0][0]
    one.fill(numbers(LAYOUT, Range(0, LAYOUT.moving), 1), frozen=False)
    payload = numbers(LAYOUT, Range(0, LAYOUT.moving), 2)
    one.apply("replica 0", 0, payload, 1.0)
    twin.load({key: value.clone() for key, value in one.arrays().items()})
    twin.publish(b"")
    for held in (one, twin):
        held.apply("replica 0", 1, numbers(LAYOUT, Range(0, LAYOUT.moving), 3), 1.0)
    assert torch.equal(one.moving(), twin.moving())


def test_a_change_that_is_left_changes_nothing() -> None:
    the_plan = plan(Optimizer("momentum", 0.1), FLOATS, 1)
    first, second, owner = (slices[0] for slices in shared(the_plan))
    owner.fill(numbers(FLOATS, Range(0, FLOATS.moving), 1), frozen=False)
    owner.publish(b"begun")
    before, changes = first.moving().clone(), first.changes
    first.apply("replica 0", 0, numbers(FLOATS, Range(0, FLOATS.moving), 2), 1.0)
    assert torch.equal(second.moving(), before)
    assert (second.note(), second.changes) == (b"begun", changes)
    first.abandon()
    second.apply("replica 1", 0, numbers(FLOATS, Range(0, FLOATS.moving), 3), 1.0)
    second.publish(b"next")
    first.apply("replica 0", 0, numbers(FLOATS, Range(0, FLOATS.moving), 2), 1.0)
    first.publish(b"last")
    expected: Any = TorchSlice(the_plan, 0)
    expected.fill(numbers(FLOATS, Range(0, FLOATS.moving), 1), frozen=False)
    for seed in (3, 2):
        expected.apply("replica 0", 0, numbers(FLOATS, Range(0, FLOATS.moving), seed), 1.0)
    assert torch.equal(owner.moving(), expected.moving())


def test_a_gradient_that_is_left_where_it_was_made_is_numbers_alone_until_its_push_is_made() -> None:
    model = nn.Linear(3, 2)
    flat = FlatModule(model)
    slot, vector = (torch.zeros(flat.layout.total, dtype=torch.uint8) for _ in range(2))
    flat.write(vector)
    flat.bind([slot], [vector], lambda landing: landing, lies=True)
    flat.swap(0)
    trained = list(model.parameters())
    made = torch.autograd.grad(model(torch.ones(4, 3)).square().sum(), trained, create_graph=True)
    for parameter, gradient in zip(trained, made, strict=True):
        parameter.grad = gradient  # which has a gradient of its own
    flat.accrue(0, first=True)
    assert all(torch.equal(one, other) for one, other in zip(flat.lying(0), made, strict=True))
    assert not any(one.requires_grad for one in flat.lying(0))
    flat.swap(0)
    assert flat.lying(0), "whatever the model computes with, its push may not be made yet"
    flat.free(0)
    assert not flat.lying(0), "a vector that nobody needs is kept"
    flat.accrue(0, first=True)
    with torch.no_grad():
        flat.accrue(0, first=True, weight=0.5)
    assert not flat.lying(0)
    assert all(torch.equal(one, 0.5 * other) for one, other in zip(flat.gradients(0), made, strict=True))


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_a_replica_more_takes_two_vectors_whatever_the_optimizer_keeps(name: str) -> None:
    layout = lay_out([Tensor("weight", (300, 700), "float32")])
    few, many = (
        PassedLayout(Plan(made(replicas=replicas, optimizer=Optimizer(name)), layout, cut(layout, 1, 1), 100))
        for replicas in (2, 4)
    )
    assert many.length - few.length == pytest.approx(4 * layout.total, rel=0.02)


def test_what_is_written_where_others_read_is_seen_by_its_value_in_two_steps_and_later_by_torchs_count() -> None:
    """However many gradients are made between two fetches."""
    model = nn.Linear(3, 2)
    flat = FlatModule(model)
    slot, vector = (torch.zeros(flat.layout.total, dtype=torch.uint8) for _ in range(2))
    flat.write(vector)
    for steps, written in ((0, True), (1, True), (3, False)):
        flat.bind([slot], [vector], remedy="--path served")
        flat.swap(0)
        for _ in range(steps):
            flat.accrue(0, first=True)
        flat.swap(0)
        model.weight.data.add_(1)
        with pytest.raises(TrainingError, match=r"'weight'.*--path served") if written else contextlib.nullcontext():
            flat.accrue(0, first=True)
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(TrainingError, match="writes to its parameter 'weight' as it computes"):
        flat.accrue(0, first=True)


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("momentum", "momentum", [(0.9,), (0.5,), (0.95,)]),
        ("adamw", "weight_decay", [(0.01,), (0.1,), (0.0,)]),
        ("adam", "betas", [(0.9, 0.999), (0.5, 0.9), (0.8, 0.99)]),
        ("sgd", "weight_decay", [(0.0,), (0.1,), (0.2,)]),
        ("sgd", "lr", [(1.0,), (0.5,), (2.0,)]),
    ],
)
def test_options_that_come_with_a_push_are_those_of_its_step(
    name: str, option: str, values: list[tuple[float, ...]]
) -> None:
    """As `torch.optim` steps with what its group has at that moment; the other group stays as the job has it."""
    layout = lay_out([Tensor("one", (32,), "float32"), Tensor("two", (32,), "float32", group=1)], groups=({}, {}))
    the_plan = plan(Optimizer(name, 0.1), layout, 1)
    *replicas, _ = shared(the_plan)
    held: list[Any] = [TorchSlice(the_plan, 0), replicas[0][0]]
    for one in held:
        one.fill(torch.zeros(layout.moving, dtype=torch.uint8), frozen=False)
    replicas[0][0].publish(b"begun")
    kind, preset = OPTIMIZERS[name]
    plain = [torch.zeros(32), torch.zeros(32)]
    options: Any = {**preset, "lr": 0.1}
    optimizer = kind([{"params": [one]} for one in plain], **options)
    own = {key: value for key, value in optimizer.param_groups[1].items() if key != "params"}
    for step in range(9):
        payload, now = numbers(layout, layout.only.moving, step), values[step % 3]
        changed = () if step in (2, 5) else (GroupOption(1, option, now),)
        optimizer.param_groups[1].update(own)
        if changed:
            optimizer.param_groups[1][option] = (
                0.1 * now[0] if option == "lr" else now if isinstance(own[option], tuple) else now[0]
            )
        for one in held:
            one.set_options(changed)
            one.apply("replica 0", step, payload, 1.0)
        replicas[0][0].publish(b"stepped")
        for parameter, gradient in zip(plain, payload.view(torch.float32).view(2, 32), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for one in held:
            torch.testing.assert_close(one.moving().view(torch.float32), torch.cat(plain), rtol=1e-6, atol=1e-7)


def test_a_gradient_that_lies_where_it_was_made_is_stepped_with_options_too() -> None:
    the_plan = plan(Optimizer("sgd", 0.1), FLOATS, 1)
    *replicas, _ = shared(the_plan)
    held, plain = replicas[0][0], TorchSlice(the_plan, 0)
    for one in (held, plain):
        one.fill(numbers(FLOATS, FLOATS.only.moving, 1), frozen=False)
        one.set_options((GroupOption(0, "weight_decay", (0.5,)),))
    held.publish(b"begun")
    gradient = numbers(FLOATS, FLOATS.only.moving, 2)
    held.lying = lambda _: [gradient[: 35 * 4].view(torch.float32).view(5, 7)]
    held.apply("replica 0", 0, numbers(FLOATS, FLOATS.only.moving, 3), 1.0)
    plain.apply("replica 0", 0, gradient, 1.0)
    got, expected = held.moving(), plain.moving()
    assert got.equal(expected)
