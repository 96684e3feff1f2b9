"""An L-BFGS iteration of Sandblaster compared with its ceiling, and its time to a loss compared with torch's."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks.parts import loops, workloads
from benchmarks.parts.peers import Peers
from benchmarks.parts.timing import BenchOptions, Measured, Table, figure, interleave, medians, ratio
from distbelief.core.records import Json
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.lab import number
from distbelief.strategies import Sandblaster
from distbelief.tasks import as_data, resolve
from distbelief.tasks.worker import Trainer, build_model

PATIENCE = 900.0
"""Time limit of torch in seconds."""
CEILING, TORCH = 0.93, 1.0
"""Targets: an iteration relative to its ceiling, and the time to a loss relative to torch's."""


@dataclass(frozen=True)
class SandblasterOptions(BenchOptions):
    """Options of the benchmark sandblaster."""

    task: str = "mnist"
    """Task to train: the MLP 784-300-100-10."""
    portion_size: int = 500
    """Samples in a portion, here and for the ceiling."""
    repeats: int = 5
    """Rounds in which an iteration and its ceiling take turns; torch runs at most 3 times."""
    iterations: int = 20
    """Number of iterations whose final loss torch must reach."""


def run(options: SandblasterOptions) -> Measured:
    """Measure."""
    if options.iterations < 1:
        raise UsageError(f"--iterations {options.iterations}: must be 1 or more")
    measured: dict[str, Json] = {"iteration": _iteration(options), "torch": _torch(options)}
    figures = [one for part in measured.values() for one in part.pop("figures")]
    tables = [
        Table(part, ("what", "measured"), [[what, number(it)] for what, it in found.items() if isinstance(it, float)])
        for part, found in measured.items()
    ]
    return Measured({"portion_size": options.portion_size, "parts": measured}, figures, tables)


def _job(options: SandblasterOptions, iterations: int) -> Json:
    """Run a job of two replicas and two shards; return its result, with a row of history for every iteration."""
    strategy = Sandblaster(2, 2, iterations, portion_size=options.portion_size)
    return workloads.run(options.task, strategy)


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
        "figures": [
            figure("one iteration, relative to two independent processes that do half the batch each", share, CEILING)
        ],
    }


def _seconds(options: SandblasterOptions, iterations: int) -> float:
    """Return the seconds of an iteration that evaluates the batch once: the median of a job's."""
    rows = _job(options, iterations)["history"]
    samples = len(as_data(resolve(options.task).train()))
    found = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(rows) if b["samples"] - a["samples"] == samples]
    return float(statistics.median(found or [rows[-1]["seconds"] * samples / rows[-1]["samples"]]))


def _halves(options: SandblasterOptions, times: int) -> float:
    """Measure the seconds that two independent processes need for half of the batch's gradient each."""
    samples = len(as_data(resolve(options.task).train()))
    workload = loops.Workload(
        options.task, max(1, times * samples // options.portion_size // 2), options.portion_size, 0
    )
    with Peers() as peers:
        return samples / sum(loops.race([peers.start("half", 1, _half, workload, rank) for rank in (0, 1)]))


def _half(connection: Connection, workload: loops.Workload, rank: int) -> None:
    """Sum the gradients of the process's portions."""
    task = resolve(workload.task)
    trainer = Trainer(task, build_model(task, 0, "cpu"), Settings(batch_size=workload.batch_size))
    sums = [(torch.zeros_like(parameter), parameter) for parameter in trainer.model.parameters()]

    def add() -> None:
        for total, parameter in sums:
            total.add_(parameter.grad)  # type: ignore[arg-type]  # there is one after backward

    loops.warm_and_run(connection, workload, trainer, add, rank)


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
        "figures": [
            figure("time of torch.optim.LBFGS (2 threads) to the same loss, relative to Sandblaster", share, TORCH)
        ],
    }


def _torchs(options: SandblasterOptions, target: float) -> float:
    """Measure torch in a separate process."""
    with Peers() as peers:
        return float(peers.start("torch", 2, _lbfgs, options.task, target).hear(PATIENCE))


class _Reached(Exception):
    """Stop of the optimization, at a low enough loss."""


def _lbfgs(connection: Connection, task: str, target: float) -> None:
    """Measure the seconds that torch's L-BFGS needs to reach a loss, on the whole batch."""
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
