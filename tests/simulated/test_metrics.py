"""What a task is measured by: one metric, several by name, or its loss alone, under every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distbelief as db
from distbelief.errors import UsageError
from distbelief.record.live import summary

STRATEGIES: list[Any] = [db.Downpour(), db.Sandblaster(iterations=2), db.Allreduce(), db.Hogwild(), db.Single()]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.arange(40.0).view(20, 2) / 40
    return inputs, inputs.sum(1, keepdim=True)


def result(strategy: Any, metric: Any, out: Path | None = None, **options: Any) -> dict[str, Any]:
    task = db.Task(model=lambda: nn.Linear(2, 1), train=data, test=data, loss=nn.functional.mse_loss, metric=metric)
    return db.run(db.Job(task, strategy, out=out, **options), on="simulated")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_task_without_a_metric_is_told_by_its_loss(strategy: Any, tmp_path: Path) -> None:
    told = result(strategy, None, tmp_path / "run")
    assert (told["test_accuracy"], told["test_metrics"]) == (None, {})
    assert told["test_loss"] > 0
    assert [row["test_loss"] for row in told["history"] if row["test_loss"] is not None][-1] == told["test_loss"]
    assert f"loss        {told['test_loss']:.4f}" in summary(told)
    everything = [summary(told), *(path.read_text() for path in (tmp_path / "run").glob("metrics.jsonl"))]
    assert not any("accuracy " in text for text in everything)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_metrics_by_name_are_told_by_name(strategy: Any, tmp_path: Path) -> None:
    metrics = {"targets": lambda _, target: target.sum(), "accuracy": lambda _, target: (target > 1).sum()}
    told = result(strategy, metrics, tmp_path / "run")
    right = data()[1]
    assert told["test_accuracy"] == float((right > 1).float().mean())
    assert told["test_metrics"] == {"targets": pytest.approx(float(right.mean()), rel=1e-6)}
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test_metrics"] == told["test_metrics"]
    assert f"targets {float(right.mean()):.4f}" in summary(told)


def test_a_target_that_the_task_has_no_accuracy_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--target-accuracy 0.9: .* has no accuracy to reach it"):
        result(db.Downpour(), None, target_accuracy=0.9)
