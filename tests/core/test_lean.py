"""Inference from fewer bits: what int8 multiplies is what it says, and weights of ids are those of the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import Ask
from torch import nn
from torch.nn import functional

import distbelief as db
from distbelief.codecs.file import ModelFile
from distbelief.codecs.stored import Stored
from distbelief.errors import UsageError
from distbelief.lab.compress.compressing import cluster
from distbelief.places.evaluate import evaluate
from distbelief.tasks.inference import held_bytes, lean


def whole(values: torch.Tensor) -> torch.Tensor:
    """Each row as its 127 levels have it."""
    scale = values.flatten(1).abs().amax(1).view(-1, *[1] * (values.dim() - 1)) / 127
    return torch.round(values / scale) * scale


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 13), (5, 13), (2, 3, 13)])
def test_a_linear_layer_of_int8_multiplies_rounded_rows(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    layer, inputs = nn.Linear(13, 7, bias=bias), torch.randn(shape)
    rounded = whole(inputs.reshape(-1, 13)).view(shape)
    expected = functional.linear(rounded, whole(layer.weight.detach()), layer.bias)
    with torch.no_grad():
        assert torch.allclose(lean(nn.Sequential(layer), "int8")(inputs), expected, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": (2, 1)}, {"padding": "same", "bias": False},
        {"padding": "valid", "stride": (1, 2)},
    ],
)  # fmt: skip
def test_a_convolution_of_int8_multiplies_rounded_samples(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    layer, inputs = nn.Conv2d(3, 5, (3, 5), **options), torch.randn(4, 3, 9, 8)
    own = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    expected = functional.conv2d(whole(inputs), whole(layer.weight.detach()), layer.bias, **own)
    model = lean(nn.Sequential(layer), "int8")
    with torch.no_grad():
        found = model(inputs)
        assert torch.allclose(found, expected, atol=1e-5)
        assert torch.equal(model(inputs[2:3]), found[2:3]), "a sample does not depend on others"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden_by_int8(value: float) -> None:
    inputs = torch.tensor([[1.0, value, 0.0], [1.0, 2.0, 3.0]])
    found = lean(nn.Sequential(nn.Linear(3, 2)), "int8")(inputs)
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()


def test_layers_that_int8_knows_nothing_of_stay_as_they_are() -> None:
    odd = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2))
    lean(odd, "int8")
    assert [type(layer).__name__ for layer in odd] == ["Conv2d", "Flatten", "LayerNorm", "Int8Linear"]
    attending = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8)).eval()
    inputs = torch.randn(2, 3, 8)
    with torch.no_grad():
        before = attending[0](inputs)
        model = lean(attending, "int8")
        assert torch.equal(model[0](inputs), before)
    with pytest.raises(UsageError, match=r"--inference int8: the model has no linear layer or 2-D convolution"):
        lean(nn.Sequential(nn.LayerNorm(3)), "int8")


def stored(shape: tuple[int, ...], bits: int, share: float) -> Stored:
    generator = np.random.default_rng(bits)
    size = math.prod(shape)
    positions = None if share == 1 else np.sort(generator.choice(size, int(share * size), replace=False))
    values = generator.standard_normal(size if positions is None else len(positions)).astype(np.float32)
    codebook, ids = cluster(values, 1 << bits, "linear", 0)
    return Stored(shape, torch.tensor(codebook), positions, ids, bits)


@pytest.mark.parametrize("share", [1.0, 0.31])
@pytest.mark.parametrize("bits", [1, 3, 4, 5, 8, 9])
def test_a_weight_of_ids_is_the_dense_one(bits: int, share: float) -> None:
    weight = stored((37, 51), bits, share)
    file = ModelFile("digits", {"0.weight": weight, "0.bias": Stored((37,), torch.randn(37))})
    dense = nn.Sequential(nn.Linear(51, 37))
    dense.load_state_dict(file.state())
    inputs = torch.randn(4, 51)
    expected = dense(inputs)
    found = lean(dense, "ids", file)
    assert torch.equal(found(inputs), expected)
    each = (0.5 if bits <= 4 else 1 if bits <= 8 else 2) + (4 if share < 1 else 0)
    assert held_bytes(found) <= each * weight.kept + 4 * 37 + (2048 if bits <= 4 else 4 << bits) + 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("lean")
    here = db.Simulated(keep=True)
    db.run(
        db.Job("digits", db.Single(db.optim("adam", lr=0.003)), epochs=6, batch_size=32, out=folder / "run"), on=here
    )
    db.compress(folder / "run", folder / "a.dbz", db.Compression(bits=4, fine_tune=0))
    return folder / "run", folder / "a.dbz"


@pytest.mark.long
def test_evaluations_say_what_they_compute_with_and_hold(made: tuple[Path, Path]) -> None:
    run, file = made
    plain = evaluate(file)
    found = {name: evaluate(file, inference=name) for name in ("ids", "int8")}
    assert (plain["inference"], found["ids"]["inference"]) == ("float32", "ids")
    assert (found["ids"]["test_loss"], found["ids"]["test_accuracy"]) == (plain["test_loss"], plain["test_accuracy"])
    assert 0 < abs(found["int8"]["test_loss"] - plain["test_loss"]) < 0.01
    parameters = sum(p.numel() for p in db.load(file).parameters())
    assert plain["model_bytes"] == 4 * parameters
    assert found["int8"]["model_bytes"] < 0.35 * plain["model_bytes"]
    assert found["ids"]["model_bytes"] < 0.6 * plain["model_bytes"], "of a model so small tables are much"
    assert evaluate(run, inference="int8")["test_accuracy"] > 0.9
    assert found["int8"]["seconds"] > 0


def test_a_loaded_model_computes_from_few_bits(made: tuple[Path, Path]) -> None:
    inputs = torch.randn(3, 64)
    with torch.no_grad():
        dense, ids, int8 = (db.load(made[1], inference=name)(inputs) for name in ("float32", "ids", "int8"))
    assert torch.equal(dense, ids)
    assert 0 < float((dense - int8).abs().max()) < 0.1 * float(dense.abs().max())


def test_what_cannot_be_is_refused(made: tuple[Path, Path], ask: Ask) -> None:
    run, file = made
    with pytest.raises(UsageError, match="unknown inference 'int9'; did you mean 'int8'"):
        db.load(file, inference="int9")
    with pytest.raises(UsageError, match="--inference ids: needs a compressed file whose weights share values; make"):
        evaluate(run, inference="ids")
    assert "did you mean 'ids'" in ask(["evaluate", str(run), "--inference", "idz"], 2).err
    assert " bytes in memory, " in ask(["evaluate", str(file), "--inference", "int8"]).out
    assert json.loads(ask(["evaluate", str(file), "--inference", "ids", "--json"]).out)["inference"] == "ids"
