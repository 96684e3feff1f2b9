"""Predictions: what they write is what the models answer, in order, whoever computed it and whoever died meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy
import predicted
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import distbelief as db
from distbelief.cli import main
from distbelief.errors import DataError, DistbeliefError, Interrupted, JobFailed, UsageError
from distbelief.record.folder import RunFolder


def run_of(path: Path, task: str, model: nn.Module) -> str:
    """A run folder with a model."""
    folder = RunFolder.create(path, "made")
    folder.write_job({"task": task, "seed": 0})
    save_file(model.state_dict(), folder.model)
    return str(folder.path)


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As many files here, as many processes are killed."""
    folder = tmp_path / "deaths"
    folder.mkdir()
    monkeypatch.setenv("DEATHS", str(folder))
    return folder


@pytest.mark.usefixtures("deaths")
def test_outputs_are_the_mean_of_the_models_in_the_order_of_the_samples(tmp_path: Path) -> None:
    models = [predicted.Deadly() for _ in range(3)]
    runs = [run_of(tmp_path / str(i), "predicted:deadly", model) for i, model in enumerate(models)]
    inputs = torch.arange(float(predicted.SAMPLES))[:, None]
    with torch.no_grad():
        want = sum((model.linear(inputs) for model in models), torch.zeros(predicted.SAMPLES, 3)) / 3
    told: list[str] = []
    out = tmp_path / "outputs.safetensors"
    result = db.predict(runs, "predicted:deadly", out, replicas=2, batch_size=3, told=told.append)
    outputs = load_file(out)["outputs"]
    torch.testing.assert_close(outputs, want)
    assert (result["samples"], result["shape"], len(told)) == (50, [3], 5)
    right = (want.argmax(1) == torch.arange(50) % 3).float().mean().item()
    assert result["test_accuracy"] == pytest.approx(right)
    assert result["test_loss"] == pytest.approx(nn.functional.cross_entropy(want, torch.arange(50) % 3).item())
    save_file({"inputs": inputs}, tmp_path / "inputs.safetensors")
    numpy.save(tmp_path / "inputs.npy", inputs.numpy())
    for source in ("inputs.safetensors", "inputs.npy"):
        result = db.predict(runs, str(tmp_path / source), tmp_path / "again.safetensors", replicas=1, batch_size=3)
        assert (tmp_path / "again.safetensors").read_bytes() == out.read_bytes()
        assert "test_loss" not in result


