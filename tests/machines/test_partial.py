"""Steps that leave parameters without a gradient out, as `torch.optim` does with each parameter by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from made import made

from distbelief.core.optimizer import LEARNING_RATES, Optimizer
from distbelief.core.settings import Plan
from distbelief.record.restore import SavedParts
from distbelief.server.optimizers import OPTIMIZERS, WHOLE_STEPS
from distbelief.server.passed import PassedLayout, PassedSlice
from distbelief.server.slice import TorchSlice
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Range, Tensor, lay_out

SHAPES = {"one": (4, 8), "two": (3,), "three": (2, 2), "four": (6,)}
LAYOUT = lay_out(
    [Tensor(name, shape, "float32", group=name == "four") for name, shape in SHAPES.items()],
    groups=({}, {"weight_decay": 0.05}),
)
SPANS = [Range(entry.start, entry.stop) for entry in LAYOUT.entries]
STEPS = 24


def plan(name: str, shards: int) -> Plan:
    optimizer = Optimizer(name, LEARNING_RATES[name], {"weight_decay": 0.01})
    return Plan(made(replicas=2, optimizer=optimizer), LAYOUT, cut(LAYOUT, 1, shards), samples=100)


def gradients(seed: int) -> tuple[torch.Tensor, list[bool]]:
    """The flat gradient of a step, and which parameters have one; the last, a group of its own, has seldom one."""
    chance = torch.Generator().manual_seed(seed)
    flat = torch.zeros(LAYOUT.total, dtype=torch.uint8)
    has = [bool(torch.rand((), generator=chance) < share) for share in (0.9, 0.5, 0.3, 0.3)]
    for span, there in zip(SPANS, has, strict=True):
        values = torch.randn(span.size // 4, generator=chance)
        flat[span.start : span.stop].view(torch.float32).copy_(values if there else torch.zeros_like(values))
    return flat, has


def covered(part: Range, has: list[bool]) -> tuple[Range, ...]:
    return part.without(span for span, there in zip(SPANS, has, strict=True) if not there)


def plain(name: str, steps: Iterator[list[torch.Tensor | None]]) -> list[torch.Tensor]:
    """The parameters after steps of torch's own optimizer, from zero."""
    kind, preset = OPTIMIZERS[name]
    parameters = [torch.zeros(span.size // 4) for span in SPANS]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.05}]
    options: Any = {**preset, "lr": LEARNING_RATES[name], "weight_decay": 0.01, "foreach": False}
    optimizer = kind(groups, **options)
    for step in steps:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters


def apart(flat: torch.Tensor, has: list[bool]) -> list[torch.Tensor | None]:
    values = [flat[span.start : span.stop].view(torch.float32).clone() for span in SPANS]
    return [value if there else None for value, there in zip(values, has, strict=True)]


def check(held: Any, own: Range, oracle: list[torch.Tensor], rtol: float = 1e-6) -> None:
    """What a slice holds of its range is as the oracle has it."""
    moving = held.moving()
    for span, value in zip(SPANS, oracle, strict=True):
        part = span.common(own)
        whole = value[(part.start - span.start) // 4 : (part.stop - span.start) // 4]
        got = moving[part.start - own.start : part.stop - own.start].view(torch.float32)
        torch.testing.assert_close(got, whole, rtol=rtol, atol=1e-7)


NAMES = [name for name in OPTIMIZERS if name not in WHOLE_STEPS]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_without_a_gradient_is_not_stepped(name: str, shards: int) -> None:
    """By a slice in memory, one that is saved and loaded in each step, and one that two update by turns."""
    the_plan = plan(name, shards)
    oracle = plain(name, (apart(*gradients(seed)) for seed in range(STEPS)))
    layout = PassedLayout(the_plan)
    memory = torch.zeros(layout.length, dtype=torch.uint8)
    for shard, own in enumerate(the_plan.assignments):
        one, loaded = TorchSlice(the_plan, shard), TorchSlice(the_plan, shard)
        places = [PassedSlice(layout, shard, memory, place) for place in range(layout.places)]
        places[2].fill(torch.zeros(own.moving.size, dtype=torch.uint8), frozen=False)
        places[2].publish(b"begun")
        for seed in range(STEPS):
            flat, has = gradients(seed)
            payload, ranges = flat[own.moving.start : own.moving.stop].clone(), covered(own.moving, has)
            before, loaded = loaded, TorchSlice(the_plan, shard)
            loaded.load({key: array.clone() for key, array in before.arrays().items()})
            for held in (one, loaded, places[seed % 2]):
                held.apply("replica", seed, payload, 1.0, ranges)
            places[seed % 2].publish(b"stepped")
        for held in (one, loaded, places[0]):
            check(held, own.moving, oracle)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_round_gives_a_parameter_the_mean_of_those_who_have_a_gradient_of_it(name: str) -> None:
    the_plan = plan(name, 1)
    weights = (1.0, 0.5, 1.5)

    def mean(step: int) -> list[torch.Tensor | None]:
        parts = [apart(*gradients(3 * step + replica)) for replica in range(3)]
        found: list[torch.Tensor | None] = []
        for number in range(len(SPANS)):
            there = [(w, one[number]) for w, one in zip(weights, parts, strict=True) if one[number] is not None]
            total = sum(w for w, _ in there)
            found.append(sum(w / total * g for w, g in there if g is not None) if there else None)  # type: ignore[arg-type]  # a sum of tensors
        return found

    oracle = plain(name, (mean(step) for step in range(STEPS)))
    held = TorchSlice(the_plan, 0)
    for step in range(STEPS):
        for replica, weight in enumerate(weights):
            flat, has = gradients(3 * step + replica)
            held.gather("replica", 3 * step + replica, flat, weight, True, covered(LAYOUT.only.moving, has))
        held.step(1.0, 1.0 / sum(weights))
    check(held, LAYOUT.only.moving, oracle, rtol=1e-5)


class File(dict[str, torch.Tensor]):
    """What a shard has saved, as `safe_open` gives it."""

    def get_tensor(self, name: str) -> torch.Tensor:
        return self[name]

    def get_slice(self, name: str) -> Any:
        return type(
            "Slice", (), {"get_shape": lambda _: [*self[name].shape], "__getitem__": lambda _, at: self[name][at]}
        )()


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_who_goes_on_with_other_shards_has_missed_what_was_missed(name: str, before: int, after: int) -> None:
    """Also where all that a shard has was without a gradient, so that it has counted fewer steps than the others."""
    old, new = plan(name, before), plan(name, after)

    def drawn(seed: int) -> tuple[torch.Tensor, list[bool]]:
        flat, has = gradients(seed)
        return (flat, has) if seed > 4 else (flat * 0 + gradients(0)[0], [True, False, False, False])

    def play(the_plan: Plan, shard: int, held: TorchSlice, some: range) -> None:
        own = the_plan.assignments[shard].moving
        for seed in some:
            flat, has = drawn(seed)
            held.apply("replica", seed, flat[own.start : own.stop].clone(), 1.0, covered(own, has))

    files = []
    for shard in range(before):
        held = TorchSlice(old, shard)
        play(old, shard, held, range(STEPS // 2))
        files.append(File({key: array.clone() for key, array in held.arrays().items()}))
    oracle = plain(name, (apart(*drawn(seed)) for seed in range(STEPS)))
    for shard, own in enumerate(new.assignments):
        held = TorchSlice(new, shard)
        held.load(SavedParts(old, files.__getitem__).cut(new, shard))
        play(new, shard, held, range(STEPS // 2, STEPS))
        check(held, own.moving, oracle)
