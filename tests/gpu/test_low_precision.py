"""Fewer bits on a GPU: the same that they are on a CPU. Skipped where there is no GPU: nothing of it can be shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import distbelief as db
from distbelief.codecs.fixed_point import DynamicScale
from distbelief.places.evaluate import evaluate
from distbelief.tasks.arithmetic import Autocast, FixedPoint
from distbelief.tasks.inference import lean

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10))


def gradients(arithmetic: str, device: str) -> list[torch.Tensor]:
    model = network().to(device)
    inputs = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(2)).to(device)
    targets = (torch.arange(32) % 10).to(device)
    computes = FixedPoint(10) if arithmetic == "fixed point" else Autocast(arithmetic, model)
    computes.backward(lambda: functional.cross_entropy(model(inputs), targets))
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("arithmetic", "apart"), [("bf16", 0.05), ("fp16", 0.01), ("fixed point", 0.02)])
def test_gradients_of_few_bits_are_those_of_the_cpu_to_their_digits(arithmetic: str, apart: float) -> None:
    exact = gradients("float32", "cpu")
    found, here = gradients(arithmetic, "cuda"), gradients(arithmetic, "cpu")
    for one, other, same in zip(found, exact, here, strict=True):
        assert 0 < float((one - other).norm() / other.norm()) < apart
        assert float((one - same).norm() / same.norm()) < apart


def test_a_grid_is_the_same_on_both() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    scales = DynamicScale(8), DynamicScale(8)
    assert torch.equal(scales[0].round(values), scales[1].round(values.cuda()).cpu())
    assert scales[0].exponent == scales[1].exponent


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16"}, {"fixed_point": "dynamic:10,12"}])
def test_a_job_learns_in_few_bits(options: dict[str, str], tmp_path: Path) -> None:
    strategy = db.Downpour(replicas=2, shards=2, optimizer=db.optim("adagrad", lr=0.05))
    job = db.Job("digits", strategy, epochs=10, device="cuda", out=str(tmp_path / "run"), **options)  # type: ignore[arg-type]  # of strings
    result = db.run(job)
    assert result["test_accuracy"] > 0.9
    assert (result["overflows"]["counted"] > 0) == ("precision" not in options or options["precision"] == "fp16")


def test_what_overflows_is_computed_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("distbelief.tasks.arithmetic.FIRST_SCALE", 2.0**30)
    model = nn.Linear(4, 2).cuda()
    cast = Autocast("fp16", model)
    cast.backward(lambda: model(torch.ones(8, 4, device="cuda")).square().sum())
    assert cast.overflows > 5
    assert "gradients overflowed so far" in capsys.readouterr().err
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_inference_from_few_bits_is_that_of_the_cpu(tmp_path: Path) -> None:
    inputs = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        here, there = lean(network(), "int8")(inputs), lean(network().cuda(), "int8")(inputs.cuda()).cpu()
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    run = tmp_path / "run"
    db.run(db.Job("digits", db.Single(db.optim("adam", lr=0.003)), epochs=6, batch_size=32, out=run))
    db.compress(run, tmp_path / "a.dbz", db.Compression(bits=4, fine_tune=0))
    for inference in ("int8", "ids"):
        losses = [
            evaluate(tmp_path / "a.dbz", device=device, inference=inference)["test_loss"] for device in ("cpu", "cuda")
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
