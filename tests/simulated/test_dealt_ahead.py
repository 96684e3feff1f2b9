"""In rounds replicas are dealt several minibatches at once: seldom, evenly, and without keeping anything waiting."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
from drawn import SEEDS, some
from oracles import classes, mlp
from watching.observed import Observed, Watcher

import distbelief as db
from distbelief.core import records
from distbelief.core.conversations import dealing
from distbelief.core.messages import Message
from distbelief.job import Job
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Strategy, Synchronous
from distbelief.testing.accounting import Accounting

STEADY = db.ComputeModel(step=1e-3, spread="constant")
UNEVEN = db.ComputeModel(step=1e-3, spread="exponential", slow={0: 3.0})


class Said(Watcher):
    """What the coordinator deals, and how often each message is sent."""

    def __init__(self) -> None:
        self.sent_by_kind: Counter[type] = Counter()
        self.dealt: list[int] = []

    def sent(self, sender: str, to: str, message: Message) -> None:
        self.sent_by_kind[type(message)] += 1
        if isinstance(message, dealing.Deal):
            self.dealt.append(message.portion.count)


def play(
    strategy: Strategy, compute: db.ComputeModel = STEADY, crashes: Any = (), **options: Any
) -> tuple[Observed, Accounting, Said]:
    """A job on minibatches of four, its accounts, and what was said."""
    task = classes(mlp, samples=4 * options.pop("batches", 400))
    usual = {"batch_size": 4, "evaluate_every": 0, "checkpoint_every": 0, "snapshot_every": "0"}
    job = Job(task, strategy, **{**usual, **options})
    run = Observed(job, db.Simulated(compute=compute, crashes=crashes, restart_seconds=0.02))
    said = Said()
    run.watch(said)
    return run, run.accounted(), said


def rounds(accounting: Accounting) -> list[int]:
    return [len(group) for _, group in sorted(accounting.groups["shard 0"].items())]


def test_a_round_costs_few_words_with_the_coordinator() -> None:
    """400 minibatches in portions of 32 at most, which shrink at the end; one report for each, and some at the ends."""
    run, _, said = play(Synchronous(2, 1))
    assert run.outcome == "done"
    assert sum(said.dealt) == 400
    assert max(said.dealt) == 32
    assert len(said.dealt) < 60
    assert said.sent_by_kind[dealing.Progress] < 70
    assert said.sent_by_kind[dealing.Recall] == 0


@pytest.mark.parametrize(
    ("replicas", "batches", "compute"), some(product([2, 3, 5], [7, 40, 399, 402], [STEADY, UNEVEN]))
)
def test_all_come_to_the_end_of_the_data_together(replicas: int, batches: int, compute: db.ComputeModel) -> None:
    """As many rounds as if each had been dealt one minibatch after the other, or one more."""
    _, accounting, _ = play(Synchronous(replicas, 1), compute, batches=batches, epochs=2)
    assert len(rounds(accounting)) <= -(-2 * batches // replicas) + 1


@pytest.mark.parametrize("step", [1e-3, 0.2])
def test_a_checkpoint_has_what_was_dealt_ahead_given_back(step: float) -> None:
    """So it is exact, and made at once, also where a portion would take longer than a checkpoint waits for."""
    compute = db.ComputeModel(step=step, spread="constant")
    run, accounting, said = play(Synchronous(2, 2), compute, snapshot_every=f"{50 * step:g}s")
    made = [record.number for record in run.told(records.Checkpointed)]
    assert len(made) >= 3
    assert accounting.checkpoints == {*made}, "the accounting has held all but the last against what was applied"
    assert said.sent_by_kind[dealing.Recall] >= 2
    assert not [record for record in run.told(records.Note) if "exact" in record.text]
    assert sum(size < 2 for size in rounds(accounting)) <= len(made)


def test_measures_are_made_every_so_many_minibatches_though_many_are_dealt_at_once() -> None:
    """No more is dealt ahead than the next of them allows, but for the one that each keeps in reserve."""
    replicas = 2
    run, _, said = play(Synchronous(replicas, 1), evaluate_every="120minibatches")
    assert max(said.dealt) > 8
    done, at = 0, []
    for record in run.records:
        done += record.steps if isinstance(record, records.Stepped) else 0
        at += [done] if isinstance(record, records.Tested) else []
    assert len(at) == 4
    assert all(120 * number <= here <= 120 * number + 8 * replicas for number, here in enumerate(at[:-1], 1)), at


@pytest.mark.parametrize("waits", [{"backup_workers": 1}, {"quorum": 0.6}], ids=str)
def test_where_the_slow_are_left_behind_each_is_dealt_one_after_the_other(waits: dict[str, Any]) -> None:
    """Else the others would wait at the end for all that a slow one holds."""
    slow = db.ComputeModel(step=1e-3, spread="constant", slow={0: 40.0})
    run, accounting, said = play(Synchronous(3, 1, **waits), slow)
    assert {*said.dealt} == {1}
    assert run.simulation.clock.now() < 0.2 * 3 + 3 * 0.04
    assert len(said.dealt) == 400 + sum(len(accounting.pushes[key]) for key in accounting.dropped)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_death_loses_what_was_dealt_ahead(seed: int) -> None:
    """Of anybody, at any message, while checkpoints are made: the accounting holds both."""
    chance = random.Random(seed)
    replicas, shards = chance.randint(2, 4), chance.randint(1, 2)
    every = {"snapshot_every": chance.choice(("60", "150minibatches", "0.02s"))}
    if chance.random() < 0.3:
        every["evaluate_every"] = "50minibatches"
    mortal = [f"replica {chance.randrange(replicas)}", "replica 0", f"shard {chance.randrange(shards)}", "coordinator"]
    crashes = [Crash(role, chance.randint(3, 300)) for role in chance.sample(mortal, chance.randint(0, 2))]
    strategy = Synchronous(replicas, shards, push_every=chance.choice((1, 1, 3)), restarts=5)
    compute = db.ComputeModel(step=chance.choice((1e-3, 0.1)), spread="exponential")
    run, accounting, said = play(strategy, compute, crashes, batches=chance.randint(60, 200), epochs=2, **every)
    assert run.outcome == "done"
    assert accounting.checkpoints
    assert max(said.dealt) > 1
