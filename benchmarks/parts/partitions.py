"""Partitions of a split model as processes that exchange values and update their own parameters without a server."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from benchmarks.parts.loops import Trains, Workload, race, run_steps, sgd, warm_and_run
from benchmarks.parts.peers import Peer, Peers
from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.settings import Settings
from distbelief.fabric.crossings import Crossings, segment_bytes
from distbelief.fabric.pinned import DeviceCopies, device_copies
from distbelief.lab.cost.cost import held as process_bytes
from distbelief.places.processes.lending import lend, map_memory
from distbelief.replica.split_compute import slots_of
from distbelief.schedules.pipeline import Crossing, SegmentTask
from distbelief.split.program import program_of
from distbelief.strategies import Single
from distbelief.strategies.partition import PartitionTrainer, part_of, split_graph
from distbelief.tasks import as_data, resolve
from distbelief.tasks.on_disk import build_on_disk
from distbelief.tasks.order import Order
from distbelief.tasks.worker import Trainer, build_model, placed, with_data

PARTITIONS = 2


class How(NamedTuple):
    """Split of the model."""

    split: str
    partitions: int = PARTITIONS
    microbatches: int = 1
    chunks: int = 0

    def settings(self, batch_size: int) -> Settings:
        """Return the settings of a job with this split."""
        return Settings(batch_size=batch_size, strategy=Single(**self._asdict()))


def split(workload: Workload, how: How) -> float:
    """Return the samples per second of one split replica, each partition with one thread."""
    with _started(_partition, workload, how) as processes:
        return statistics.fmean(race(processes))


@contextlib.contextmanager
def _started(play: Callable[..., None], workload: Workload, how: How) -> Iterator[list[Peer]]:
    """Start a process for each partition, with the memory over which they exchange values."""
    task, settings = resolve(workload.task), how.settings(workload.batch_size)
    program = program_of(split_graph(task, build_on_disk(task, 0).model, settings))
    slots = slots_of(program, how.microbatches, workload.batch_size)
    with Peers() as peers, lend(segment_bytes(how.partitions, slots)) as memory:
        shared = workload, how, os.getpid(), memory
        yield [peers.start("partition", 1, play, *shared, partition) for partition in range(how.partitions)]


class PartitionMemory(NamedTuple):
    """Memory of a process for the model that it trains."""

    held: int
    """Bytes of parameters, gradients and the state of adagrad."""
    peak: int
    """Peak memory of the process in bytes, including the interpreter and torch."""


def held(workload: Workload, how: How) -> list[PartitionMemory]:
    """Measure the memory of each partition's process after some steps; one partition is the whole model."""
    if how.partitions == 1:
        with Peers() as peers:
            return [PartitionMemory(*json.loads(peers.start("whole", 1, _hold_whole, workload).hear()))]
    with _started(_hold, workload, how) as processes:
        found = [PartitionMemory(*json.loads(one.hear())) for one in processes]
        for one in processes:
            one.say()
        return found


def crossing_seconds(size: int, steps: int, device: str = "cpu") -> float:
    """Measure the seconds for some bytes to cross from one partition to another; devices are taken in turn."""
    with Peers() as peers, lend(segment_bytes(2, [size, size])) as memory:
        shared = os.getpid(), memory
        rates = race(
            [peers.start("partition", 1, _bounce, size, steps, device, *shared, partition) for partition in (0, 1)]
        )
        return 1 / statistics.fmean(rates)


def copying_seconds(size: int, steps: int) -> float:
    """Measure the seconds for one process to copy some bytes to shared memory and back."""
    value, there = torch.zeros(size, dtype=torch.uint8), torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    begun = time.perf_counter()
    for _ in range(steps):
        there.copy_(value)
        value.copy_(there)
    return (time.perf_counter() - begun) / steps


