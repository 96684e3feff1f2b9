"""Dynamic fixed point: values on a grid whose scale follows them, products of such values, and too few bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import distbelief as db
from distbelief.codecs.fixed_point import PERIOD, DynamicScale, round_each, rounded
from distbelief.errors import TrainingError, UsageError
from distbelief.tasks.arithmetic import FixedPoint


def by_hand(values: torch.Tensor, bits: int) -> torch.Tensor:
    """One value after another, in Python's own whole numbers."""
    end = 2.0 ** math.frexp(float(values.abs().max()))[1]
    step = 2 * end / 2**bits
    levels = [max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, round(float(v) / step))) for v in values.flatten()]
    return torch.tensor([level * step for level in levels]).view(values.shape)


@pytest.mark.parametrize("bits", [2, 8, 10, 12, 24])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e5])
def test_values_are_the_nearest_of_a_grid(bits: int, size: float) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(bits)) * size
    found = DynamicScale(bits).round(values)
    assert torch.equal(found, by_hand(values, bits))
    assert len(found.unique()) <= 2**bits
    stepped = values.clone()
    round_each([stepped], bits)
    assert torch.equal(stepped, found)


def test_the_scale_is_raised_by_overflows_and_lowered_where_half_would_do() -> None:
    scale = DynamicScale(8)
    scale.round(torch.ones(100))
    assert scale.exponent == 1
    for _ in range(PERIOD - 1):
        assert scale.round(torch.full((100,), 5.0)).max() == 2 - 2.0**-6
    assert (scale.exponent, scale.overflows, scale.values) == (2, 100 * (PERIOD - 1), 100 * PERIOD)
    for _ in range(2 * PERIOD):
        scale.round(torch.full((100,), 5.0))
    assert scale.exponent == 3, "5 is below 8, and not below 4"
    overflows = scale.overflows
    for _ in range(5 * PERIOD):
        scale.round(torch.full((100,), 0.3))
    assert (scale.exponent, scale.overflows) == (-1, overflows)


def test_a_few_overflows_are_borne() -> None:
    """At most one in 10,000, as in the paper: for one large value the others keep their digits."""
    scale, values = DynamicScale(8), torch.full((20_000,), 0.9)
    scale.round(values)
    values[:2] = 100.0
    for _ in range(2 * PERIOD):
        scale.round(values)
    assert (scale.exponent, scale.overflows) == (0, 4 * PERIOD)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_never_silent(value: float) -> None:
    scale = DynamicScale(8)
    scale.round(torch.ones(2))
    with pytest.raises(TrainingError, match=r"--fixed-point: a factor of a product is (inf|nan)"):
        scale.round(torch.tensor([1.0, value]))


def test_a_step_multiplies_rounded_values_only() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    inputs, targets = torch.randn(16, 7), torch.randn(16, 3)
    loss = FixedPoint(6).backward(lambda: functional.mse_loss(model(inputs), targets))
    (first, bias), (second, other) = ((layer.weight.detach(), layer.bias.detach()) for layer in (model[0], model[2]))
    x, a, b = (by_hand(one, 6) for one in (inputs, first, second))
    hidden = torch.tanh(x @ a.T + bias)
    h = by_hand(hidden, 6)
    out = h @ b.T + other
    assert torch.allclose(loss, (out - targets).square().mean())
    slope = 2 * (out - targets) / out.numel()
    s = by_hand(slope, 6)
    assert torch.allclose(model[2].weight.grad, s.T @ h, atol=1e-7)
    back = (s @ b) * (1 - hidden.square())
    assert torch.allclose(model[0].weight.grad, by_hand(back, 6).T @ x, atol=1e-6)
    assert torch.allclose(model[0].bias.grad, back.sum(0), atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(2, 3, 3), (4, 2, 6, 6)), (nn.GRU(4, 3), (5, 2, 4)), (nn.MultiheadAttention(4, 2), (5, 2, 4))],
)
def test_products_are_found_in_layers_of_other_kinds(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """With 24 bits nothing changes; with three much does."""
    torch.manual_seed(1)
    inputs = torch.randn(shape)
    given = (inputs, inputs, inputs) if isinstance(layer, nn.MultiheadAttention) else (inputs,)

    def loss() -> torch.Tensor:
        out = layer(*given)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    def gradients(bits: int) -> list[torch.Tensor]:
        layer.zero_grad()
        FixedPoint(bits).backward(loss) if bits else loss().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    exact = gradients(0)
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(exact, gradients(24), strict=True))
    assert not any(torch.allclose(one, other, rtol=1e-3) for one, other in zip(exact, gradients(3), strict=True))


