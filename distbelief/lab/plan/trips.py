"""What messages cost here: what a push and a fetch add to steps of a task, with a real shard in a process of its own;
or, on the direct path, in memory that another process updates too.

Steps with a trip to the shard and steps without take turns, since nobody sleeps and nothing leaves the caches where
nobody computes between two messages. What a trip of a short vector takes costs its messages, what that of a long one
takes more costs its bytes.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from distbelief.core.conversations.pushing import Push
from distbelief.core.effects import Batch, Phantom
from distbelief.core.messages import Version
from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Settings
from distbelief.lab.plan.shards import GRADIENT, SGD, DirectTrips, Ours, Trips
from distbelief.places.evaluate import threads
from distbelief.places.processes.peers import Peers
from distbelief.places.simulated.handling import Handling, HandlingCosts
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
MESSAGES = 4
"""Of a push and a fetch, with their answers."""

PUSH = Push(0, 0, 1, 0, 1, Version(0, 0), 1, 1)


class DirectHandling(NamedTuple):
    """What pushes and fetches cost on the direct path."""

    alone: Handling = Handling()
    """One replica, whose memory nobody else writes."""
    among: Handling = Handling()
    """One of several."""


class _Kind(NamedTuple):
    """A kind of trips."""

    trips: Trips
    gradient: torch.Tensor
    """Where a step leaves its gradient: in the slot, or where it is copied to that from."""
    before: Callable[[], None] = lambda: None
    """Is called before each step."""
    clock: Callable[[], float] = time.thread_time
    """Of the thread, where it waits for nobody: others that work on its core do not lengthen that."""


def measure(task: Task, batch_size: int, seconds: float, optimizer: Optimizer = SGD) -> Handling:
    """What messages cost beside steps of a task.

    Args:
        task: whose gradients are computed in between.
        batch_size: samples of each.
        seconds: for all of it.
        optimizer: that the shard steps with.

    Raises:
        DataError: the task's data cannot be had.
        TrainingError: the model or the loss raised.
    """
    trainer, sizes = _trainer(task, batch_size)
    with threads(1), Peers() as peers, contextlib.ExitStack() as stack:
        sides = [stack.enter_context(contextlib.closing(Ours(peers, "shared", size, optimizer=optimizer)))
            for size in sizes]  # fmt: skip
        short, long = _added(trainer, [_Kind(ours, ours.gradient, clock=time.perf_counter) for ours in sides], seconds)
    costs = _message_costs(optimizer)
    touched = costs.update(1) + costs.copy(1)  # by the shard, which steps and copies what it answers
    return _handling(sizes, short - 2 * MEMORY.latency, long - short, touched)


def measure_direct(task: Task, batch_size: int, seconds: float, optimizer: Optimizer = SGD) -> DirectHandling:
    """What pushes and fetches cost beside steps of a task where a replica makes the updates itself.

    Args:
        task: whose gradients are computed in between.
        batch_size: samples of each.
        seconds: for all of it.
        optimizer: that steps.

    Raises:
        DataError: the task's data cannot be had.
        TrainingError: the model or the loss raised.
    """
    trainer, sizes = _trainer(task, batch_size)
    with threads(1), Peers() as peers, contextlib.ExitStack() as stack:
        sides = [stack.enter_context(contextlib.closing(DirectTrips(peers, size, optimizer))) for size in sizes]
        kinds = [_Kind(one, torch.empty_like(one.gradient)) for one in sides]
        kinds += [kind._replace(before=one.have_updated) for kind, one in zip(kinds, sides, strict=True)]
        *alone, short, long = _added(trainer, kinds, seconds)
    touched = _message_costs(optimizer).passing(PUSH, Phantom(1))
    one, several = (_handling(sizes, small, large - small, touched) for small, large in (alone, (short, long)))
    return DirectHandling(one, several)


def _trainer(task: Task, batch_size: int) -> tuple[Trainer, tuple[int, int]]:
    """What computes the steps, and the bytes of a short vector and of the model's."""
    model = build_model(task, 0, "cpu")
    length = min(MOST, layout_of(model).trained.size)
    return Trainer(task, model, batch_size, 0), (SMALL, max(length, 2 * SMALL))


def _message_costs(optimizer: Optimizer) -> HandlingCosts:
    """What counts bytes, and no messages."""
    return HandlingCosts(Handling(0.0, 1.0), Settings(optimizer=optimizer), lambda: 0)


def _handling(sizes: tuple[int, int], short: float, more: float, touched: float) -> Handling:
    """By the seconds that a trip of a short vector adds to a step, how many more one of the model's adds, and how many
    bytes are touched for each that is sent.
    """
    return Handling(max(0.0, short / MESSAGES), touched * (sizes[1] - sizes[0]) / max(1e-9, more))


def _added(trainer: Trainer, kinds: Sequence[_Kind], seconds: float) -> list[float]:
    """The median seconds that a trip of each kind adds to a step."""
    more: list[list[float]] = [[] for _ in kinds]
    begin, index = time.perf_counter(), 0
    while index < LEAST_STEPS or time.perf_counter() < begin + seconds:
        for kind, times in zip(kinds, more, strict=True):
            without, served = (_step(trainer, kind, index, trip) for trip in (False, True))
            times.append(served - without)
        index += 1
    return [statistics.median(times) for times in more]


def _step(trainer: Trainer, kind: _Kind, index: int, trip: bool) -> float:
    """Seconds in which a step, whose gradient is computed, leaves what it would push, makes a trip or none, and reads
    what it would compute with.
    """
    ours, gradient = kind.trips, kind.gradient
    kind.before()
    trainer.compute(Batch(0, index % trainer.order.batches))
    start = kind.clock()  # not before: two gradients differ by more than a trip takes
    gradient.fill_(GRADIENT)
    if trip:
        if gradient is not ours.gradient:
            ours.gradient.copy_(gradient)
        ours.trips(1)
    ours.parameters.view(torch.float32).sum()
    return kind.clock() - start
