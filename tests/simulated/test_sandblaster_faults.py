"""Whoever dies, every portion counts exactly once at every shard, and the job ends with the bits of calm."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from drawn import SEEDS, in_chunks, scaled, sweep
from oracles import smooth
from torch import Tensor, nn
from watching.floors import hold_floors
from watching.observed import Observed, Watcher

from distbelief.core import records
from distbelief.core.conversations import operations
from distbelief.core.messages import Message
from distbelief.core.records import Cause
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Sandblaster
from distbelief.tasks import Task
from distbelief.tasks.order import Order
from distbelief.tasks.task import as_data
from distbelief.testing.simulations import (
    Endings,
    attach,
    draw_compute,
    draw_network,
    draw_outages,
    draw_revivals,
    ways,
)

SAMPLES, SIZE, ITERATIONS = 83, 4, 4
CHUNK = 60
FLOORS = {
    "EPOCHS_DONE": 20, "REPLICAS_DIED": 3, "SHARD_SPENT": 6, "SHARD_UNSAVED": 2, "done, and nobody died": 2,
    "done after a replica died": 8,
    "done after the coordinator died": 6, "done after all went back": 3, "done after a standby succeeded": 6,
}  # fmt: skip
"""How many of `CHUNK` seeds end in each way, at least."""


def task() -> Task:
    return smooth(SAMPLES, torch.float64)


def whole_gradient(x: Tensor, numbers: Tensor) -> Tensor:
    """The sum over samples of the gradient of their losses, by plain autograd."""
    model = task().model()
    nn.utils.vector_to_parameters(x, model.parameters())
    inputs, targets = as_data(task().train()).batch(numbers)
    nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


class Accounts(Watcher):
    """Holds the sums of every shard at the end of an evaluation against plain autograd on the whole batch."""

    def __init__(self, run: Observed, batch: int = 0) -> None:
        self._run, self._batch = run, batch
        self._order = Order(SAMPLES, SIZE, run.simulation.job.seed)
        self.evaluations = self.copies = 0
        self._taken: set[tuple[str, int, int]] = set()
        self._windows: dict[str, list[dict[tuple[int, int], list[int]]]] = {}
        attach(run.simulation.network, self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, operations.Assign):
            window = self._windows.setdefault(str(message.evaluation), [{}, {}, {}])
            portion = message.work_unit.portion
            for index in range(portion.first, portion.first + portion.count):
                window[message.work_unit.part][portion.epoch, index] = self._order.indices(
                    portion.epoch, index
                ).tolist()

    def delivered(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, operations.Contribute):
            key = to, message.evaluation, message.number
            self.copies += key in self._taken
            self._taken.add(key)
        elif isinstance(message, operations.Operate) and message.commands and self._completes(message.commands[0]):
            index = int(to.split()[1])
            if message.number > self._run.simulation.shards[index].sums._newest.number:  # type: ignore[attr-defined]
                self._hold(index)  # or it is told again, and was done by the life before

    @staticmethod
    def _completes(command: Any) -> bool:
        return isinstance(command, operations.Scale | operations.Combine) and command.into == "g"

    def _hold(self, index: int) -> None:
        shards: list[Any] = self._run.simulation.shards
        if any(shard.waits() for shard in shards):
            return  # one has fallen, and all are about to go back
        self.evaluations += not index
        x = [torch.cat([torch.zeros(0), *map(torch.flatten, shard.held.vector("x"))]) for shard in shards]
        start = sum(map(len, x[:index]))
        if not self._batch:
            sums, windows = ["g"], [list(range(SAMPLES))]
        else:
            evaluation = self._run.simulation.coordinator.data.evaluation  # type: ignore[union-attr]
            windows = [
                [number for numbers in part.values() for number in numbers] for part in self._windows[str(evaluation)]
            ]
            sums = ["g.head", "g.middle", "g.tail"]
            assert sum(map(len, windows)) <= self._batch
        for name, numbers in zip(sums, windows, strict=True):
            own = torch.cat([torch.zeros(0), *map(torch.flatten, shards[index].held.vector(name))])
            expected = whole_gradient(torch.cat(x), torch.tensor(sorted(numbers)))[start : start + len(own)]
            torch.testing.assert_close(own * SIZE, expected, rtol=1e-9, atol=1e-9)


def play(strategy: Sandblaster, cluster: Simulated | None = None, **options: Any) -> tuple[Observed, Accounts, Cause]:
    job = Job(task=task(), strategy=strategy, **{"evaluate_every": 0, "checkpoint_every": 1, **options})
    run = Observed(job, cluster)
    accounts, endings = Accounts(run, strategy.batch_size), Endings(run)
    run.simulation.run()
    return run, accounts, endings.hold()


@functools.cache
def calm(strategy: Sandblaster) -> bytes:
    run, accounts, cause = play(dataclasses.replace(strategy, replicas=1, backup_portions=0, restarts=3))
    assert (cause, accounts.copies) == (Cause.EPOCHS_DONE, 0)
    assert accounts.evaluations > ITERATIONS - (strategy.batch_size > 0)
    return run.vector()


def draw(seed: int) -> tuple[Sandblaster, dict[str, Any], Simulated]:
    chance = random.Random(seed)
    pick = chance.choice
    replicas, shards = chance.randint(1, 5), chance.randint(1, 3)
    strategy = Sandblaster(
        replicas, shards, ITERATIONS, portion_size=SIZE, send_every=pick((1, 2, 4)), backup_portions=pick((0, 1, 1, 2)),
        tolerance=0.0,
        batch_size=pick((0, 0, 40)), method=pick(("lbfgs", "lbfgs", "cg")),
        deterministic=True, restarts=pick((0, 1, 3, 3)),
    )  # fmt: skip
    network, compute = draw_network(chance), draw_compute(chance, slow=0.3)
    dying = chance.sample(range(replicas), pick((0, chance.randint(0, replicas), replicas)))
    lives = [i for i in dying for _ in range(chance.randint(1, 1 + strategy.restarts))]
    crashes = tuple(Crash(f"replica {i}", chance.randint(1, pick((6, 40)))) for i in lives)
    if chance.random() < 0.5:
        fallen = chance.choices(range(shards), k=chance.randint(1, 3))
        crashes += tuple(
            Crash(f"shard {i}", chance.randint(1, 80)) for i in fallen if fallen.count(i) <= 1 + strategy.restarts
        )
    if (more := random.Random(f"standby {seed}")).random() < 0.5:
        strategy = dataclasses.replace(strategy, standby=1)
        fallen_roles = [crash.role for crash in crashes]
        for role in more.choices(
            [f"{kind} {i}" for kind in ("shard", "standby") for i in range(shards)], k=more.randint(1, 4)
        ):
            if fallen_roles.count(role) <= strategy.restarts:
                fallen_roles.append(role)
                crashes += (Crash(role, more.randint(1, more.choice((30, 120)))),)
    crashes += draw_revivals(random.Random(f"coordinator {seed}"), strategy.restarts)
    options = {"snapshot_every": pick(("0", "3", "10ms", "1s")), "checkpoint_every": pick((0, 1, 2))}
    network = msgspec.structs.replace(
        network, outages=draw_outages(chance, replicas, shards, [crash.role for crash in crashes])
    )
    return (
        strategy,
        options,
        Simulated(network=network, compute=compute, crashes=crashes, restart_seconds=pick((0.0, 1e-3, 0.05, 2.0))),
    )


def draw_split(seed: int) -> tuple[Sandblaster, dict[str, Any], Simulated]:
    """The same with replicas of two partitions, one or the other of which has the faults of a replica."""
    strategy, options, cluster = draw(seed)
    chance = random.Random(f"split {seed}")
    split = dataclasses.replace(strategy, partitions=2, split="stages", shards=max(2, strategy.shards))

    def part(role: str) -> str:
        return f"{role}.{chance.randrange(2)}" if role.startswith("replica") else role

    crashes = tuple(Crash(part(crash.role), crash.message) for crash in cluster.crashes)
    outages = tuple(
        msgspec.structs.replace(outage, side=tuple(map(part, outage.side))) for outage in cluster.network.outages
    )
    network = msgspec.structs.replace(cluster.network, outages=outages)
    return split, options, dataclasses.replace(cluster, crashes=crashes, network=network)


DRAWS = {"whole": draw, "split": draw_split}


def hold(seed: int, replicas: str = "whole") -> Counter[str]:
    """Hold everything of a seed; returns the ways in which it ended, and the `copies` that were contributed."""
    strategy, options, cluster = DRAWS[replicas](seed)
    run, accounts, cause = play(strategy, cluster, **options)
    if run.outcome == "done":
        assert run.vector() == calm(strategy), "the bits are not those of calm"
    return ways(run, cause) + Counter(copies=accounts.copies)


def hold_all(seeds: range, replicas: str) -> None:
    found = sweep(seeds, lambda seed: hold(seed, replicas), DRAWS[replicas])
    hold_floors(found, scaled(FLOORS | {"copies": CHUNK}, seeds, CHUNK))


@in_chunks(CHUNK)
@pytest.mark.long
def test_no_fault_loses_or_repeats_a_portion_and_the_result_has_the_same_bits(seeds: range) -> None:
    hold_all(seeds, "whole")


@in_chunks(CHUNK, SEEDS // 2)
@pytest.mark.long
def test_no_fault_loses_or_repeats_a_portion_of_split_replicas(seeds: range) -> None:
    hold_all(seeds, "split")


@pytest.mark.parametrize("seed", [21, 36, 90])
@pytest.mark.long
def test_what_split_replicas_waited_for_for_ever(seed: int) -> None:
    """Who follows and has lost its shard asks its lead; who dies again begins the same life as the others."""
    hold(seed, "split")


@pytest.mark.parametrize(
    ("standby", "crashes"), [(0, (Crash("shard 0", 14),)), (1, (Crash("shard 0", 22), Crash("shard 0", 8)))]
)
def test_a_replica_in_the_midst_of_a_work_unit_is_told_at_once_to_begin_anew_and_to_end(
    standby: int, crashes: tuple[Crash, ...]
) -> None:
    """What comes behind the welcome is for the replica that begins anew: it waited for work for ever."""
    strategy = Sandblaster(3, 1, 6, portion_size=4, send_every=4, tolerance=0.0, standby=standby)
    slow = Simulated(crashes=crashes, compute=ComputeModel(step=1e-3, slow={0: 300.0}), restart_seconds=1e-3)
    job = Job(task(), strategy, evaluate_every=0, checkpoint_every=1, snapshot_every="3")
    run = Observed(job, slow).run()
    assert run.outcome == "done"
    assert run.told(records.Rewound)
