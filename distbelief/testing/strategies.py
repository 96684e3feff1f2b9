"""Conformance suite of strategies, which runs on the virtual cluster."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load_file
from torch import nn

from distbelief.core import records, roles
from distbelief.core.records import Json, Outcome
from distbelief.core.roles import Kind
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.record.checkpoints import MODEL
from distbelief.strategies.base import Strategy
from distbelief.tasks import Task
from distbelief.tasks.task import TensorData
from distbelief.testing.accounting import Accounting
from distbelief.testing.simulations import (
    Endings,
    Observed,
    draw_compute,
    draw_network,
    draw_outages,
    draw_revivals,
    ways,
)

SAMPLES, BATCH_SIZE, EPOCHS = 43, 4, 2
"""Sizes of the jobs of this suite: the last minibatch of an epoch is smaller than the others."""
MESSAGES = 50_000
"""Messages after which a job of this suite counts as endless."""
FEW = 0.1
"""Least share of seeds that must end well, with and without a death; fewer prove nothing."""

Sequential = Callable[[Task, Strategy, int, int, int], Mapping[str, torch.Tensor]]
"""Training by plain PyTorch on one worker: from a task, the strategy's options, epochs, batch size and seed to the
trained state dict. Its minibatches are those of `distbelief.tasks.order.Order`.
"""


class Knob(NamedTuple):
    """Another value of an option, which must change the training."""

    value: object
    beside: Mapping[str, Any] = {}
    """Other options, set both with and without this value."""


def small_task() -> Task:
    """Make a task of a hundred parameters, without dropout, on `SAMPLES` samples."""

    def data(seed: int) -> TensorData:
        chance = torch.Generator().manual_seed(seed)
        return TensorData(torch.randn(SAMPLES, 6, generator=chance), torch.randint(0, 3, (SAMPLES,), generator=chance))

    return Task(
        model=lambda: nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)),
        train=lambda: data(0),
        test=lambda: data(1),
    )


def check_strategy(
    strategy: Strategy, sequential: Sequential, knobs: Mapping[str, Knob], seeds: int = 100, tolerance: float = 1e-5
) -> None:
    """Check what users of a strategy rely on.

    - With one replica it equals its sequential loop.
    - Each option that it adds to those of its bases changes the training or its time.
    - Under deaths and faults of the network the job ends, for a cause that these faults allow.
    - No minibatch is lost or counted twice. If replicas push to shards, each push is compared with the minibatches of
      its replica.

    Args:
        strategy: the strategy with its default options and several replicas.
        sequential: the same algorithm on one worker, written without distbelief.
        knobs: another value of each of its own options, and perhaps of others.
        seeds: number of random jobs, each with a network and some deaths.
        tolerance: relative and absolute difference that parameters may have from the sequential loop's.

    Raises:
        AssertionError: a property does not hold; the message names it and the seed.

    >>> from distbelief.strategies import Hogwild
    >>> check_strategy(Hogwild(), lambda *_: {}, {})
    Traceback (most recent call last):
    AssertionError: with one replica, its model has 0.bias, 0.weight, 2.bias, 2.weight; the loop's has nothing
    """
    check_sequential(strategy, sequential, tolerance)
    check_options(strategy, knobs)
    check_faults(strategy, seeds)


def check_sequential(strategy: Strategy, sequential: Sequential, tolerance: float = 1e-5) -> None:
    """Compare one replica with the sequential loop, under two seeds."""
    alone = dataclasses.replace(strategy, replicas=1)  # type: ignore[call-arg]  # this suite is for strategies with it
    for seed in range(2):
        model, _ = _trained(alone, seed)
        expected = sequential(small_task(), alone, EPOCHS, BATCH_SIZE, seed)
        names = f"with one replica, its model has {_listed(model)}; the loop's has {_listed(expected)}"
        assert model.keys() == expected.keys(), names
        for name, value in expected.items():
            difference = (model[name] - value).abs().max().item()
            assert torch.allclose(model[name], value, rtol=tolerance, atol=tolerance), (
                f"with one replica, {name} differs from the sequential loop's by {difference:g} (seed {seed})"
            )


def check_options(strategy: Strategy, knobs: Mapping[str, Knob]) -> None:
    """Check that each of the strategy's own options, and each other given one, changes something."""
    kind = type(strategy)
    bases = {
        field.name for base in kind.__mro__[1:] if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)
    }
    options = {field.name for field in dataclasses.fields(kind)} - bases
    missing = options - knobs.keys()
    assert not missing, f"another value of {_listed(missing)} is not given: what does it change?"
    for name, knob in knobs.items():
        plain = dataclasses.replace(strategy, **knob.beside)
        assert getattr(plain, name) != knob.value, f"{name} is {knob.value!r} by default: give another value"
        before, after = _trained(plain), _trained(plain.with_options(**{name: knob.value}))
        same = before[1] == after[1] and all(
            torch.equal(value, after[0][tensor]) for tensor, value in before[0].items()
        )
        assert not same, f"{name}={knob.value!r} changes neither the model nor how it was trained: it is dead"