class _PartitionTrainer:
    """Trainer of a partition's part of each step."""

    def __init__(self, part: PartitionTrainer, crossings: Crossings, order: Order) -> None:
        self.order = order
        self._part, self._crossings = part, crossings
        self._step = 0

    def compute(self, batch: Batch) -> Computed:
        self._step += 1
        self._crossings.begin(self._step)
        self._part.begin(batch)
        for action in self._part.actions():
            if isinstance(action, SegmentTask):
                self._part.run(action)
            else:
                self._cross(action)
        return self._part.end()

    def _cross(self, crossing: Crossing) -> None:
        slot, (source, target) = self._part.slot(crossing), self._part.ends(crossing)
        if source == self._part.partition:
            tensor = self._part.give(crossing)
            while not self._crossings.give(slot, target, tensor):
                pass
            return
        dtype, shape = self._part.transfer(crossing).shape.dtype, self._part.shape(crossing)
        while (taken := self._crossings.take(slot, dtype, shape)) is None:
            pass
        self._part.take(crossing, taken)


def _partition(
    connection: Connection, workload: Workload, how: How, supervisor: int, memory: int, partition: int
) -> None:
    model = build_model(resolve(workload.task), 0, "cpu")
    trainer, module = _trainer(workload, how, supervisor, memory, partition, model)
    warm_and_run(connection, workload, trainer, sgd(module, workload.lr))


def _trainer(
    workload: Workload, how: How, supervisor: int, memory: int, partition: int, model: torch.nn.Module
) -> tuple[_PartitionTrainer, torch.nn.Module]:
    """Return the trainer of a partition of a model, and its memory."""
    task, settings = resolve(workload.task), how.settings(workload.batch_size)
    data = as_data(task.train())
    role = roles.replicas(settings.mesh)[partition]
    task = with_data(task, data)
    device = placed(workload.device, partition)
    graph = split_graph(task, model, settings)
    flat, program = part_of(graph, model, settings, role, False, device)
    part = PartitionTrainer(task, program, settings)
    shared = _bytes(map_memory(supervisor, memory), part.copies)
    crossings = Crossings(shared, partition, how.partitions, part.slots, copies=part.copies)
    return _PartitionTrainer(part, crossings, Order(len(data), workload.batch_size, 0)), flat.module


def _hold(connection: Connection, workload: Workload, how: How, supervisor: int, memory: int, partition: int) -> None:
    model = build_on_disk(resolve(workload.task), 0).model
    _train_and_tell(connection, workload, *_trainer(workload, how, supervisor, memory, partition, model))
    connection.recv_bytes()  # no process leaves before all are done


def _hold_whole(connection: Connection, workload: Workload) -> None:
    task = resolve(workload.task)
    model = build_model(task, 0, "cpu")
    _train_and_tell(connection, workload, Trainer(task, model, Settings(batch_size=workload.batch_size), 0), model)


def _train_and_tell(connection: Connection, workload: Workload, trainer: Trains, module: torch.nn.Module) -> None:
    """Train for some steps, and report the memory."""
    optimizer = torch.optim.Adagrad(module.parameters(), lr=workload.lr)
    for number in range(workload.steps):
        trainer.compute(Batch(*divmod(number, trainer.order.batches)))
        optimizer.step()
    kept: list[torch.Tensor] = [*module.parameters()]
    kept += [one.grad for one in module.parameters() if one.grad is not None]
    kept += [one["sum"] for one in optimizer.state.values()]
    connection.send_bytes(json.dumps([sum(one.nbytes for one in kept), process_bytes("VmHWM")]).encode())


def _bounce(
    connection: Connection, size: int, steps: int, device: str, supervisor: int, memory: int, partition: int
) -> None:
    place = placed(device, partition)
    copies = device_copies(place)
    crossings = Crossings(_bytes(map_memory(supervisor, memory), copies), partition, 2, [size, size], copies=copies)
    value = torch.zeros(size, dtype=torch.uint8, device=place)

    def give() -> None:
        while not crossings.give(partition, 1 - partition, value):
            pass

    def take() -> None:
        while crossings.take(1 - partition, torch.uint8, (size,)) is None:
            pass

    numbers = itertools.count(1)

    def once() -> int:
        crossings.begin(next(numbers))
        for act in (give, take) if partition == 0 else (take, give):
            act()
        return 2

    run_steps(connection, steps, once)


def _bytes(mapping: mmap.mmap, copies: DeviceCopies | None) -> torch.Tensor:
    """Return shared memory, pinned if a device copies from and to it."""
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if copies is not None:
        copies.pin(memory)
    return memory
