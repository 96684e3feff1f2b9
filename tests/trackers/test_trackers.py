"""Jobs that MLflow, Weights & Biases and Aim follow: one run for a job and its resumption, with the real packages.

They need these packages, and are a goal of their own: make test-trackers. Nothing here needs a network.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distbelief.record.curves import CurveWriter
from distbelief.record.sinks import ShownRun

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
TAGS = {"train/loss", "samples_per_second", "test/loss", "test/accuracy", "staleness/mean"}


def train(folder: Path, track: str, epochs: int, *words: str, **environment: str) -> dict[str, Any]:
    """Train in a folder, followed by a tool; return the result."""
    command = [sys.executable, "-m", "distbelief", "train", "digits", "downpour", "--replicas", "2", "--json"]
    done = subprocess.run(
        [*command, "--epochs", str(epochs), "--out", "run", "--track", track, *words],
        cwd=folder, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "cannot be written" not in done.stderr, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.timeout(600)
def test_mlflow_has_one_run_of_a_job_and_its_resumption(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'store.db'}"
    for epochs, more in ((2, ()), (4, ("--resume",))):
        result = train(tmp_path, f"mlflow:{uri}", epochs, *more)
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("distbelief")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"
        assert run.data.metrics.keys() >= TAGS
        assert run.data.metrics["test_accuracy"] == result["test_accuracy"]
        curve = client.get_metric_history(run.info.run_id, "test/accuracy")
        assert [(point.step, point.value) for point in curve] == [
            (row["samples"], row["test_accuracy"]) for row in result["history"]
        ]
    assert (run.data.params["strategy"], run.data.params["replicas"], run.data.params["epochs"]) == (
        "downpour",
        "2",
        "2",
    )
    assert run.data.tags["outcome"] == "done"
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {"result.json", "model.safetensors"}
    downloaded = Path(client.download_artifacts(run.info.run_id, "model.safetensors", str(tmp_path)))
    assert downloaded.read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()


def wandb_records(path: Path) -> Iterator[Any]:
    """What Weights & Biases wrote to a file: blocks of 32 KiB, each part with its checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.timeout(600)
def test_wandb_has_one_run_of_a_job_and_its_resumption(tmp_path: Path) -> None:
    for epochs, more in ((2, ()), (4, ("--resume",))):
        result = train(tmp_path, "wandb", epochs, *more, WANDB_MODE="offline")
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(kept) == 2
    assert len({path.name for path in kept}) == 1, "both attempts are of one run"
    written = [record for path in kept for record in wandb_records(path)]
    rows = [{one.nested_key[0]: json.loads(one.value_json) for one in row.history.item} for row in written]
    assert set().union(*rows) >= TAGS | {"samples"}
    measured = [(row["samples"], row["test/accuracy"]) for row in rows if "test/accuracy" in row]
    assert measured == [(row["samples"], row["test_accuracy"]) for row in result["history"]]
    config = {one.key: json.loads(one.value_json) for record in written for one in record.run.config.update}
    assert (config["strategy"], config["replicas"], config["epochs"]) == ("downpour", 2, 4)
    summary = {one.key: one.value_json for record in written for one in record.summary.update}
    assert (summary["outcome"], float(summary["test_accuracy"])) == ('"done"', result["test_accuracy"])
    models = [record.artifact for record in written if record.HasField("artifact")]
    assert [entry.path for model in models for entry in model.manifest.contents] == ["model.safetensors"] * 2


@pytest.mark.timeout(600)
def test_aim_has_one_run_of_a_job_and_its_resumption(tmp_path: Path) -> None:
    import aim

    (tmp_path / "repository").mkdir()
    for epochs, more in ((2, ()), (4, ("--resume",))):
        result = train(tmp_path, "aim:repository", epochs, *more)
    (name,) = aim.Repo(str(tmp_path / "repository")).list_all_runs()
    run = aim.Run(name, repo=str(tmp_path / "repository"), system_tracking_interval=None, capture_terminal_logs=False)
    assert run["parameters"]["strategy"] == "downpour"
    assert (run["result"]["outcome"], run["result"]["samples"]) == ("done", result["samples"])
    curves = {metric.name: metric.dataframe() for metric in run.metrics()}
    assert curves.keys() >= TAGS
    measured = [*zip(curves["test/accuracy"]["step"], curves["test/accuracy"]["value"], strict=True)]
    assert measured == [(row["samples"], row["test_accuracy"]) for row in result["history"]]
    (model,) = run.artifacts.values()
    assert Path(model.uri.removeprefix("file://")).read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()
    run.close()


@pytest.mark.timeout(600)
def test_a_store_without_the_run_that_the_folder_names_gets_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    from distbelief.integrations.aim import AimRun
    from distbelief.integrations.mlflow import MlflowRun

    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    run, uri = ShownRun(tmp_path, {}, print, told.append), "sqlite:///store.db"
    writers: dict[str, Callable[[], CurveWriter]] = {
        f"mlflow:{uri}": lambda: MlflowRun(run, uri),
        "aim:repository": lambda: AimRun(run, "repository"),
    }
    for tool, make in writers.items():
        kept = tmp_path / f"{tool.partition(':')[0]}.id"
        kept.write_text(f"{tool}\n{24 * '0'}")
        writer = make()
        writer.open()
        writer.write([("train/loss", 2.5, 10, 1000.0)], 0)
        writer.close({"outcome": "done", "reason": "", "samples": 10})
        assert (
            told.pop() == f"{kept} names run {24 * '0'}, which {kept.stem} does not have any longer: another one begins"
        )
        assert kept.read_text().startswith(f"{tool}\n")
        assert 24 * "0" not in kept.read_text()
    MlflowRun(run, uri).open()
    assert not told, "the store knows the other run"
    gone = (tmp_path / "mlflow.id").read_text().split()[1]
    MlflowClient(uri).delete_run(gone)
    MlflowRun(run, uri).open()
    assert told == [
        f"{tmp_path / 'mlflow.id'} names run {gone}, which mlflow does not have any longer: another one begins"
    ]


def test_wandb_without_a_login_is_refused_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distbelief", "train", "digits", "downpour", "--track", "wandb"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--track wandb: nobody is logged in to Weights & Biases here: run wandb login, or set" in done.stderr
    assert not (tmp_path / "runs").exists()