def check_faults(strategy: Strategy, seeds: int = 100) -> None:
    """Check that jobs under faults end as the faults allow, and count every minibatch once."""
    counts: Counter[str] = Counter()
    for seed in range(seeds):
        try:
            counts += _under_faults(strategy, seed)
        except Exception as error:
            error.add_note(f"seed {seed} of check_faults")
            raise
    for way in ("done, and nobody died", "done after a replica died"):
        assert counts[way] >= FEW * seeds, f"only {counts[way]} of {seeds} seeds were {way}: these faults prove nothing"


def _trained(strategy: Strategy, seed: int = 0) -> tuple[dict[str, torch.Tensor], Json]:
    """Return the model at the end of a job, and the fields of its result that describe the training."""
    with tempfile.TemporaryDirectory(prefix="distbelief-check-") as folder:
        job = Job(
            small_task(),
            strategy,
            epochs=EPOCHS,
            batch_size=BATCH_SIZE,
            seed=seed,
            evaluate_every=0,
            out=f"{folder}/run",
        )
        result = Simulated().run(job)
        [newest] = sorted(Path(folder, "run", "checkpoints").glob(f"*/{MODEL}"))[-1:]
        model = load_file(newest)
    return model, {
        name: result[name] for name in ("seconds", "steps", "pushes", "staleness", "events") if name in result
    }


def _under_faults(strategy: Strategy, seed: int) -> Counter[str]:
    """Run and check one seed; return the ways in which it has ended."""
    job, cluster = _draw(strategy, seed)
    run = Observed(job, cluster, limit=MESSAGES)
    endings = Endings(run)
    servers = strategy.players().servers
    accounting = Accounting(run) if servers is not None and servers.unlocked_slice is None else None
    run.simulation.run()
    cause, died = endings.hold(), run.simulation.killed
    if accounting is not None:
        accounting.finish(run.outcome, died)
    counted = sum(record.samples for record in run.recorded(records.Stepped))
    if cause.outcome is Outcome.DONE and not died:
        assert counted == EPOCHS * SAMPLES, f"nobody died, and {counted} of {EPOCHS * SAMPLES} samples were counted"
    return ways(run, cause)


def _draw(strategy: Strategy, seed: int) -> tuple[Job, Simulated]:
    """Draw the job and the faults of a seed."""
    chance = random.Random(f"strategy {seed}")
    options: dict[str, Any] = {"replicas": chance.randint(1, 4), "restarts": chance.choice((0, 1, 3))}
    options |= {"shards": chance.randint(1, 3), "standby": chance.choice((0, 0, 1))}
    names = {field.name for field in dataclasses.fields(strategy)}
    drawn = dataclasses.replace(strategy, **{name: value for name, value in options.items() if name in names})
    mortal = [role for role in drawn.roles(measured=False) if role != roles.COORDINATOR]
    dying = chance.sample(mortal, chance.choice((0, 1, chance.randint(0, len(mortal)))))
    crashes = tuple(Crash(role, chance.randint(1, chance.choice((12, 80)))) for role in dying)
    everybody = drawn.roles(measured=False)
    replicas, shards = (sum(roles.kind(role) is kind for role in everybody) for kind in (Kind.REPLICA, Kind.SHARD))
    network = msgspec.structs.replace(draw_network(chance), outages=draw_outages(chance, replicas, shards, dying))
    crashes += draw_revivals(chance, getattr(drawn, "restarts", 0))
    job = Job(small_task(), drawn, epochs=EPOCHS, batch_size=BATCH_SIZE, seed=seed, evaluate_every=0)
    return job, Simulated(network=network, compute=draw_compute(chance, slow=0.2), crashes=crashes)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
