"""Training loops of plain PyTorch, each in processes of its own: independent ones, ones in lockstep, DDP over gloo, and
lock-free Hogwild.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from distbelief.core.effects import Batch, Computed
from distbelief.core.optimizer import Optimizer
from distbelief.integrations.hook import Reduce, comm_hook
from distbelief.places.processes.peers import Peer, Peers, lend, map_memory
from distbelief.server import optimizers
from distbelief.tasks import resolve
from distbelief.tasks.order import Order
from distbelief.tasks.worker import Trainer, build_model

WARM = 5
"""Steps before the clock starts."""


class Workload(NamedTuple):
    """What one process of a loop does."""

    task: str
    steps: int
    batch_size: int
    lr: float
    device: str = "cpu"
    """Where loops that are independent compute, and homes of a split model, in turn."""


class Trains(Protocol):
    """Who computes gradients of minibatches."""

    @property
    def order(self) -> Order:
        """Of the minibatches."""
        ...

    def compute(self, batch: Batch) -> Computed:
        """The gradient of one, or a part of it."""
        ...


def independent(workload: Workload, processes: int, threads: int = 1) -> float:
    """Samples per second of so many plain loops side by side that know nothing of each other: the sum of their
    rates.
    """
    with Peers() as peers:
        return sum(race([peers.start("loop", threads, _alone, workload) for _ in range(processes)]))


def lockstep(workload: Workload, processes: int) -> float:
    """As `independent`, but nobody begins a step before all have ended the one before: what waiting alone costs,
    without a byte sent.
    """
    with Peers() as peers, lend(8 * processes) as memory:
        return sum(
            race(
                [peers.start("lockstep", 1, _in_step, workload, os.getpid(), memory, rank) for rank in range(processes)]
            )
        )


def ddp(workload: Workload, processes: int, algorithm: str = "") -> float:
    """Samples per second of `DistributedDataParallel` over gloo, or with our hook by an algorithm; each process takes
    its own minibatches.
    """
    with Peers() as peers, tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        store = str(Path(folder) / "store")
        return sum(
            race(
                [peers.start("ddp", 1, _ddp, workload, store, rank, processes, algorithm) for rank in range(processes)]
            )
        )


def hogwild(workload: Workload, processes: int) -> float:
    """Samples per second of processes that step parameters which they share, without a lock."""
    with Peers() as peers, lend(sum(p.numel() * 4 for p in resolve(workload.task).model().parameters())) as memory:
        return sum(
            race(
                [peers.start("hogwild", 1, _hogwild, workload, os.getpid(), memory, rank) for rank in range(processes)]
            )
        )


def race(peers: list[Peer]) -> list[float]:
    """Start all at once when all are ready; returns the samples per second of each."""
    for peer in peers:
        peer.hear()
    for peer in peers:
        peer.say()
    rates = [float(peer.hear()) for peer in peers]
    for peer in peers:
        peer.say()
    return rates


def warm_and_run(
    connection: Connection, workload: Workload, trainer: Trains, step: Callable[[], object], rank: int = 0
) -> None:
    """Warm up, wait for the word, and tell the samples per second. What a device has left to do of the last step is not
    waited for, and that of the last to warm up is: of many steps, it is one.
    """

    def steps(first: int, count: int) -> int:
        samples = 0
        for number in range(first, first + count):
            epoch, index = divmod(rank * workload.steps + number, trainer.order.batches)
            samples += trainer.compute(Batch(epoch, index)).samples
            step()
        return samples

    steps(0, WARM)
    connection.send_bytes(b"ready")
    connection.recv_bytes()
    start = time.perf_counter()
    samples = steps(0, workload.steps)
    connection.send_bytes(str(samples / (time.perf_counter() - start)).encode())
    connection.recv_bytes()  # nobody leaves before all are done: a group ends with its first member


def sgd(model: nn.Module, lr: float) -> Callable[[], object]:
    """As the strategy `single` steps."""
    step = optimizers.stepper(
        optimizers.build(Optimizer("sgd", lr), [{"params": [p for p in model.parameters() if p.requires_grad]}])
    )
    return torch.no_grad()(step)


def _alone(connection: Connection, workload: Workload) -> None:
    task = resolve(workload.task)
    model = build_model(task, 0, workload.device)
    warm_and_run(connection, workload, Trainer(task, model, workload.batch_size, 0), sgd(model, workload.lr))


def _in_step(connection: Connection, workload: Workload, supervisor: int, memory: int, rank: int) -> None:
    task = resolve(workload.task)
    model = build_model(task, 0, "cpu")
    step_own, done = sgd(model, workload.lr), memoryview(map_memory(supervisor, memory)).cast("q")

    def step() -> None:
        step_own()
        done[rank] += 1
        while min(done) < done[rank]:
            os.sched_yield()

    warm_and_run(connection, workload, Trainer(task, model, workload.batch_size, 0), step)


def _ddp(connection: Connection, workload: Workload, store: str, rank: int, ranks: int, algorithm: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    task = resolve(workload.task)
    model = nn.parallel.DistributedDataParallel(build_model(task, 0, "cpu"))
    if algorithm:
        model.register_comm_hook(Reduce(algorithm), comm_hook)
    warm_and_run(connection, workload, Trainer(task, model, workload.batch_size, 0), sgd(model, workload.lr), rank)


def _hogwild(connection: Connection, workload: Workload, supervisor: int, memory: int, rank: int) -> None:
    task = resolve(workload.task)
    model = build_model(task, 0, "cpu")
    shared = torch.frombuffer(map_memory(supervisor, memory), dtype=torch.float32)
    position = 0
    for parameter in model.parameters():
        own = shared[position : position + parameter.numel()].view_as(parameter)
        own.copy_(parameter.data)  # all write the same initial values
        parameter.data = own
        position += parameter.numel()
    warm_and_run(connection, workload, Trainer(task, model, workload.batch_size, 0), sgd(model, workload.lr), rank)
