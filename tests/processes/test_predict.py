"""Predictions: what they write is what the models answer, in order, whoever computed it and whoever died meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy
import predicted
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import distbelief as db
from distbelief.cli import main
from distbelief.errors import DataError, DistbeliefError, JobFailed, UsageError
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
    "": "write which runs, and what they are to predict, first",
    "run": "write which runs, and what they are to predict, first",
    "run mnits --out o.safetensors": "unknown task 'mnits'; did you mean 'mnist'?",
    "run digits": "where to? Name the file",
    "run digits --out outputs.csv": "outputs are written as safetensors: name it outputs.safetensors",
    "run digits --out nowhere/o.safetensors": "there is no folder nowhere",
    "run digits --out o.safetensors --replicas 0": "--replicas 0: must be 1 or more",
    "run digits --out o.safetensors --batch-size 0": "--batch-size 0: must be 1 or more",
    "run digits --out o.safetensors --partitions 2": "--partitions 2: a process of a prediction holds whole models",
    "run digits --out o.safetensors --device gpu": "--device gpu: is cpu, cuda or cuda:N",
    "run digits --out o.safetensors --replica 2": "has no option --replica; did you mean --replicas?",
    "nowhere digits --out o.safetensors": "nowhere is not a run folder: there is no such folder",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_word_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["predict", *words.split()]) == 2
    assert REFUSED[words] in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
