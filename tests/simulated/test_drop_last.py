"""A last minibatch that is smaller: what `drop_last` leaves out, and a batch norm that cannot do without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import classes, minibatches, mlp
from safetensors.torch import load_file
from torch import nn

import distbelief as db
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.tasks.worker import Trainer

SAMPLES, BATCH, EPOCHS, LR = 22, 4, 3, 0.05
SGD = db.optim("sgd", lr=LR)
ALONE: list[Any] = [
    db.Downpour(1, 2, SGD), db.Synchronous(1, 2, SGD), db.Softsync(1, 1, SGD), db.Bounded(1, 1, SGD), db.Allreduce(1,
        SGD), db.Hogwild(1, SGD),
    db.Single(SGD),
]  # fmt: skip
SEVERAL: list[Any] = [
    db.Downpour(3, 2),
    db.Synchronous(3, 2),
    db.Bounded(3, 2),
    db.Allreduce(3),
    db.Hogwild(3),
    db.Locking(3),
]


def named(strategy: Any) -> str:
    return str(strategy.name)


def run(task: db.Task, strategy: Any, phantom: bool = False, **options: Any) -> dict[str, Any]:
    job = db.Job(task, strategy, **{"batch_size": BATCH, "epochs": EPOCHS, **options})
    return db.run(job, on=db.Simulated(phantom=phantom))


def plain_loop(task: db.Task, order: list[tuple[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Plain SGD over minibatches; those that are not whole are passed over."""
    torch.manual_seed(0)
    model, data = task.model(), task.train()
    for key, numbers in order:
        if len(numbers) == BATCH:
            torch.manual_seed(key)
            inputs, targets = data.batch(numbers)  # type: ignore[union-attr]
            gradients = torch.autograd.grad(task.loss(model(inputs), targets), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= LR * gradient
    return model.state_dict()


@pytest.mark.parametrize("strategy", ALONE, ids=named)
def test_one_replica_is_sgd_without_the_short_minibatch(tmp_path: Path, strategy: Any) -> None:
    task = classes(mlp, samples=SAMPLES)
    result = run(task, strategy, drop_last=True, evaluate_every=0, out=tmp_path / "run")
    order = list(minibatches(SAMPLES, BATCH, EPOCHS, 0))
    assert {len(numbers) for _, numbers in order} == {4, 2}
    for name, value in plain_loop(task, order).items():
        torch.testing.assert_close(load_file(tmp_path / "run" / "model.safetensors")[name], value, rtol=1e-5, atol=1e-7)
    assert (result["samples"], result["steps"], result["outcome"]) == (EPOCHS * 20, EPOCHS * 5, "done")


@pytest.mark.parametrize("phantom", [False, True])
@pytest.mark.parametrize("strategy", SEVERAL, ids=named)
def test_what_is_left_out_is_not_counted(strategy: Any, phantom: bool) -> None:
    task, usual = classes(mlp, samples=SAMPLES), {} if phantom else {"evaluate_every": 0}
    dropped = run(task, strategy, phantom, drop_last=True, **usual)
    assert (dropped["samples"], dropped["steps"]) == (EPOCHS * 20, EPOCHS * 5)
    whole = run(task, strategy, phantom, **usual)
    assert (whole["samples"], whole["steps"]) == (EPOCHS * 22, EPOCHS * 6)


def test_less_than_one_minibatch_is_refused() -> None:
    for strategy in (db.Downpour(), db.Allreduce(), db.Hogwild(), db.Single()):
        with pytest.raises(
            UsageError, match=r"--drop-last: the 3 training samples do not fill one minibatch of 4: lower --batch-size"
        ):
            run(classes(mlp, samples=3), strategy, drop_last=True)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))


class Convolved(nn.Module):
    """One whose batch norm has many values of a channel in one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs[:, None])  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", [db.Downpour(), db.Allreduce(), db.Hogwild(), db.Single()], ids=named)
def test_batch_norm_and_a_last_minibatch_of_one_sample(strategy: Any) -> None:
    said = (
        r"the last minibatch of an epoch has one sample \(21 samples in minibatches of 4\), which the model's batch "
        r"norm cannot normalise"
    )
    with pytest.raises(UsageError, match=said + ": leave it out with --drop-last, or choose another --batch-size"):
        run(classes(normed, samples=21), strategy)
    assert run(classes(normed, samples=21), strategy, drop_last=True)["samples"] == EPOCHS * 20
    assert run(classes(normed, samples=22), strategy)["samples"] == EPOCHS * 22
    assert run(classes(Convolved, samples=21), strategy)["samples"] == EPOCHS * 21


def test_trying_one_sample_leaves_the_statistics_alone() -> None:
    model = Convolved()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Trainer(classes(Convolved, samples=21), model, Settings(batch_size=BATCH))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