def test_a_model_whose_products_cannot_be_rounded_is_refused() -> None:
    query = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(TrainingError, match=r"scaled_dot_product.* does not show"):
        FixedPoint(8).backward(lambda: functional.scaled_dot_product_attention(query, query, query).sum())
    with pytest.raises(TrainingError, match="this model has none: leave it off"):
        FixedPoint(8).backward(lambda: query.sum())


@pytest.mark.parametrize(
    "asked", ["10,12", "dynamic:10", "dynamic:1,12", "dynamic:12,10", "dynamic:10,25", "static:9,9"]
)
def test_bits_that_cannot_be_are_refused(asked: str) -> None:
    with pytest.raises(UsageError, match=rf"--fixed-point {asked}: is dynamic:PRODUCTS,UPDATES, .* such as dynamic:10"):
        db.Job("digits", fixed_point=asked).settings()


def test_it_is_of_float32_and_of_whole_replicas() -> None:
    with pytest.raises(UsageError, match="rounds values of float32: leave --precision bf16 off"):
        db.Job("digits", fixed_point="dynamic:10,12", precision="bf16").settings()
    with pytest.raises(UsageError, match="--fixed-point dynamic:10,12 of split replicas: no partition sees alone"):
        db.Job("digits", db.Downpour(partitions=2), fixed_point="dynamic:10,12").settings()
    with pytest.raises(UsageError, match="means nothing to strategy hogwild; rounding a parameter would undo what"):
        db.Job("digits", "hogwild", fixed_point="dynamic:10,12").settings()


def trained(strategy: str, fixed: str, **more: Any) -> dict[str, Any]:
    job: dict[str, Any] = {"epochs": 5, "batch_size": 16, "seed": 1, **more}
    return db.run(db.Job("digits", strategy, fixed_point=fixed, **job), on="simulated")


@pytest.mark.parametrize("strategy", ["downpour", "allreduce"])
@pytest.mark.long
def test_ten_bits_learn_as_float32_does_and_overflows_are_told(strategy: str) -> None:
    plain, found = trained(strategy, ""), trained(strategy, "dynamic:10,12")
    assert found["test_accuracy"] > plain["test_accuracy"] - 0.02
    assert plain["overflows"] == {"overflows": 0, "counted": 0}
    told = found["overflows"]
    assert 0 < told["overflows"] < 1e-2 * told["counted"]


def test_parameters_of_a_job_are_on_the_grid_of_its_updates(tmp_path: Any) -> None:
    """Each tensor, also where shards cut it: as many different values as the bits have."""
    from safetensors.torch import load_file

    for strategy in (db.Single(), db.Downpour(replicas=2, shards=3), db.Allreduce(replicas=2)):
        out = tmp_path / strategy.name
        job = db.Job("digits", strategy, epochs=1, fixed_point="dynamic:4,6", out=out)
        db.run(job, on=db.Simulated(keep=True))
        for value in load_file(out / "model.safetensors").values():
            parts = {64} if strategy.name != "downpour" else {64, 128, 192}
            assert len(value.unique()) <= max(parts)
            assert torch.equal(rounded(value, 12, 3), value)
