"""Jobs of split replicas that hold their parameters themselves: small models, and what is held at the end."""

from __future__ import annotations

from typing import Any

import torch
from oracles import classes
from torch import nn
from watching.observed import Observed, mapping_of

from distbelief.core import records, roles
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Allreduce, Single
from distbelief.tasks import Task
from distbelief.tasks.task import TensorData

SAMPLES, WIDTH = 43, 27


def smooth() -> nn.Module:
    """An MLP without chance, of three layers."""
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def normed() -> nn.Module:
    """One whose second half has a batch norm."""
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))


def play(strategy: Allreduce | Single, cluster: Simulated | None = None, **job: Any) -> Observed:
    dtype, model = job.pop("dtype", torch.float32), job.pop("model", smooth)
    task = classes(lambda: model().to(dtype), samples=SAMPLES, dtype=dtype)
    given = {"task": task, "batch_size": 4, "evaluate_every": 0, "checkpoint_every": 0, **job}
    return Observed(Job(strategy=strategy, **given), cluster)


def weights(run: Observed, replica: int = 0) -> dict[str, torch.Tensor]:
    """A replica's tensors, put together from the pieces that its partitions hold."""
    plan: Any = run.simulation.coordinator.plan
    vector = torch.zeros(plan.layout.total, dtype=torch.uint8)
    players: dict[str, Any] = {role: part.player for role, part in run.simulation.parts.items()}
    for role in (role for role in players if roles.is_replica(role) and roles.index_of(role) == replica):
        held = plan.layout.held(roles.partition_of(role))
        values = players[role].whole.values(held.start, held.stop)
        vector[held.start : held.stop] = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    return _entries(run, vector)


class Scale(nn.Module):
    """Multiplies each feature by a factor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def marked() -> Task:
    """Each sample is a feature: the gradient of an update says at both stages which samples are in it."""
    data = TensorData(torch.eye(WIDTH), torch.zeros(WIDTH))
    return Task(
        model=lambda: nn.Sequential(Scale(), Scale()), train=lambda: data, loss=lambda out, _: out.sum() / len(out)
    )


def state_of(run: Observed) -> dict[str, torch.Tensor]:
    """The server's state dict, or that of a replica at the end where there is none; in the order of the module."""
    if run.simulation.memory is not None:
        return _entries(run, mapping_of(run.simulation))
    if not run.simulation.shards:
        last = next(record.role for record in run.records if isinstance(record, records.Gone) and not record.died)
        return weights(run, roles.index_of(last))
    plan: Any = run.simulation.coordinator.plan
    vector = torch.zeros(plan.layout.total, dtype=torch.uint8)
    for shard, own in zip(run.simulation.shards, plan.assignments, strict=True):
        vector[own.moving.start : own.moving.stop] = shard.held.moving()
        vector[own.frozen.start : own.frozen.stop] = shard.held.frozen()
    return _entries(run, vector)


def vector_of(run: Observed) -> torch.Tensor:
    """The server's parameters, one behind the other in the order of the module."""
    return torch.cat([value.reshape(-1) for value in state_of(run).values()])


def _entries(run: Observed, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors by name, put together from the pieces that a flat vector holds."""
    layout, found = run.simulation.coordinator.plan.layout, dict[str, torch.Tensor]()  # type: ignore[union-attr]  # a job that has begun
    for e in layout.entries:
        dtype = getattr(torch, e.tensor.dtype)
        whole = found.setdefault(e.tensor.name, torch.zeros(e.tensor.shape, dtype=dtype))
        part = whole.narrow(e.piece.dimension, e.piece.start, e.piece.stop - e.piece.start) if e.shape else whole
        part.copy_(vector[e.start : e.stop].view(dtype).view(e.shape))
    return found
