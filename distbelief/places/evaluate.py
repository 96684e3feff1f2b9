"""Measures the model that a run left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distbelief.core.values import admit, device_number, shown
from distbelief.errors import CheckpointError, DataError, UsageError
from distbelief.record.folder import RunFolder
from distbelief.record.restore import load_weights
from distbelief.tasks import as_data, available, resolve
from distbelief.tasks.flat import layout_of
from distbelief.tasks.worker import build_model, measure


def evaluate(run: str | Path, data_dir: str | None = None, device: str = "cpu") -> dict[str, Any]:
    """Accuracy and loss of a run's `model.safetensors` on its task's test set.

    Args:
        run: the run folder.
        data_dir: folder of the data; None for the one that the run was given.
        device: where to compute.

    Returns:
        run, task, samples, test_accuracy (0 to 1) and test_loss.

    Raises:
        UsageError: no such run, or its task has no name or no test set.
        CheckpointError: the run has no model yet, or another one.
        DataError: the data cannot be had.
    """
    folder = RunFolder.open(admit(run, str | os.PathLike, f"evaluate({shown(run)})"))
    admit(data_dir, str | os.PathLike | None, f"evaluate(data_dir={shown(data_dir)})")
    device_number(admit(device, str, f"evaluate(device={shown(device)})"))
    job = folder.read_job()
    reference, options = str(job.get("task")), job.get("options") or {}
    data_dir = data_dir or options.get("data_dir")
    if reference == "script":
        raise UsageError(
            f"{run} trained the model of a script, which has no name here; load {folder.model} into it and measure it "
            "there"
        )
    if not folder.model.is_file():
        raise CheckpointError(
            f"{run} has no {folder.model.name}: it was ended before its first checkpoint; train it on with --out "
            f"{run} --resume"
        )
    if why := available(reference, data_dir):
        raise DataError(why)
    task = resolve(reference, data_dir)
    model = build_model(task, int(job.get("seed", 0)), device)
    model.load_state_dict(load_weights(folder.model, layout_of(model)))
    measured = measure(task, model)
    assert task.test is not None
    return {
        "run": str(run),
        "task": reference,
        "samples": len(as_data(task.test())),
        "test_accuracy": measured.accuracy,
        "test_loss": measured.loss,
    }
