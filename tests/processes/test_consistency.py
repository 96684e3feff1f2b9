"""Every consistency on real processes: it learns, it counts, and nobody waits for the dead or the slow longer than it
says.
"""

import random
from pathlib import Path

import jobs
import pytest

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.job import Job
from distbelief.places.processes.local import Local
from distbelief.places.processes.requirements import TRANSPORTS
from distbelief.strategies import Bounded, Softsync, Strategy, Synchronous

ADAGRAD = optim("adagrad", lr=0.05)
STRATEGIES = [
    Synchronous(replicas=2, shards=2, optimizer=ADAGRAD),
    Synchronous(replicas=3, shards=3, optimizer=ADAGRAD, push_every=2),
    Synchronous(replicas=4, shards=2, optimizer=ADAGRAD, backup_workers=1),
    Softsync(replicas=4, shards=2, optimizer=ADAGRAD, n=2, staleness_scaling="inverse"),
    Softsync(replicas=2, shards=1, optimizer=ADAGRAD, n=1, prefetch=1),
    Bounded(replicas=3, shards=2, optimizer=ADAGRAD, staleness=0),
    Bounded(replicas=3, shards=2, optimizer=ADAGRAD, staleness=2, prefetch=1, fetch_every=3),
]

EPOCHS = 16
"""Some more than all need: in rounds, who is dealt what depends on who is fast."""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_consistency_learns_digits(tmp_path: Path, strategy: Strategy, transport: str) -> None:
    job = Job(
        task="digits",
        strategy=strategy,
        epochs=EPOCHS,
        batch_size=32,
        evaluate_every=4,
        checkpoint_every=4,
        out=str(tmp_path),
    )
    result = Local(transport=transport).run(job)
    assert (result["outcome"], result["samples"], result["steps"]) == ("done", EPOCHS * 1437, EPOCHS * 45)
    assert result["test_accuracy"] > 0.92
    if isinstance(strategy, Synchronous):
        assert result["staleness"]["max"] == 0
        assert result["updates"] < result["pushes"]


def test_rounds_do_not_wait_for_backup_workers_and_lose_no_minibatch(tmp_path: Path) -> None:
    strategy = Synchronous(replicas=3, shards=2, backup_workers=1)
    result = jobs.run(tmp_path, strategy, task="jobs:uneven", epochs=6)
    assert result["dropped"] > 0
    assert result["samples"] == 6 * jobs.SAMPLES
    slow, *others = result["per_replica"]
    assert slow["steps"] < min(one["steps"] for one in others)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "strategy",
    [Synchronous(3, 2), Synchronous(3, 2, backup_workers=1), Softsync(3, 2), Bounded(3, 2, staleness=0)],
    ids=str,
)
def test_nobody_waits_for_a_killed_replica(tmp_path: Path, watch: jobs.Watch, seed: int, strategy: Strategy) -> None:
    chance = random.Random(seed)
    victim, kind = (
        chance.randrange(3),
        chance.choice([records.Joined, records.Stepped, records.Stepped, records.EpochDone]),
    )
    watch.once(kind, lambda: jobs.kill(f"replica {victim}"), chance.randrange(1 if kind is records.Joined else 8))
    result = jobs.run(tmp_path, strategy, epochs=30, evaluate_every=0)
    assert [record.role for record in watch.of(records.Gone) if record.died] == [f"replica {victim}"]
    assert (result["outcome"], result["samples"]) == ("done", 30 * jobs.SAMPLES)
    assert all(record.samples >= 30 * jobs.SAMPLES for record in watch.of(records.Applied))


def test_a_synchronous_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """On another number of replicas and shards."""
    first = jobs.run(tmp_path, Synchronous(3, 3), epochs=3)
    more = jobs.run(tmp_path, Synchronous(2, 2), epochs=6, resume=True)
    assert (first["samples"], more["samples"], more["outcome"]) == (3 * jobs.SAMPLES, 6 * jobs.SAMPLES, "done")
    assert more["updates"] > first["updates"]
