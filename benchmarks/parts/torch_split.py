"""Torch's ways of splitting a sequence of modules over two gloo processes: pipelines, and distributed tensors."""

from __future__ import annotations

import statistics
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.parts.loops import Workload, race, sgd, warm_and_run
from benchmarks.parts.partitions import PARTITIONS, How
from benchmarks.parts.peers import Peers
from distbelief.core.effects import Batch, Computed
from distbelief.core.settings import Settings
from distbelief.strategies.partition import split_graph
from distbelief.tasks import Task, as_data, resolve
from distbelief.tasks.order import Order
from distbelief.tasks.worker import Trainer, build_model

GPIPE, ONE_F_ONE_B = "GPipe", "1F1B"


def pipeline(workload: Workload, schedule: str, microbatches: int) -> float:
    """Return the samples per second of torch's pipeline, with the same stages as our split."""
    return _race(workload, _stage, schedule, microbatches)


def tensors(workload: Workload) -> float:
    """Return the samples per second of linear layers split by columns and rows in turn, as with our `neurons`."""
    return _race(workload, _columns_and_rows)


def _race(workload: Workload, play: Callable[..., None], *how: object) -> float:
    with Peers() as peers, tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        store = str(Path(folder) / "store")
        started = [peers.start("torch", 1, play, workload, store, rank, *how) for rank in range(PARTITIONS)]
        return statistics.fmean(race(started))


def _meet(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PARTITIONS)


class _Stage:
    """Trainer of one stage's part of each step."""

    def __init__(
        self, own: nn.Module, task: Task, workload: Workload, rank: int, schedule: str, microbatches: int
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        kind = {GPIPE: ScheduleGPipe, ONE_F_ONE_B: Schedule1F1B}[schedule]
        self._made = kind(PipelineStage(own, rank, PARTITIONS, torch.device("cpu")), microbatches, task.loss)
        self._own, self._data, self._first = own, as_data(task.train()), rank == 0
        self.order = Order(len(self._data), workload.batch_size, 0)

    def compute(self, batch: Batch) -> Computed:
        self._own.zero_grad()
        numbers = self.order.indices(batch.epoch, batch.index)
        inputs, targets = self._data.batch(numbers)
        if self._first:
            self._made.step(inputs, return_outputs=False)
        else:
            self._made.step(target=targets, losses=[], return_outputs=False)
        return Computed(None, len(numbers), 0.0)


def _stage(connection: Connection, workload: Workload, store: str, rank: int, schedule: str, microbatches: int) -> None:
    _meet(store, rank)
    task = resolve(workload.task)
    model = build_model(task, 0, "cpu")
    pieces = split_graph(task, model, How("stages").settings(workload.batch_size)).pieces
    at = {name.partition(".")[0]: held[0].partition for name, held in pieces.items()}
    modules = list(model.named_children())
    cut = next(number for number, (name, _) in enumerate(modules) if at.get(name) == 1)
    own = nn.Sequential(OrderedDict(modules[cut:] if rank else modules[:cut]))
    made = _Stage(own, task, workload, rank, schedule, microbatches)
    warm_and_run(connection, workload, made, sgd(own, workload.lr))


def _columns_and_rows(connection: Connection, workload: Workload, store: str, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _meet(store, rank)
    task = resolve(workload.task)
    model = build_model(task, 0, "cpu")
    first, second, *_ = (name for name, one in model.named_children() if isinstance(one, nn.Linear))
    plan = {first: ColwiseParallel(), second: RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (PARTITIONS,)), plan)

    @torch.no_grad()
    def step() -> None:  # on each rank's local part: an optimizer would lose time with distributed tensors
        for parameter in model.parameters():
            _own(parameter).add_(_own(parameter.grad), alpha=-workload.lr)

    warm_and_run(connection, workload, Trainer(task, model, Settings(batch_size=workload.batch_size)), step)


def _own(tensor: Any) -> torch.Tensor:
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own
