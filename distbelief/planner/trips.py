"""What messages cost here: what a push and a fetch add to steps of a task, with a real shard in a process of its own.

Steps with a trip to the shard and steps without take turns, since nobody sleeps and nothing leaves the caches where
nobody computes between two messages. What a trip of a short vector takes costs its messages, what that of a long one
takes more costs its bytes.
"""

from __future__ import annotations

import contextlib
import statistics
import time

import torch

from distbelief.core.effects import Batch
from distbelief.costs.profile import one_thread
from distbelief.places.processes.peers import Peers
from distbelief.places.simulated.handling import Handling
from distbelief.planner.shards import GRADIENT, Ours
from distbelief.tasks import Task
from distbelief.tasks.flat import layout_of
from distbelief.tasks.worker import Trainer, build_model
from distbelief.transport.virtual import MEMORY

SMALL, MOST = 4096, 64 << 20
"""Bytes of a vector that hardly counts, and of the longest that is sent: beyond the caches, twice the bytes take twice
the time.
"""
LEAST_STEPS = 5
"""Of each kind, however long they take."""
MESSAGES, TOUCHED = 4, 4
"""Of a push and a fetch: messages, and vectors that the shard reads or writes (a gradient and parameters, then
parameters and their copy).
"""


def measure(task: Task, batch_size: int, seconds: float) -> Handling:
    """What messages cost beside steps of a task.

    Args:
        task: whose gradients are computed in between.
        batch_size: samples of each.
        seconds: for all of it.

    Raises:
        DataError: the task's data cannot be had.
        TrainingError: the model or the loss raised.
    """
    model = build_model(task, 0, "cpu")
    trainer, length = Trainer(task, model, batch_size, 0), min(MOST, layout_of(model).trained.size)
    with one_thread(), Peers() as peers, contextlib.ExitStack() as stack:
        sides = {size: Ours(peers, "shared", size) for size in (SMALL, max(length, 2 * SMALL))}
        for ours in sides.values():
            stack.callback(ours.close)
        more: dict[int, list[float]] = {size: [] for size in sides}
        begin, index = time.perf_counter(), 0
        while index < LEAST_STEPS or time.perf_counter() < begin + seconds:
            for size, ours in sides.items():
                without, served = (_step(trainer, ours, index, trip) for trip in (False, True))
                more[size].append(served - without)
            index += 1
    (_, short), (size, long) = ((size, statistics.median(times)) for size, times in more.items())
    message = (short - 2 * MEMORY.latency) / MESSAGES
    return Handling(max(0.0, message), TOUCHED * (size - SMALL) / max(1e-9, long - short))


def _step(trainer: Trainer, ours: Ours, index: int, trip: bool) -> float:
    """Seconds of a step that writes what it would push, makes a trip or none, and reads what it would compute with."""
    start = time.perf_counter()
    trainer.compute(Batch(0, index % trainer.order.batches))
    ours.gradient.fill_(GRADIENT)
    if trip:
        ours.trips(1)
    ours.parameters.view(torch.float32).sum()
    return time.perf_counter() - start
