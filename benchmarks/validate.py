"""The same jobs on real processes and in simulation, side by side: whether the simulator
tells the truth.

The simulation is told nothing that was measured on the jobs themselves: the time of a step of a plain loop alone on the
machine, how much slower cores are while all of them work (two such loops that know nothing of each other), and what a
push and a fetch to a real shard add to a step of the task. `wire` has nobody compute between two pushes: that is
less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.parts import loops, workloads
from benchmarks.parts.shards import GRADIENT, Ours
from benchmarks.parts.timing import Figure, figure, interleave, spread
from distbelief.cli.tables import number, show
from distbelief.core.effects import Batch
from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.evaluate import threads
from distbelief.places.processes.local import Local
from distbelief.places.processes.peers import Peers
from distbelief.places.simulated.handling import Handling, HandlingCosts
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Allreduce, Downpour, Single, Strategy, Synchronous
from distbelief.tasks import as_data, resolve
from distbelief.tasks.flat import layout_of
from distbelief.tasks.worker import Trainer, build_model
from distbelief.transport.processors import Hosts
from distbelief.transport.virtual import MEMORY

WITHIN = 0.15
"""How far a simulated time may lie from the real one."""
CORES, BATCH, PAD, SLOWER = 2, 64, 0.01, 4.0
"""Cores of the machine that is simulated; samples in a minibatch; seconds of a padded step; how many times slower the
slow replica is.
"""
SGD = Optimizer("sgd", 0.01)
SECONDS = 5.0
"""How long steps with and without a shard take turns."""
SMALL, MESSAGES = 4096, 4
"""Bytes of a vector that hardly counts; messages of a push and a fetch, with their answers."""


class Model(NamedTuple):
    """A model that jobs train."""

    task: str
    epochs: int


MODELS = {"mlp": Model("mnist", 2), "lenet": Model("benchmarks.parts.workloads:lenet_short", 1)}
QUICK = {
    "mlp": Model("benchmarks.parts.workloads:mlp_quick", 1),
    "lenet": Model("benchmarks.parts.workloads:lenet_quick", 1),
}
PADDED = Model("benchmarks.parts.workloads:mlp_short", 4)
"""What padded replicas train: steps that are much shorter than the pad, so that few cores hold many replicas."""


class Inputs(NamedTuple):
    """What is measured for a simulation."""

    step: float
    """Seconds of a gradient, alone on the machine."""
    together: float
    """The speed of each core while all work."""
    handling: Handling
    """What messages and their bytes cost beside such steps."""


class Case(NamedTuple):
    """One job, on both."""

    model: Model
    strategy: Strategy
    pad: ComputeModel | None = None


def strategies(replicas: int) -> dict[str, Strategy]:
    """The strategies that are compared, with so many replicas."""
    synchronous = Synchronous(replicas=replicas, shards=1, optimizer=SGD)
    backup = {"synchronous, 1 backup worker": dataclasses.replace(synchronous, backup_workers=1)}
    return {
        "downpour": Downpour(replicas=replicas, shards=1, optimizer=SGD),
        "synchronous": synchronous,
        **(backup if replicas > 2 else {}),
        "allreduce": Allreduce(replicas=replicas, optimizer=SGD),
    }


def cases(models: Mapping[str, Model], padded: Model, pad: float) -> dict[str, Case]:
    """Every job, by what is told of it."""
    found = {}
    for name, model in models.items():
        found[f"{name}, single"] = Case(model, Single(optimizer=SGD))
        found[f"{name}, downpour, 1 replica"] = Case(model, Downpour(replicas=1, shards=1, optimizer=SGD))
        found |= {f"{name}, {strategy}, 2 replicas": Case(model, made) for strategy, made in strategies(2).items()}
    alike, slow = (ComputeModel(step=pad, spread="constant", slow=one) for one in ({}, {3: SLOWER}))
    for told, compute in (("4 padded", alike), (f"4 padded, one {SLOWER:g} times slower", slow)):
        found |= {f"{told}, {strategy}": Case(padded, made, compute) for strategy, made in strategies(4).items()}
    return found


def measure(repeats: int, quick: bool, only: tuple[str, ...] = ()) -> Json:
    """Real seconds, simulated ones and their ratio, of every job whose name begins with one of `only`.

    Raises:
        UsageError: there is no such job.
    """
    models, padded, pad = (QUICK, QUICK["mlp"], 0.002) if quick else (MODELS, PADDED, PAD)
    chosen = {name: case for name, case in cases(models, padded, pad).items() if not only or name.startswith(only)}
    if not chosen:
        raise UsageError(f"--only {' '.join(only)}: no job begins so; they begin with mlp, lenet or '4 padded'")
    inputs = {model.task: _inputs(model, repeats) for model in dict.fromkeys(case.model for case in chosen.values())}
    taken = interleave({name: partial(_real, case) for name, case in chosen.items()}, repeats)
    rows = {}
    for name, case in chosen.items():
        real, simulated = statistics.median(taken[name]), _simulated(case, inputs[case.model.task])
        rows[name] = {"real": real, "spread": spread(taken[name]), "simulated": simulated, "ratio": simulated / real}
    told = {task: {"step": one.step, "together": one.together, "message": one.handling.message,
        "memory": one.handling.memory}
            for task, one in inputs.items()}  # fmt: skip
    return {"inputs": told, "pad": pad, "rows": rows}


def _inputs(model: Model, repeats: int) -> Inputs:
    """What a plain loop does alone, and two that know nothing of each other."""
    steps = len(as_data(resolve(model.task).train())) * model.epochs // BATCH
    workload = loops.Workload(model.task, max(1, steps), BATCH, SGD.lr)
    rates = interleave({str(count): partial(loops.independent, workload, count) for count in (1, CORES)}, repeats)
    alone = statistics.median(rates["1"])
    length, handling = (
        layout_of(resolve(model.task).model()).trained.size,
        _handling(model.task),
    )
    together = statistics.median(pair / one / CORES for one, pair in zip(rates["1"], rates[str(CORES)], strict=True))
    # the loop has stepped with its gradient, which a simulation counts by itself
    return Inputs(BATCH / alone - Handling().addition * length, min(1.0, together), handling)


def _handling(name: str) -> Handling:
    """What messages and their bytes cost beside steps of a task: what a trip of a short vector adds, and what one of
    the model's adds more.
    """
    task = resolve(name)
    model = build_model(task, 0, "cpu")
    trainer, sizes = Trainer(task, model, BATCH, 0), (SMALL, layout_of(model).trained.size)
    with threads(1), Peers() as peers, contextlib.ExitStack() as stack:
        sides = [stack.enter_context(contextlib.closing(Ours(peers, "shared", size))) for size in sizes]
        added: list[list[float]] = [[] for _ in sides]
        end, index = time.perf_counter() + SECONDS, 0
        while time.perf_counter() < end:
            for ours, seconds in zip(sides, added, strict=True):
                without, served = (_step(trainer, ours, index, trip) for trip in (False, True))
                seconds.append(served - without)
            index += 1
    short, long = map(statistics.median, added)
    costs = HandlingCosts(Handling(0.0, 1.0), Settings(strategy=Downpour(optimizer=SGD)), lambda: 0)
    touched = costs.update(1) + costs.copy(1)  # by the shard, which steps and copies what it answers
    message = max(0.0, short - 2 * MEMORY.latency) / MESSAGES
    return Handling(message, touched * (sizes[1] - sizes[0]) / max(1e-9, long - short))


def _step(trainer: Trainer, ours: Ours, index: int, trip: bool) -> float:
    """Seconds in which a step leaves its gradient, makes a trip or none, and reads what it would compute with."""
    trainer.compute(Batch(0, index % trainer.order.batches))
    start = time.perf_counter()  # not before: two gradients differ by more than a trip takes
    ours.gradient.fill_(GRADIENT)
    if trip:
        ours.trips(1)
    ours.parameters.view(torch.float32).sum()
    return time.perf_counter() - start


def _job(case: Case) -> Job:
    return Job(
        case.model.task,
        case.strategy,
        epochs=case.model.epochs,
        batch_size=BATCH,
        evaluate_every=0,
        checkpoint_every=0,
        snapshot_every="0",
    )


def _real(case: Case) -> float:
    return float(workloads.run(_job(case), Local(compute=case.pad, path="served"))["seconds"])


def _simulated(case: Case, inputs: Inputs) -> float:
    """On one host, where the shards' processes make the updates, whose price was measured; a padded step needs a core
    for as long as one that is not, and is slept for the rest.

    Who reduces in shared memory wakes nobody's process for it, so that a message of an all-reduce costs what it usually
    does.
    """
    hosts = Hosts(CORES, together=inputs.together, busy=inputs.step if case.pad else 0.0)
    compute = case.pad or ComputeModel(step=inputs.step, spread="constant")
    if not case.strategy.alone:
        handling = Handling(memory=inputs.handling.memory) if isinstance(case.strategy, Allreduce) else inputs.handling
        on = Simulated(compute=compute, phantom=True, hosts=hosts, handling=handling, path="served")
    else:
        on = Simulated(compute=compute, phantom=True)
    return float(on.run(_job(case))["seconds"])


def figures(found: Json) -> list[Figure]:
    """How far each simulated time is from the real one."""
    return [
        figure(f"{name}: simulated time, away from the real one", abs(row["ratio"] - 1), WITHIN, lower=True)
        for name, row in found["rows"].items()
    ]


def tell(found: Json) -> None:
    """Print the table."""
    for task, one in found["inputs"].items():
        print(
            f"{task}: a gradient takes {1000 * one['step']:.3f} ms alone; while all cores work, each has "
            f"{one['together']:.0%} of its speed;"
            f" a message costs {1e6 * one['message']:.0f} us, and memory {one['memory'] / 1e9:.1f} GB/s"
        )
    rows = [
        [name, number(row["real"]), f"{row['spread']:.0%}", number(row["simulated"]), number(row["ratio"])]
        for name, row in found["rows"].items()
    ]
    show("seconds of training, real and simulated", ("", "real, s", "+-", "simulated, s", "of the real"), rows)
