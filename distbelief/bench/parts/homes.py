"""The homes of a split model as processes that share what crosses, without a server: each computes its part of a step,
and makes the update of what it holds.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from distbelief.bench.parts.loops import Workload, race, sgd, warm_and_run
from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.settings import DataSettings, Settings
from distbelief.fabric.crossings import Crossings, segment_bytes
from distbelief.places.processes.peers import Peers, lend, map_memory
from distbelief.replica.home_part import home_schedule
from distbelief.split.play import Give, RunSegment, Take
from distbelief.strategies.partition import PartitionTrainer, partition, split_graph
from distbelief.tasks import as_data, resolve
from distbelief.tasks.order import Order
from distbelief.tasks.worker import build_model, with_data


class How(NamedTuple):
    """How a model is split."""

    split: str
    partitions: int = 2
    microbatches: int = 1

    def settings(self, batch_size: int) -> Settings:
        """Those of a job that splits it so."""
        return Settings(
            data=DataSettings(batch_size=batch_size),
            replicas=1,
            partitions=self.partitions,
            split=self.split,
            shards=self.partitions,
            microbatches=self.microbatches,
        )


def split(workload: Workload, how: How) -> float:
    """Samples per second of one split replica, each home with one thread."""
    task, settings = resolve(workload.task), how.settings(workload.batch_size)
    way = home_schedule(split_graph(task, build_model(task, 0, "cpu"), settings), settings, 0)
    with Peers() as peers, lend(segment_bytes(how.partitions, way.slots(workload.batch_size))) as memory:
        homes = range(how.partitions)
        return statistics.fmean(
            race([peers.start("home", 1, _home, workload, how, os.getpid(), memory, home) for home in homes])
        )


def crossing_seconds(size: int, steps: int) -> float:
    """Seconds in which so many bytes cross from one home to another, one way."""
    with Peers() as peers, lend(segment_bytes(2, [size, size])) as memory:
        rates = race([peers.start("home", 1, _bounce, size, steps, os.getpid(), memory, home) for home in (0, 1)])
        return 1 / statistics.fmean(rates)


class _HomeTrainer:
    """Plays a home's part of each step.

    Args:
        part: what it computes.
        crossings: what it shares with the others.
        order: of the minibatches.
    """

    def __init__(self, part: PartitionTrainer, crossings: Crossings, order: Order) -> None:
        self.order = order
        self._part, self._crossings = part, crossings
        self._step = 0

    def compute(self, batch: Batch) -> Computed:
        """Its part of the gradient of a minibatch."""
        self._step += 1
        self._crossings.begin(self._step)
        play, answer = self._part.play(batch), None
        while True:
            try:
                asked = play.send(answer)
            except StopIteration as end:
                computed: Computed = end.value
                return computed
            answer = None if isinstance(asked, RunSegment) else self._cross(asked)

    def _cross(self, asked: Give | Take) -> torch.Tensor | None:
        slot = self._part.slot(asked)
        if isinstance(asked, Give):
            while not self._crossings.give(slot, asked.other, self._part.encode(asked)):
                pass
            return None
        while (taken := self._crossings.take(slot, asked.transfer.shape.dtype, self._part.shape(asked))) is None:
            pass
        return taken


def _home(connection: Connection, workload: Workload, how: How, supervisor: int, memory: int, home: int) -> None:
    task, settings = resolve(workload.task), how.settings(workload.batch_size)
    data = as_data(task.train())
    role = roles.replicas(settings.mesh)[home]
    flat, part = partition(with_data(task, data), build_model(task, 0, "cpu"), settings, role, rows=False)
    crossings = Crossings(_bytes(map_memory(supervisor, memory)), home, how.partitions, part.slots)
    trainer = _HomeTrainer(part, crossings, Order(len(data), workload.batch_size, 0))
    warm_and_run(connection, workload, trainer, sgd(flat.module, workload.lr))


def _bounce(connection: Connection, size: int, steps: int, supervisor: int, memory: int, home: int) -> None:
    crossings = Crossings(_bytes(map_memory(supervisor, memory)), home, 2, [size, size])
    value = torch.zeros(size, dtype=torch.uint8)

    def give() -> None:
        while not crossings.give(home, 1 - home, value):
            pass

    def take() -> None:
        while crossings.take(1 - home, torch.uint8, (size,)) is None:
            pass

    connection.send_bytes(b"ready")
    connection.recv_bytes()
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        crossings.begin(step)
        for act in (give, take) if home == 0 else (take, give):
            act()
    connection.send_bytes(str(2 * steps / (time.perf_counter() - begun)).encode())
    connection.recv_bytes()


def _bytes(mapping: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)
