"""How fast cores are while all of them compute: processes that step a task at the same time, beside one that does so
alone. They share caches, memory and, where there are any, the two threads of a core.
"""

from __future__ import annotations

import os
import statistics
import time
from multiprocessing.connection import Connection

from distbelief.core.effects import Batch
from distbelief.places.processes import forkserver
from distbelief.places.processes.settle import settle_process
from distbelief.tasks import resolve
from distbelief.tasks.worker import Trainer, build_model

MOST_PROCESSES = 16
"""More than these hardly tell more."""
SECONDS, WARM, LEAST_STEPS = 0.8, 3, 5
"""Of each of three turns: one process alone, all, one alone again; steps before them, and least steps of a turn."""
ANSWER_SECONDS = 120.0
"""Longest wait for a turn."""


def measure(task: str, data_dir: str | None, batch_size: int, cores: int) -> float:
    """The speed of a core while so many compute, of that of one that computes alone; 1 where there is one.

    A step is timed by its thread's time on a processor, so that other programs lengthen it little.

    Args:
        task: by name, or module:function.
        data_dir: folder with its data.
        batch_size: samples in a minibatch.
        cores: that compute.
    """
    count = min(cores, len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if count < 2:
        return 1.0
    forkserver.start()
    made = [
        forkserver.fork(f"step {number}", _step, os.getpid(), task, data_dir, batch_size) for number in range(count)
    ]
    pipes = [pipe for _, pipe in made]
    try:
        for pipe in pipes:
            _hear(pipe)
        turns = [_turn(pipes[:1]), _turn(pipes), _turn(pipes[:1])]
    except (EOFError, ConnectionResetError, BrokenPipeError, TimeoutError):
        return 1.0  # a model that cannot be stepped has said so in the profile
    finally:
        for process, pipe in made:
            pipe.close()
            process.kill()
            process.join()
    return min(1.0, (turns[0] + turns[2]) / 2 / turns[1])


def _turn(pipes: list[Connection]) -> float:
    """Seconds of a step, the median over the processes that step now."""
    for pipe in pipes:
        pipe.send_bytes(b"go")
    return statistics.median(float(_hear(pipe)) for pipe in pipes)


def _hear(pipe: Connection) -> bytes:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError
    return pipe.recv_bytes()


def _step(supervisor: int, name: str, data_dir: str | None, batch_size: int, pipe: Connection) -> None:
    """Step a task for a while, each time that somebody says so, and tell the median seconds of a step."""
    settle_process("step", 1, supervisor)
    task = resolve(name, data_dir)
    trainer = Trainer(task, build_model(task, 0, "cpu"), batch_size, seed=0)
    number = 0

    def step() -> float:
        nonlocal number
        begin = time.thread_time()
        trainer.compute(Batch(0, number % trainer.order.batches))
        number += 1
        return time.thread_time() - begin

    for _ in range(WARM):
        step()
    pipe.send_bytes(b"ready")
    while True:
        try:
            pipe.recv_bytes()
        except EOFError:
            return
        taken, end = list[float](), time.perf_counter() + SECONDS
        while len(taken) < LEAST_STEPS or time.perf_counter() < end:
            taken.append(step())
        pipe.send_bytes(str(statistics.median(taken)).encode())
