"""A step in processes as those of a job, which keep what memory they free: of one that computes alone, and of as many
as there are cores at the same time. Those share caches, memory and, where there are any, the two threads of a core.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from distbelief.core.effects import Batch
from distbelief.core.optimizer import Optimizer
from distbelief.errors import JobFailed
from distbelief.places.processes.peers import Peer, Peers
from distbelief.record import limits
from distbelief.server.optimizers import build, stepper
from distbelief.tasks import resolve
from distbelief.tasks.worker import Trainer, build_model

MOST_PROCESSES = 16
"""More than these hardly tell more."""
SECONDS, WARM, LEAST_STEPS = 0.8, 3, 5
"""Of each of three turns: one process alone, all, one alone again; steps before them, and least steps of a turn."""
NINTH = statistics.NormalDist().inv_cdf(0.9)
"""How many deviations the ninth tenth of a normal distribution is above its middle."""


class Steps(NamedTuple):
    """What steps take in processes of a job."""

    step: float
    """Seconds of a gradient, in a process that computes alone."""
    update: float
    """Seconds of the update that follows it there: other than in a row of updates, its caches hold something else."""
    speed: float = 1.0
    """Of a core while all compute, of that of one that computes alone; 1 where there is one."""
    variation: float = 0.0
    """The deviation of a step's seconds while all compute, as a fraction of them."""


def measure(task: str, data_dir: str | None, batch_size: int, cores: int, optimizer: Optimizer) -> Steps | None:
    """Steps of one process, and how much slower they are while all cores compute; None where it cannot be stepped.

    A step is timed by its thread's time on a processor, so that other programs lengthen it little.

    Args:
        task: by name, or module:function.
        data_dir: folder with its data.
        batch_size: samples in a minibatch.
        cores: that compute.
        optimizer: that steps.
    """
    count = min(cores, limits.cores(), MOST_PROCESSES)
    words = task, data_dir, batch_size, optimizer
    try:
        with Peers() as peers:
            made = [peers.start(f"step {number}", 1, _step, *words) for number in range(count)]
            for peer in made:
                peer.hear()
            before, *shared, after = _turn(made[:1]), *([_turn(made)] if count > 1 else []), _turn(made[:1])
    except JobFailed:
        return None  # a model that cannot be stepped has said so in the profile
    step, update = (before.step + after.step) / 2, (before.update + after.update) / 2
    if not shared:
        return Steps(step, update)
    return Steps(step, update, min(1.0, step / shared[0].step), shared[0].variation)


def _turn(peers: list[Peer]) -> Steps:
    """Steps of the processes that step now, the means over them."""
    for peer in peers:
        peer.say()
    taken = [tuple(map(float, peer.hear().split())) for peer in peers]
    step, update, variation = map(statistics.fmean, zip(*taken, strict=True))
    return Steps(step, update, variation=variation)


def variation_of(seconds: Sequence[float]) -> float:
    """The deviation, as a fraction of the mean, of a lognormal whose middle and ninth tenth are those of some times: a
    few that something else has made long count no more than others.

    >>> variation_of([1.0] * 10), round(variation_of([*range(90, 111)]), 2)
    (0.0, 0.07)
    """
    middle, ninth = statistics.median(seconds), statistics.quantiles(seconds, n=10)[-1]
    return math.sqrt(math.expm1((math.log(ninth / middle) / NINTH) ** 2))


def _step(connection: Connection, name: str, data_dir: str | None, batch_size: int, optimizer: Optimizer) -> None:
    """Step a task for a while, each time that somebody says so, and tell the mean seconds of a gradient and of an
    update: those of slow steps count, as they do for a rate; and how steps vary.
    """
    task = resolve(name, data_dir)
    model = build_model(task, 0, "cpu")
    trainer = Trainer(task, model, batch_size, seed=0)
    update = torch.no_grad()(stepper(build(optimizer, [{"params": list(model.parameters())}])))
    number = 0

    def step() -> tuple[float, float]:
        nonlocal number
        begin = time.thread_time()
        trainer.compute(Batch(0, number % trainer.order.batches))
        computed = time.thread_time()
        update()
        number += 1
        return computed - begin, time.thread_time() - computed

    for _ in range(WARM):
        step()
    connection.send_bytes(b"ready")
    while True:
        try:
            connection.recv_bytes()
        except EOFError:
            return
        taken, end = list[tuple[float, float]](), time.perf_counter() + SECONDS
        while len(taken) < LEAST_STEPS or time.perf_counter() < end:
            taken.append(step())
        steps, updates = zip(*taken, strict=True)
        told = statistics.fmean(steps), statistics.fmean(updates), variation_of(steps)
        connection.send_bytes(" ".join(map(str, told)).encode())