def test_a_process_that_is_killed_costs_what_it_was_computing_which_others_compute(
    tmp_path: Path, deaths: Path
) -> None:
    model = predicted.Deadly()
    run = run_of(tmp_path / "run", "script", model)  # a script's: the task that is named builds its model
    (deaths / "0").touch()
    told: list[str] = []
    out = tmp_path / "outputs.safetensors"
    db.predict(run, "predicted:deadly", out, replicas=2, batch_size=2, told=told.append)
    assert sum("killed by SIGKILL" in line for line in told) == 1
    with torch.no_grad():
        want = model.linear(torch.arange(50.0)[:, None])
    torch.testing.assert_close(load_file(out)["outputs"], want)
    out.unlink()
    for number in range(2):
        (deaths / str(number)).touch()
    with pytest.raises(JobFailed, match="every process of the prediction has ended, the last killed by SIGKILL"):
        db.predict(run, "predicted:deadly", out, replicas=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deaths", "run"]


def trained_layers(path: Path, task: str) -> tuple[str, nn.Module]:
    """A run, and its model ready to answer, whose running statistics are not those of a new one."""
    model = getattr(predicted, task)().model()
    model(torch.randn(64, 1) + 2)
    return run_of(path, f"predicted:{task}", model), model.eval()


@pytest.mark.parametrize(("split", "partitions", "count", "size"), [("stages", 2, 2, 3), ("neurons", 3, 1, 7)])
def test_partitions_answer_what_the_whole_models_answer(
    tmp_path: Path, split: str, partitions: int, count: int, size: int
) -> None:
    runs = [trained_layers(tmp_path / str(number), "layered") for number in range(count)]
    inputs = torch.arange(float(predicted.SAMPLES))[:, None]
    out = tmp_path / "outputs.safetensors"
    with torch.no_grad():
        want = torch.stack([model(inputs) for _, model in runs]).mean(0)
    told: list[str] = []
    result = db.predict(
        [run for run, _ in runs], "predicted:layered", out, replicas=2, batch_size=size, partitions=partitions,
        split=split, told=told.append,
    )  # fmt: skip
    torch.testing.assert_close(load_file(out)["outputs"], want)
    assert told[-1] == "50 of 50 samples"
    assert (result["partitions"], len(result["splits"])) == (partitions, len(runs))
    assert split in (*result["splits"], "auto")
    assert result["test_loss"] == pytest.approx(nn.functional.cross_entropy(want, torch.arange(50) % 3).item())


def test_partitions_answer_by_the_split_that_a_task_brings_where_none_is_named(tmp_path: Path) -> None:
    run, model = trained_layers(tmp_path / "run", "split_by_name")
    out = tmp_path / "outputs.safetensors"
    result = db.predict(run, "predicted:split_by_name", out, replicas=1, partitions=2, split="auto")
    assert result["splits"] == ["first=1,second=0"]
    with torch.no_grad():
        want = model(torch.arange(float(predicted.SAMPLES))[:, None])
    torch.testing.assert_close(load_file(out)["outputs"], want)


def test_a_replica_of_which_a_partition_is_killed_costs_what_it_had(tmp_path: Path, deaths: Path) -> None:
    model = predicted.second_dies().model()
    run = run_of(tmp_path / "run", "predicted:second_dies", model)
    with torch.no_grad():
        want = model(torch.arange(50.0)[:, None])
    (deaths / "0").touch()
    told: list[str] = []
    out = tmp_path / "outputs.safetensors"
    split = {"batch_size": 1, "partitions": 2, "split": "parts.0=0,parts.1=1"}
    db.predict(run, "predicted:second_dies", out, replicas=2, told=told.append, **split)
    assert sum(".1 was killed by SIGKILL" in line for line in told) == 1
    torch.testing.assert_close(load_file(out)["outputs"], want)
    (deaths / "0").touch()
    with pytest.raises(JobFailed, match="the last killed by SIGKILL; have fewer --replicas, or each in more --part"):
        db.predict(run, "predicted:second_dies", out, replicas=1, **split)


def test_a_ctrl_c_leaves_nothing_of_a_prediction(tmp_path: Path) -> None:
    run, _ = trained_layers(tmp_path / "run", "layered")
    with pytest.raises(Interrupted, match="the prediction was interrupted; nothing of it is left"):
        db.predict(
            run, "predicted:layered", tmp_path / "outputs.safetensors", batch_size=1, partitions=2,
            told=lambda _: os.kill(os.getpid(), signal.SIGINT),
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


SPLITS = {
    "wide": ("stages", "the model of .*/wide: --partitions 2: there are 1 layers with parameters for stages"),
    "layered": ("stage", "the model of .*/layered: unknown way to split 'stage'; did you mean 'stages'"),
    "layered reversed_layers": (
        "first=0,second=1",
        "reversed_layers ends at partition 0, that of .*/layered by .* at 1",
    ),
    "narrow": ("stages", "the model of .*/narrow, of samples 0 to 49, raised RuntimeError: too narrow"),
}


@pytest.mark.parametrize("tasks", SPLITS)
def test_what_cannot_be_split_is_said_and_leaves_no_file(tmp_path: Path, tasks: str) -> None:
    runs = [run_of(tmp_path / task, f"predicted:{task}", getattr(predicted, task)().model()) for task in tasks.split()]
    split, told = SPLITS[tasks]
    with pytest.raises(DistbeliefError, match=told):
        db.predict(
            runs, f"predicted:{tasks.split()[0]}", tmp_path / "o.safetensors", replicas=1, partitions=2, split=split
        )
    assert not [path.name for path in tmp_path.iterdir() if path.is_file()]


@pytest.mark.usefixtures("deaths")
@pytest.mark.parametrize(
    ("tasks", "source", "kind", "told"),
    [
        (["pairs"], "predicted:pairs", UsageError, "of samples 0 to 49, answers a list: it must be one tensor"),
        (["deadly", "wide"], "predicted:wide", UsageError, "they have no mean; predict with each by itself"),
        (["wide"], "digits", DistbeliefError, "raised RuntimeError: mat1 and mat2"),
        (["wide"], "there is none.npy", DataError, "there is no file there is none.npy"),
        (["wide"], "text.npy", DataError, "cannot be read as an array of numbers"),
        (["wide"], "other.safetensors", DataError, "holds other: name the tensor of inputs 'inputs'"),
    ],
)
def test_what_cannot_be_predicted_is_said_and_leaves_no_file(
    tmp_path: Path,
    tasks: list[str],
    source: str,
    kind: type[DistbeliefError],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [run_of(tmp_path / t, f"predicted:{t}", getattr(predicted, t)().model()) for t in tasks]
    (tmp_path / "text.npy").write_text("text")
    save_file({"other": torch.zeros(2, 1)}, tmp_path / "other.safetensors")
    with pytest.raises(kind, match=told):
        db.predict(runs, source, tmp_path / "outputs.safetensors", replicas=1)
    assert not [path.name for path in tmp_path.iterdir() if "outputs" in path.name]


REFUSED = {
    "": "write the runs and what to predict first",
    "run": "write the runs and what to predict first",
    "run mnits --out o.safetensors": "unknown task 'mnits'; did you mean 'mnist'?",
    "run digits": "where to? Name the file",
    "run digits --out outputs.csv": "outputs are written as safetensors: name it outputs.safetensors",
    "run digits --out nowhere/o.safetensors": "there is no folder nowhere",
    "run digits --out o.safetensors --replicas 0": "--replicas 0: must be 1 or more",
    "run digits --out o.safetensors --batch-size 0": "--batch-size 0: must be 1 or more",
    "run digits --out o.safetensors --partitions 0": "--partitions 0: must be 1 or more",
    "run digits --out o.safetensors --partitions 2000": "partitions=2000: a model is split over 2 to 1024",
    "run digits --out o.safetensors --split stages": "--split stages: says how replicas are split, and they are whole",
    "nowhere digits --out o.safetensors --partitions 2": "nowhere is not a run folder: there is no such folder",
    "run digits --out o.safetensors --device gpu": "--device gpu: is cpu, cuda or cuda:N",
    "run digits --out o.safetensors --replica 2": "has no option --replica; did you mean --replicas?",
    "nowhere digits --out o.safetensors": "nowhere is not a run folder: there is no such folder",
}


def test_a_wrong_word_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, says in REFUSED.items():
        assert main.run(["predict", *words.split()]) == 2
        assert says in capfd.readouterr().err
        assert not list(tmp_path.iterdir())
