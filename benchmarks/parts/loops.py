"""Training loops to compare with, each in its own processes: plain ones, and DDP over gloo."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.parts import plain
from benchmarks.parts.peers import Peer, Peers
from distbelief.core.effects import Batch, Computed
from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Settings
from distbelief.integrations.hook import Reduce, comm_hook
from distbelief.places.processes.lending import lend, map_memory
from distbelief.server import optimizers
from distbelief.tasks import as_data, resolve
from distbelief.tasks.order import Order
from distbelief.tasks.worker import Trainer, build_model

WARM = 5
"""Steps before the clock starts."""
SERVED, ROUNDS = "a server", "rounds of a server"
LOOPS = {
    "independent": plain.independent,
    "in lockstep": plain.lockstep,
    "hogwild": plain.hogwild,
    "two buffers": plain.two_buffers,
    "all-reduce": plain.all_reduce,
}
"""Plain loops whose processes are all alike."""


class Workload(NamedTuple):
    """Function of one process of a loop."""

    task: str
    steps: int
    batch_size: int
    lr: float
    device: str = "cpu"
    """Devices that independent loops, or partitions of a split model, take in turn."""


class Trains(Protocol):
    """Trainer that computes gradients of minibatches."""

    @property
    def order(self) -> Order: ...

    def compute(self, batch: Batch) -> Computed: ...


def independent(workload: Workload, processes: int, threads: int = 1) -> float:
    """Return the summed samples per second of several independent loops of ours side by side."""
    with Peers() as peers:
        return sum(race([peers.start("loop", threads, _alone, workload) for _ in range(processes)]))


def beside(workload: Workload, how: str, ranks: int = 2) -> float:
    """Return the samples per second of a plain loop, summed over its processes."""
    size = plain.room(build_model(resolve(workload.task), 0, "cpu"), 2 * ranks + 1)
    with Peers() as peers, lend(size) as memory:
        place, bells = (os.getpid(), memory), [Pipe() for _ in range(ranks)]
        if how in (SERVED, ROUNDS):
            peers.start("server", 1, _serve, workload, *place, [one for one, _ in bells], how == ROUNDS).hear()
        started = [
            peers.start("plain", 1, _plain, workload, how, *place, bells[rank][1], rank, ranks) for rank in range(ranks)
        ]
        return sum(race(started))


def ddp(workload: Workload, processes: int, algorithm: str = "") -> float:
    """Return the samples per second of torch's DDP over gloo, or with our hook and some algorithm."""
    with Peers() as peers, tempfile.TemporaryDirectory(prefix="distbelief-bench-") as folder:
        store, ranks = str(Path(folder) / "store"), range(processes)
        started = [peers.start("ddp", 1, _ddp, workload, store, rank, processes, algorithm) for rank in ranks]
        return sum(race(started))


def race(peers: list[Peer]) -> list[float]:
    """Start all processes together when they are ready; return the samples per second of each."""
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
    """Warm up, wait for the start, and report the samples per second of a trainer with its updates."""
    numbers = count(rank * workload.steps)

    def once() -> int:
        samples = trainer.compute(Batch(*divmod(next(numbers), trainer.order.batches))).samples
        step()
        return samples

    run_steps(connection, workload.steps, once)


def run_steps(connection: Connection, steps: int, once: Callable[[], int]) -> None:
    """Warm up, wait for the start, and report the samples per second of a function that makes a step.

    A device is waited for neither after the warm-up nor at the end; over many steps this cancels.
    """
    for _ in range(WARM):
        once()
    connection.send_bytes(b"ready")
    connection.recv_bytes()
    start = time.perf_counter()
    samples = sum(once() for _ in range(steps))
    connection.send_bytes(str(samples / (time.perf_counter() - start)).encode())
    connection.recv_bytes()  # no process leaves before all are done: a group ends with its first member


def sgd(model: nn.Module, lr: float) -> Callable[[], object]:
    """Return a step like that of the strategy `single`."""
    step = optimizers.stepper(
        optimizers.build(Optimizer("sgd", lr), [{"params": [p for p in model.parameters() if p.requires_grad]}])
    )
    return torch.no_grad()(step)


def _alone(connection: Connection, workload: Workload) -> None:
    task = resolve(workload.task)
    model = build_model(task, 0, workload.device)
    trainer = Trainer(task, model, Settings(batch_size=workload.batch_size))
    warm_and_run(connection, workload, trainer, sgd(model, workload.lr))


def _plain(
    connection: Connection,
    workload: Workload,
    how: str,
    supervisor: int,
    memory: int,
    bell: Connection,
    rank: int,
    ranks: int,
) -> None:
    task = resolve(workload.task)
    data, model = as_data(task.train()), build_model(task, 0, "cpu")
    file = os.open(f"/proc/{supervisor}/fd/{memory}", os.O_RDWR)
    shared = plain.share(file, memoryview(map_memory(supervisor, memory)), model, rank, ranks)
    torch.manual_seed(rank)
    steps = plain.gradients(model, task.loss, data.batch, len(data), workload.batch_size)
    if how in LOOPS:
        loop = LOOPS[how](model, steps, workload.lr, shared)
    else:
        loop = plain.served(model, steps, shared, bell.fileno(), ranks + (0 if how == ROUNDS else 1 + rank))
    run_steps(connection, workload.steps, loop.__next__)


def _serve(
    connection: Connection, workload: Workload, supervisor: int, memory: int, bells: list[Connection], rounds: bool
) -> None:
    model = build_model(resolve(workload.task), 0, "cpu")
    shared = plain.share(memory, memoryview(map_memory(supervisor, memory)), model, 0, len(bells))
    for vector in shared.vectors[len(bells) :]:
        for part, parameter in zip(plain.views(model, vector), model.parameters(), strict=True):
            part.copy_(parameter.data)
    connection.send_bytes(b"ready")
    plain.serve(shared.vectors, [bell.fileno() for bell in bells], workload.lr, rounds)


def _ddp(connection: Connection, workload: Workload, store: str, rank: int, ranks: int, algorithm: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    task = resolve(workload.task)
    model = nn.parallel.DistributedDataParallel(build_model(task, 0, "cpu"))
    if algorithm:
        model.register_comm_hook(Reduce(algorithm), comm_hook)
    trainer = Trainer(task, model, Settings(batch_size=workload.batch_size))
    warm_and_run(connection, workload, trainer, sgd(model, workload.lr), rank)
