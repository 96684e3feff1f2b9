"""The sweep: random jobs under random faults, with checkers outside that know every message and every byte.

A seed makes one job, one network, one compute model and some deaths. To replay one that failed, with its settings
printed:

    DISTBELIEF_SEED=123 python -m pytest tests/simulated/test_sweep.py -k no_fault

DISTBELIEF_SEEDS runs more of them than CI does.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import torch
from drawn import in_chunks, scaled, sweep
from torch import nn
from watching.floors import hold_floors
from watching.observed import Observed
from watching.replay import Replay

from distbelief.core.optimizer import Optimizer
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Downpour
from distbelief.tasks import Task
from distbelief.tasks.task import TensorData
from distbelief.testing.simulations import Endings, draw_compute, draw_network, draw_outages, draw_revivals, ways

CHUNK = 250
FLOORS = {
    "EPOCHS_DONE": 150, "REPLICAS_DIED": 20, "done, and nobody died": 60, "done after a replica died": 50,
    "done after the coordinator died": 20,
}  # fmt: skip
"""How many of `CHUNK` seeds end in each way, at least."""

# written out, so that the twins owe nothing to distbelief.server.optimizers
TWINS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.05, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.05),
}


def tiny(samples: int, norm: bool) -> Task:
    """A hundred parameters, so that there is something on up to four shards; with `norm`, buffers too."""

    def data(seed: int) -> TensorData:
        chance = torch.Generator().manual_seed(seed)
        return TensorData(torch.randn(samples, 6, generator=chance), torch.randint(0, 3, (samples,), generator=chance))

    def model() -> nn.Module:
        middle = [nn.BatchNorm1d(10, momentum=0.3)] if norm else [nn.Tanh()]
        return nn.Sequential(nn.Linear(6, 10), *middle, nn.Linear(10, 3))

    return Task(model=model, train=lambda: data(0), test=lambda: data(1))


def draw(seed: int) -> tuple[Job, Simulated]:
    chance = random.Random(seed)
    pick = chance.choice
    replicas, batch = chance.randint(1, 5), pick((2, 3, 8))
    fetch_every = pick((1, 1, 2, 3))
    strategy = Downpour(
        replicas=replicas,
        shards=chance.randint(1, 6),
        optimizer=Optimizer(pick(tuple(TWINS)), 0.05),
        push_every=pick((1, 1, 2, 3)),
        fetch_every=fetch_every,
        prefetch=pick((0, 1)),
        local_lr=pick((0.0, 0.01)) if fetch_every > 1 else 0.0,
        warm_start_steps=pick((0, 0, 3, 8)),
        restarts=pick((0, 0, 1, 3)),
    )
    samples = chance.randint(2 * batch, 50)
    job = Job(
        # batch norm refuses a last minibatch of one sample
        task=tiny(samples, norm=samples % batch != 1 and pick((False, True))),
        strategy=strategy,
        epochs=pick((1, 2, 3)),
        batch_size=batch,
        seed=seed,
        evaluate_every=pick((0, 1)),
        checkpoint_every=pick((0, 1)),
        target_accuracy=0.0,
    )
    network, compute = draw_network(chance), draw_compute(chance, slow=0.2)
    dying = chance.sample(range(replicas), pick((0, chance.randint(0, replicas), replicas)))
    # half of the deaths strike early: while joining, initialising and taking the first steps
    lives = [i for i in dying for _ in range(chance.randint(1, 1 + strategy.restarts))]
    crashes = tuple(Crash(f"replica {i}", chance.randint(1, pick((12, 80)))) for i in lives)
    restart_seconds = pick((0.0, 1e-3, 0.05, 2.0))
    network = msgspec.structs.replace(
        network, outages=draw_outages(chance, replicas, strategy.shards, [crash.role for crash in crashes])
    )
    crashes += draw_revivals(random.Random(f"coordinator {seed}"), strategy.restarts)
    return job, Simulated(network=network, compute=compute, crashes=crashes, restart_seconds=restart_seconds)


def hold(seed: int) -> Counter[str]:
    """Run a seed, and hold everything that must hold; returns the ways in which it ended."""
    job, cluster = draw(seed)
    run = Observed(job, cluster, limit=20_000)
    replay = Replay(run.simulation.network, TWINS[job.strategy.optimizer.name])
    run.watch(replay)
    endings = Endings(run)
    run.run()
    cause, died, shards = endings.hold(), run.simulation.killed, run.simulation.shards
    counted = run.trained()
    # what a former life reports after its successor's death was heard of is refused: its minibatches have been dealt
    # again
    assert counted == run.rules.counted or (died and counted < run.rules.counted)
    for i, shard in enumerate(shards):
        role = f"shard {i}"
        assert shard.version.updates == run.rules.applied[role] == sum(shard.staleness.values())
        assert shard.samples == run.rules.samples[role]
        if role in replay.twins:
            assert torch.equal(shard.held.moving(), replay.twins[role].values), (
                f"{role} holds what its pushes do not give"
            )
    return ways(run, cause)


@in_chunks(CHUNK)
def test_no_fault_loses_or_repeats_a_gradient_and_every_job_ends(seeds: range) -> None:
    found = sweep(seeds, hold, draw)
    hold_floors(found, scaled(FLOORS, seeds, CHUNK))


def test_a_word_of_a_former_life_that_waits_is_not_taken_for_one_of_the_next() -> None:
    """Seed 12: the coordinator took it for that of a replica that had come again, which it dropped for it."""
    hold(12)
