"""Workloads of benchmarks: models of `tasks` on part of their data, large models, and runs of jobs."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import torch
from torch import nn

from distbelief.core.records import Json
from distbelief.job import Job
from distbelief.lab.plan.pricing import Counted
from distbelief.places.processes.local import Local
from distbelief.strategies import Strategy
from distbelief.tasks import Task, TensorData, resolve

SHORT = 12_800
"""Samples of MNIST in a round of a slow model: 200 minibatches of 64."""
QUICK = 1_280
WIDE = 4096
"""Width of the large model: 64 MB of parameters."""


def run(task: str, strategy: Strategy, place: Local | None = None, **options: Any) -> Json:
    """Run a job that only trains, and keep only its result."""
    rare: dict[str, Any] = {"evaluate_every": 0, "checkpoint_every": 0, "snapshot_every": "0"}
    with tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        return (place or Local()).run(Job(task, strategy, **rare, **options, out=f"{folder}/run"))


def rate(task: str, strategy: Strategy, place: Local | None = None, **options: Any) -> float:
    """Return the samples per second of a job's training, from its first dealt minibatch to its last reported step."""
    return float(run(task, strategy, place, **options)["samples_per_second"])


def lenet_short() -> Task:
    """Make the task of LeNet on `SHORT` samples."""
    return _part("mnist-lenet", SHORT)


def lenet_quick() -> Task:
    """Make the task of LeNet on `QUICK` samples of noise, which needs no files."""
    return _noisy("mnist-lenet", (1, 28, 28))


def mlp_quick() -> Task:
    """Make the task of the MLP on `QUICK` samples of noise, which needs no files."""
    return _noisy("mnist", (784,))


def _part(name: str, samples: int) -> Task:
    """Make a task with the first samples of its training set."""
    whole = resolve(name)

    def train() -> TensorData:
        data = whole.train()
        assert isinstance(data, TensorData)
        return TensorData(data.inputs[:samples], data.targets[:samples], data.prepare)

    return dataclasses.replace(whole, train=train)


def _noisy(name: str, shape: tuple[int, ...]) -> Task:
    chance = torch.Generator().manual_seed(0)
    data = TensorData(torch.rand(QUICK, *shape, generator=chance), torch.randint(0, 10, (QUICK,), generator=chance))
    return dataclasses.replace(resolve(name), train=lambda: data, test=lambda: data)


def mlp_wide() -> Task:
    """Make the task of an MLP 784-2048-2048-10 on MNIST."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))

    return dataclasses.replace(resolve("mnist"), model=model)


def mlp_wide_short() -> Task:
    """Make the task of the wide MLP on `SHORT` samples."""
    return _part(f"{__name__}:mlp_wide", SHORT)


def layer(width: int) -> Task:
    """Make the task of one layer, on few and small data."""
    data = TensorData(torch.full((64, width), 0.01), torch.zeros(64, dtype=torch.int64))
    return Task(model=lambda: nn.Linear(width, width, bias=False), train=lambda: data)


def wide() -> Task:
    """Make the task of one layer of 64 MB."""
    return layer(WIDE)


def million() -> Task:
    """Make the task of one layer of a million parameters."""
    return layer(1024)


def narrow() -> Task:
    """Make the task of one layer of 64 kB."""
    return layer(128)


def counted(samples: int) -> Task:
    """Make the task of the MLP on samples whose values do not matter."""
    return dataclasses.replace(resolve("mnist"), train=lambda: Counted(samples))
