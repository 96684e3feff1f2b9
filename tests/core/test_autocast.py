"""Gradients in few bits: those of float32 to what the bits allow, and what overflows is never given to anybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distbelief as db
from distbelief.errors import TrainingError, UsageError
from distbelief.tasks.arithmetic import FIRST_SCALE, Autocast


def gradients(precision: str) -> list[torch.Tensor]:
    """Of a smooth model: a unit that is cut off in one precision and not in another would hide what is asked for."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    inputs, targets = torch.randn(64, 20), torch.randn(64, 5)
    loss = Autocast(precision, model).backward(lambda: nn.functional.mse_loss(model(inputs), targets))
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("precision", "digits"), [("bf16", 8), ("fp16", 11)])
def test_gradients_are_those_of_float32_to_the_digits_of_the_precision(precision: str, digits: int) -> None:
    exact, found = gradients("float32"), gradients(precision)
    for one, other in zip(exact, found, strict=True):
        distance = float((one - other).norm() / one.norm())
        assert 0 < distance < 16 * 2.0**-digits
    assert max(float((one - other).norm() / one.norm()) for one, other in zip(exact, found, strict=True)) > 2.0**-15


def test_small_gradients_do_not_become_zero_in_fp16() -> None:
    """1e-6 of a gradient that fp16 would round to zero on its way, were it not scaled."""
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    model = nn.Sequential(first, second)
    nn.init.constant_(first.weight, 1.0)
    nn.init.constant_(second.weight, 1e-4)
    Autocast("fp16", model).backward(lambda: (model(torch.ones(1, 1)).float() * 1e-5).sum())
    assert float(first.weight.grad) == pytest.approx(1e-9, rel=1e-2)


class Loud(nn.Module):
    """A batch norm, and a weight whose gradient is as large as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(inputs))
        return out


def test_what_overflows_is_computed_again_with_half_the_scale_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model, plain = Loud(), Loud()
    plain.load_state_dict(model.state_dict())
    inputs = torch.randn(8, 2)
    cast = Autocast("fp16", model)
    cast.backward(lambda: (model(inputs) * 30).square().sum())
    Autocast("float32", plain).backward(lambda: (plain(inputs) * 30).square().sum())
    assert cast.overflows > 1
    assert cast.scale == FIRST_SCALE / 2**cast.overflows
    first = "fp16: 1 gradients overflowed so far; each was computed again, and the loss is now scaled by 16384"
    assert f"distbelief: {first}" in capsys.readouterr().err.splitlines()
    assert model.linear.weight.grad is not None
    assert torch.allclose(model.linear.weight.grad, plain.linear.weight.grad, rtol=2e-2)
    assert torch.allclose(model.norm.running_var, plain.norm.running_var, rtol=1e-2)
    assert int(model.norm.num_batches_tracked) == 1


def test_the_scale_grows_after_steps_that_did_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.tasks.arithmetic.GROWTH_STEPS", 3)
    model = nn.Linear(1, 1)
    cast = Autocast("fp16", model)
    for _ in range(3):
        cast.backward(lambda: model(torch.ones(1, 1)).sum() * 0.01)
    assert cast.scale == 2 * FIRST_SCALE


def test_a_gradient_that_no_scale_makes_finite_ends_it() -> None:
    model = nn.Linear(1, 1, bias=False)
    with pytest.raises(TrainingError, match=r"a gradient overflows fp16 .* whatever it is scaled by: train with"):
        Autocast("fp16", model).backward(lambda: (model(torch.ones(1, 1)).float() * 1e6).sum())


def test_parameters_that_overflow_are_counted_and_named() -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 7e4)
    with pytest.raises(TrainingError, match=r"3 of 3 values of 'weight' overflow fp16 \(65504 at most\)"):
        Autocast("fp16", model).backward(lambda: model(torch.ones(1, 3)).sum())


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("downpour", "bf16"), ("synchronous", "fp16"), ("allreduce", "bf16"), ("hogwild", "fp16"), ("single", "bf16")],
)
@pytest.mark.long
def test_a_job_learns_in_few_bits(strategy: str, precision: str) -> None:
    job: Any = {"epochs": 5, "batch_size": 16, "seed": 1}
    accuracy = [
        db.run(db.Job("digits", strategy, precision=one, **job), on="simulated")["test_accuracy"]
        for one in ("float32", precision)
    ]
    assert accuracy[1] > accuracy[0] - 0.03
    assert accuracy[1] > 0.8


def test_a_result_says_how_often_a_minibatch_was_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.tasks.arithmetic.FIRST_SCALE", 2.0**30)
    for strategy in ("single", "downpour"):
        found = db.run(db.Job("digits", strategy, precision="fp16"), on="simulated")
        told = found["overflows"]
        assert told["overflows"] > 5
        assert told["counted"] == found["steps"] + told["overflows"]


def test_no_other_precision_is_taken() -> None:
    with pytest.raises(UsageError, match="unknown precision 'fp61'; did you mean 'fp16'"):
        db.Job("digits", precision="fp61").settings()
