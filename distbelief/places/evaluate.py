"""Evaluation of the model of a run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from distbelief.codecs.file import ModelFile, read
from distbelief.core.effects import Measured
from distbelief.core.records import Json
from distbelief.core.values import admit, device_number, shown
from distbelief.errors import CheckpointError, DataError, UsageError
from distbelief.record.folder import RunFolder
from distbelief.record.limits import cores
from distbelief.record.restore import load_weights
from distbelief.tasks import Task, as_data, available, resolve
from distbelief.tasks.constrained import fill
from distbelief.tasks.flat import layout_of
from distbelief.tasks.inference import held_bytes, lean, task_of
from distbelief.tasks.worker import build_model, measure


def evaluate(
    run: str | Path,
    data_dir: str | None = None,
    device: str = "cpu",
    task: str | None = None,
    inference: str = "float32",
) -> Json:
    """Return the accuracy and loss of a run's `model.safetensors`, or of a compressed file, on its task's test set.

    Args:
        run: the run folder, or the compressed file.
        data_dir: the folder of the data; None for the folder that the run used.
        device: the device to compute on.
        task: the task of a compressed file, if it is not a built-in one.
        inference: float32, int8 or, for a compressed file, ids; as for `distbelief.load`.

    Returns:
        run (or file), task, samples, test_accuracy (0 to 1; None where the task has none), test_metrics (the other
        metrics by name), test_loss, inference, model_bytes (of all its tensors in memory) and seconds (of the
        evaluation).

    Raises:
        UsageError: there is no such run, or its task has no name or no test set; or a file's task is not built in, and
            none is named.
        LayoutError: the task's model does not fit the file.
        CheckpointError: the run has no model yet, or another task's.
        DataError: the data are not available, or the file is truncated, foreign or corrupt.
    """
    path = Path(admit(run, str | os.PathLike, f"evaluate({shown(run)})"))
    admit(task, str | None, f"evaluate(task={shown(task)})")
    admit(data_dir, str | os.PathLike | None, f"evaluate(data_dir={shown(data_dir)})")
    device_number(admit(device, str, f"evaluate(device={shown(device)})"))
    if task and not path.is_file():
        RunFolder.open(path)
        raise UsageError(f"--task {task}: is for a compressed file; a run knows its own task: leave it off")
    admit(inference, str, f"evaluate(inference={shown(inference)})")
    found, model = trained(path, data_dir, device, task, inference=inference)
    if why := available(found.reference, found.data_dir):
        raise DataError(why)
    begun = time.perf_counter()
    with threads(min(cores(), torch.get_num_threads())):
        measured = measure(found, model)
    seconds = time.perf_counter() - begun
    assert found.test is not None
    return {
        "file" if path.is_file() else "run": str(path if path.is_file() else run),
        "task": found.reference,
        "samples": len(as_data(found.test())),
        **figures_of(measured),
        "inference": inference,
        "model_bytes": held_bytes(model),
        "seconds": seconds,
    }


class TrainedModel(NamedTuple):
    """Trained model that is not built yet."""

    task: Task
    seed: int
    values: Path | ModelFile
    """File of its values: safetensors, or compressed."""


def find(path: Path, data_dir: str | None = None, task: str | None = None) -> TrainedModel:
    """Return the model of a run folder, or of a compressed file.

    Args:
        path: the run folder, or the file.
        data_dir: the folder of the data; None for the folder that the run used.
        task: the task that builds the model, if the run does not name its task, or the file's is not built in.

    Raises:
        UsageError, CheckpointError, DataError: as in `evaluate`.
    """
    if path.is_file():
        file = read(path)
        return TrainedModel(task_of(file, task, data_dir), 0, file)
    folder = RunFolder.open(path)
    job = folder.read_job()
    reference, options = str(job.get("task")), job.get("options") or {}
    if reference == "script":
        if not task:
            raise UsageError(
                f"{path} trained the model of a script, which has no name here; load {folder.model} into it and "
                "measure it there"
            )
        reference, options = task, {}
    if not folder.model.is_file():
        raise CheckpointError(
            f"{path} has no {folder.model.name}: it ended before its first checkpoint; continue it with --out "
            f"{path} --resume"
        )
    return TrainedModel(resolve(reference, data_dir or options.get("data_dir")), int(job.get("seed", 0)), folder.model)


def trained(
    path: Path,
    data_dir: str | None = None,
    device: str = "cpu",
    task: str | None = None,
    index: int = 0,
    inference: str = "float32",
) -> tuple[Task, nn.Module]:
    """Return the task and the model of a run folder, or of a compressed file.

    `path`, `data_dir` and `task` are as for `find`. The model is on `device`, as replica `index` of one machine has it.
    `inference` is float32, int8 or ids.

    Raises:
        UsageError, LayoutError, CheckpointError, DataError: as in `evaluate`.
    """
    found, seed, values = find(path, data_dir, task)
    model = build_model(found, seed, device, index)
    if isinstance(values, ModelFile):
        return found, lean(fill(model, values), inference, values)
    model.load_state_dict(load_weights(values, layout_of(model)))
    return found, lean(model, inference)


def figures_of(measured: Measured) -> Json:
    """Return the test results, under the names that `evaluate` and `predict` use."""
    return {"test_accuracy": measured.accuracy, "test_metrics": measured.metrics, "test_loss": measured.loss}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads with which torch computes; with one, it computes as replicas do."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
