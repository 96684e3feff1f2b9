"""Every option of the plain loop does something; and what it leaves, a job with shards goes on with, and the other way round."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distbelief.cluster.single import SingleLoop
from distbelief.core import records
from distbelief.core.records import Record
from distbelief.core.settings import optim
from distbelief.job import Job
from distbelief.strategy import Single
from distbelief.tasks.worker import build_model


def play(plain: SimpleNamespace, out: str = "", **options: Any) -> tuple[list[Record], torch.Tensor]:
    """The records of a loop, and the parameters at its end."""
    strategy = Single(optimizer=options.pop("optimizer", optim("sgd")))
    job = Job(**{"task": plain.classes(plain.mlp, samples=40), "strategy": strategy, "batch_size": 4, **options})
    told: list[Record] = []
    model = build_model(job.task, 0, "cpu")
    SingleLoop(job.task, model, job.settings(), told.append, lambda: None, out).run()
    return told, torch.cat([value.flatten() for value in model.state_dict().values()])


CHANGES: list[dict[str, Any]] = [
    {"optimizer": optim("adam")}, {"optimizer": optim("sgd", lr=0.01)}, {"optimizer": optim("sgd", weight_decay=0.5)},
    {"epochs": 2}, {"batch_size": 5}, {"lr_schedule": "linear"}, {"clip_norm": 0.1}, {"seed": 1},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_an_option_of_training_changes_what_is_trained(plain: SimpleNamespace, change: dict[str, Any]) -> None:
    assert not torch.equal(play(plain, **change)[1], play(plain)[1])


@pytest.mark.parametrize("batch_size", [4, 5, 40])
def test_a_step_is_of_so_many_samples(plain: SimpleNamespace, batch_size: int) -> None:
    [stepped] = [record for record in play(plain, batch_size=batch_size)[0] if isinstance(record, records.Stepped)]
    assert (stepped.steps, stepped.samples) == (40 // batch_size, 40)


@pytest.mark.parametrize("target", [0.0, 1e-9])
def test_evaluate_every_and_target_accuracy(plain: SimpleNamespace, target: float) -> None:
    def tested(**options: Any) -> list[int]:
        return [record.epoch for record in play(plain, target_accuracy=target, **options)[0] if isinstance(record, records.Tested)]

    assert tested(epochs=4) == ([1] if target else [1, 2, 3, 4])
    assert tested(epochs=4, evaluate_every=2) == ([2] if target else [2, 4])
    assert tested(epochs=4, evaluate_every=3) == ([3] if target else [3, 4])
    if not target:
        assert tested(epochs=4, evaluate_every=0) == []


@pytest.mark.parametrize(("every", "count"), [(1, 4), (2, 2), (0, 1)])
@pytest.mark.parametrize("keep", [1, 3])
def test_checkpoint_every_and_keep_checkpoints(plain: SimpleNamespace, tmp_path: Path, every: int, count: int, keep: int) -> None:
    told, _ = play(plain, str(tmp_path), epochs=4, checkpoint_every=every, keep_checkpoints=keep)
    assert sum(isinstance(record, records.Checkpointed) for record in told) == count
    assert len(list((tmp_path / "checkpoints").iterdir())) == min(count, keep)
