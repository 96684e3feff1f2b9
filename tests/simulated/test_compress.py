"""Compression of a run: what it keeps, shares and leaves alone, trained on by jobs of every strategy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask
from safetensors.torch import load_file
from torch import nn

import distbelief as db
from distbelief.cli import main
from distbelief.codecs.file import ModelFile, read
from distbelief.codecs.stored import Stored
from distbelief.errors import CheckpointError, UsageError
from distbelief.lab.compress import compressing
from distbelief.lab.compress.compressing import compress
from distbelief.places.evaluate import evaluate
from distbelief.tasks import resolve

HERE = db.Simulated(keep=True)
FAST = {"fine_tune": 1, "batch_size": 32, "lr": 0.003}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    db.run(db.Job("digits", db.Single(db.optim("adam", lr=0.003)), epochs=8, batch_size=32, out=folder), on=HERE)
    return folder


def made(run: Path, out: Path, **options: Any) -> dict[str, Any]:
    return compress(run, out, db.Compression(**{**FAST, **options}), HERE)


@pytest.mark.long
def test_a_run_becomes_a_small_file_that_does_as_well(run: Path, tmp_path: Path) -> None:
    """Its size on disk is the ratio that is told, and what is told of it is measured from the file."""
    path = tmp_path / "small.dbz"
    result = made(run, path, keep=(0.25,), bits=4, huffman=True, strategy="downpour", replicas=2)
    model = load_file(run / "model.safetensors")
    assert result["ratio"] == 4 * sum(one.numel() for one in model.values()) / path.stat().st_size
    assert result["ratio"] > 8
    assert result["test_error"] == pytest.approx(100 - 100 * evaluate(path)["test_accuracy"])
    assert result["dense_error"] == pytest.approx(100 - 100 * evaluate(run)["test_accuracy"])
    assert result["test_error"] < result["dense_error"] + 3
    for layer in result["layers"]:
        weight = db.load(path).state_dict()[layer["name"]]
        assert int((weight != 0).sum()) <= layer["kept"] == round(0.25 * weight.numel())
        assert len(weight.unique()) <= 17
    assert sum(one["gap_bytes"] + one["value_bytes"] for one in result["layers"]) < result["bytes"]


def test_what_is_pruned_at_once_is_the_smallest(run: Path, tmp_path: Path) -> None:
    made(run, tmp_path / "it.dbz", keep=(0.5, 1.0), fine_tune=0)
    before, after = load_file(run / "model.safetensors"), db.load(tmp_path / "it.dbz").state_dict()
    first, *others = [name for name, one in before.items() if name.endswith("weight")]
    gone = after[first] == 0
    assert int(gone.sum()) == before[first].numel() - round(0.5 * before[first].numel())
    assert before[first][gone].abs().max() <= before[first][~gone].abs().min()
    assert torch.equal(before[first][~gone], after[first][~gone])
    assert all(torch.equal(before[name], after[name]) for name in others)


OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "keep": ((0.3,), {}),
    "bits": (3, {}),
    "huffman": (True, {}),
    "start": ("density", {"fine_tune": 0}),
    "rest": ("int8", {}),
    "fine_tune": (2, {}),
    "lr": (0.1, {}),
    "batch_size": (64, {}),
    "strategy": ("synchronous", {"strategy": "downpour", "replicas": 2}),
    "replicas": (3, {"strategy": "synchronous"}),
    "seed": (5, {}),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(db.Compression)])
@pytest.mark.long
def test_no_option_is_dead(name: str, run: Path, tmp_path: Path) -> None:
    if name == "data_dir":
        with pytest.raises(UsageError, match="task 'digits' reads no folder"):
            made(run, tmp_path / "it.dbz", bits=4, data_dir="there")
        return
    value, beside = OTHER[name]
    for number, more in enumerate(({}, {name: value})):
        made(run, tmp_path / f"{number}.dbz", **{"bits": 4, **beside, **more})
    assert (tmp_path / "0.dbz").read_bytes() != (tmp_path / "1.dbz").read_bytes()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep": (0.0,)}, "--keep 0: must be above 0, and at most 1"),
        ({"keep": (0.5, 1.5)}, r"--keep 1\.5: must be above 0, and at most 1"),
        ({"bits": 13}, "--bits 13: must be 1 or more and at most 12"),
        ({"bits": -1}, "--bits -1"),
        ({"bits": 4, "start": "liner"}, "unknown start 'liner'; did you mean 'linear'"),
        ({"rest": "fp61"}, "unknown precision 'fp61'; did you mean 'fp16'"),
        ({"bits": 4, "fine_tune": -1}, "--fine-tune -1: must be 0 or more"),
        ({"bits": 4, "lr": 0.0}, "--lr 0: must be above 0"),
        ({"keep": (0.1,), "start": "random"}, "--start random: is for shared values, and there are none"),
        ({"keep": (1.0,), "huffman": True}, "--huffman codes ids and gaps, and there are none"),
        ({"bits": 4, "replicas": 2}, "--replicas 2: strategy single has none"),
        ({"bits": 4, "strategy": "sandblaster"}, "--strategy sandblaster: has no optimizer"),
        ({"bits": 4, "strategy": "downpor"}, "did you mean 'downpour'"),
        ({}, "nothing would be smaller: set --keep, --bits or --rest"),
        ({"bits": "4"}, r"Compression\(bits='4'\): must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        db.Compression(**options)


def test_a_number_for_each_layer_or_one_for_all(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--keep has 3 numbers, and the model has 2 layers \(.*weight, .*weight\)"):
        made(run, tmp_path / "it.dbz", keep=(0.1, 0.2, 0.3))


def test_a_layer_smaller_than_its_codebook_is_left_alone_and_told(run: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    options = db.Compression(bits=10, fine_tune=0)
    result = compress(run, tmp_path / "it.dbz", options, HERE, lines.append)
    (name, why), *more = result["left_alone"].items()
    assert not more
    assert why == "it has 640 values, and a codebook has 1024"
    assert f"{name} shares nothing: {why}" in lines
    assert torch.equal(db.load(tmp_path / "it.dbz").state_dict()[name], load_file(run / "model.safetensors")[name])


def test_a_layer_of_fewer_values_than_clusters_is_left_alone() -> None:
    said = compressing.share_values(Stored((40,), torch.arange(40.0) % 3), 2, "linear", 0)
    assert said == "it has 3 different values, fewer than 4 clusters"


def test_a_run_without_a_model_and_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing there"):
        made(tmp_path / "nothing there", tmp_path / "it.dbz", bits=4)
    db.run(db.Job("digits", out=tmp_path / "run"), on=HERE)
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        made(tmp_path / "run", tmp_path / "it.dbz", bits=4)
    with pytest.raises(UsageError, match="there is no folder"):
        made(tmp_path / "run", tmp_path / "none" / "it.dbz", bits=4)


def test_the_commands_say_what_came_of_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask
) -> None:
    path = tmp_path / "small.dbz"
    words = ["compress", str(run), "--bits", "4", "--fine-tune", "0", "--out", str(path)]
    assert main.run(words) == 0
    size = path.stat().st_size
    assert f"{path}: {size:,} bytes of" in (said := capsys.readouterr().out)
    assert "16 values for the weights of each layer" in said
    assert json.loads(ask([*words, "--json"]).out)["bytes"] == size
    assert not ask([*words, "--quiet"]).out
    assert json.loads(ask(["evaluate", str(path), "--json"]).out)["file"] == str(path)
    assert main.run(["expand", str(path), "--out", str(tmp_path / "x.safetensors")]) == 0
    assert load_file(tmp_path / "x.safetensors").keys() == load_file(run / "model.safetensors").keys()


def test_a_run_knows_its_task(run: Path) -> None:
    with pytest.raises(UsageError, match="--task digits: is for a compressed file; a run knows its own task"):
        evaluate(run, task="digits")


def test_the_task_of_a_file_may_be_named(run: Path, tmp_path: Path) -> None:
    made(run, tmp_path / "it.dbz", bits=4, fine_tune=0)
    file = dataclasses.replace(read(tmp_path / "it.dbz"), task="elsewhere:digits")
    (tmp_path / "it.dbz").write_bytes(file.encode())
    assert evaluate(tmp_path / "it.dbz", task="digits")["task"] == "digits"
    assert isinstance(db.load(tmp_path / "it.dbz", "digits"), nn.Module)


STRATEGIES = {
    "single": db.Single(db.optim("adam", lr=0.01)),
    "downpour": db.Downpour(2, 3, optimizer=db.optim("momentum", lr=0.05)),
    "synchronous": db.Synchronous(2, 2, optimizer=db.optim("adamw", lr=0.01, weight_decay=0.1)),
    "allreduce": db.Allreduce(2, optimizer=db.optim("nesterov", lr=0.05)),
    "hogwild": db.Hogwild(2, optimizer=db.optim("adagrad", lr=0.05)),
    "sandblaster": db.Sandblaster(2, batch_size=600, portion_size=100, method="gradient"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.long
def test_what_was_pruned_stays_zero_and_what_was_shared_stays_shared_under_every_strategy(
    strategy: str, tmp_path: Path
) -> None:
    task = resolve("digits")
    tensors, _ = compressing.stored_tensors(task.model().state_dict())
    layers = [name for name, one in tensors.items() if len(one.shape) > 1]
    tensors[layers[0]] = compressing.prune(tensors[layers[0]], 0.2)
    shared = compressing.share_values(compressing.prune(tensors[layers[-1]], 0.5), 3, "linear", 0)
    assert isinstance(shared, Stored)
    tensors[layers[-1]] = shared
    file, path = ModelFile("digits", tensors), tmp_path / "stage.dbz"
    path.write_bytes(file.encode())
    job = db.Job(f"digits@{path}", STRATEGIES[strategy], epochs=1, out=tmp_path / "run")
    db.run(job, on=db.Simulated(keep=True))
    state = load_file(tmp_path / "run" / "model.safetensors")
    after = compressing.with_trained_values(file, state).state()
    moved = [name for name in after if not torch.equal(after[name], file.state()[name])]
    assert moved == list(after)
    assert torch.equal(after[layers[0]] != 0, file.state()[layers[0]] != 0)
    assert len(after[layers[-1]].unique()) <= 9
    assert len(state) == len(file.state())
