"""An L-BFGS iteration of Sandblaster beside its ceiling, and its time to a loss beside torch's."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import ClassVar

import torch

from benchmarks.parts import workloads
from benchmarks.parts.timing import BenchOptions, figure, finish, interleave, medians, ratio
from distbelief.cli.tables import number, show
from distbelief.core.effects import Batch
from distbelief.core.records import Json
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.processes.peers import Peers
from distbelief.record.machine import machine
from distbelief.strategies import Sandblaster
from distbelief.tasks import as_data, resolve
from distbelief.tasks.worker import Trainer, build_model

PATIENCE = 900.0
"""Seconds that torch may take."""
CEILING, TORCH = 0.93, 1.0
"""The figures to reach: an iteration of the ceiling's, and time of torch's to the same loss."""


@dataclass(frozen=True)
class SandblasterOptions(BenchOptions):
    """Options of the benchmark sandblaster."""

    task: str = "mnist"
    """What is trained: the MLP 784-300-100-10."""
    portion_size: int = 500
    """Samples in a portion, here and at the ceiling."""
    repeats: int = 5
    """Rounds in which an iteration and its ceiling take turns; torch takes 3 at most."""
    iterations: int = 20
    """Iterations to the loss that torch is to reach."""
    QUICK: ClassVar[Mapping[str, object]] = {
        "task": "benchmarks.parts.workloads:mlp_quick",
        "portion_size": 64,
        "repeats": 1,
        "iterations": 3,
    }
    """Defaults with --quick."""


def run(options: SandblasterOptions) -> Json:
    """Measure; returns what is written as JSON.

    Raises:
        UsageError: no iteration.
        DataError: the task's data cannot be had.
    """
    if options.iterations < 1:
        raise UsageError(f"--iterations {options.iterations}: must be 1 or more")
    facts, measured = machine(), {"iteration": _iteration(options), "torch": _torch(options)}
    figures = [one for part in measured.values() for one in part.pop("figures")]
    if not options.quiet:
        for part, found in measured.items():
            rows = [[what, number(value)] for what, value in found.items() if isinstance(value, float)]
            show(part, ("what", "measured"), rows)
    result = {
        "bench": "sandblaster",
        "machine": facts,
        "portion_size": options.portion_size,
        "parts": measured,
        "figures": figures,
    }
    return finish(result, options)


def _job(options: SandblasterOptions, iterations: int) -> Json:
    """A job of two replicas and two shards; what it returns, with a row of its history for every iteration."""
    strategy = Sandblaster(2, 2, iterations, portion_size=options.portion_size)
    return workloads.run(Job(options.task, strategy, evaluate_every=0, checkpoint_every=0, snapshot_every="0"))


# an iteration and its ceiling


def _iteration(options: SandblasterOptions) -> Json:
    iterations = 3 if options.quick else 8
    contenders = {"iteration": partial(_seconds, options, iterations), "ceiling": partial(_halves, options, iterations)}
    taken = interleave(contenders, options.repeats)
    share = ratio(taken["ceiling"], taken["iteration"])
    return {
        "seconds of an iteration": statistics.median(taken["iteration"]),
        "seconds of two independent halves": statistics.median(taken["ceiling"]),
        "rounds": taken,
        "figures": [figure("one iteration, of two independent processes that do half the batch each", share, CEILING)],
    }


def _seconds(options: SandblasterOptions, iterations: int) -> float:
    """Seconds of an iteration that evaluates the batch once, from end to end of two iterations: the median of a
    job's.
    """
    rows = _job(options, iterations)["history"]
    samples = len(as_data(resolve(options.task).train()))
    found = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(rows) if b["samples"] - a["samples"] == samples]
    return float(statistics.median(found or [rows[-1]["seconds"] * samples / rows[-1]["samples"]]))


def _halves(options: SandblasterOptions, times: int) -> float:
    """Seconds in which two processes that know nothing of each other each do half of the batch's gradient: the median
    of their medians.
    """
    with Peers() as peers:
        pair = [peers.start("half", 1, _half, options.task, options.portion_size, which, times) for which in (0, 1)]
        for word in ("ready", "done"):
            for peer in pair:
                assert peer.hear() == word
            for peer in pair:
                peer.say("go")
        return statistics.mean(float(peer.hear()) for peer in pair)


def _half(connection: Connection, task: str, size: int, which: int, times: int) -> None:
    """Half of the portions of a batch, summed, so many times; both begin at once, and go on until both have counted
    all.
    """
    made = resolve(task)
    trainer = Trainer(made, build_model(made, 0, "cpu"), size, 0)
    parameters, sums = list(trainer.model.parameters()), [torch.zeros_like(p) for p in trainer.model.parameters()]
    own = range(which, trainer.order.batches, 2)

    def half() -> None:
        for index in own:
            trainer.compute(Batch(0, index))
            for total, parameter in zip(sums, parameters, strict=True):
                total.add_(parameter.grad)  # type: ignore[arg-type]  # there is one after backward

    half()
    connection.send_bytes(b"ready")
    connection.recv_bytes()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        half()
        taken.append(time.perf_counter() - began)
    connection.send_bytes(b"done")
    while not connection.poll(0):  # the other one is not to have the machine for itself
        half()
    connection.recv_bytes()
    connection.send_bytes(str(statistics.median(taken)).encode())


# torch


def _torch(options: SandblasterOptions) -> Json:
    iterations = options.iterations
    target = float(_job(options, iterations)["descent"]["loss"])
    contenders: dict[str, Callable[[], float]] = {
        "Sandblaster": lambda: float(_job(options, iterations)["seconds"]),
        "torch.optim.LBFGS": partial(_torchs, options, target),
    }
    taken = interleave(contenders, min(options.repeats, 3))
    share = ratio(taken["torch.optim.LBFGS"], taken["Sandblaster"])
    return {
        "training loss": target,
        **{f"seconds of {name}": value for name, value in medians(taken).items()},
        "rounds": taken,
        "figures": [figure("time of torch.optim.LBFGS (2 threads) to the same loss, of Sandblaster's", share, TORCH)],
    }


def _torchs(options: SandblasterOptions, target: float) -> float:
    """Seconds of torch, in a process of its own."""
    with Peers() as peers:
        return float(peers.start("torch", 2, _lbfgs, options.task, target).hear(PATIENCE))


class _Reached(Exception):
    """The loss is low enough."""


def _lbfgs(connection: Connection, task: str, target: float) -> None:
    """Seconds in which torch's L-BFGS, on the whole batch at once, evaluates a loss that is low enough."""
    made = resolve(task)
    model, data = build_model(made, 0, "cpu"), as_data(made.train())
    inputs, targets = data.batch(torch.arange(len(data)))
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        1.0,
        10_000,
        20_000,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = made.loss(model(inputs), targets)
        loss.backward()
        if loss.item() <= target:
            raise _Reached
        return loss

    with contextlib.suppress(_Reached):
        closure()
        began = time.perf_counter()
        optimizer.step(closure)
    connection.send_bytes(str(time.perf_counter() - began).encode())
