"""Every consistency on real processes: it learns, it counts, and nobody waits for the dead or the slow longer than it
says.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import jobs
import pytest
import torch
from safetensors.torch import load_file

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.errors import TrainingError
from distbelief.job import Job
from distbelief.places.processes.local import Local
from distbelief.places.processes.requirements import TRANSPORTS
from distbelief.strategies import Bounded, Downpour, Softsync, Strategy, Synchronous

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


@dataclass(frozen=True)
class OwnRounds(Synchronous):
    """A strategy from outside the package, which may have others play its replicas."""


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


@pytest.mark.parametrize(
    ("task", "optimizer", "shards"),
    [
        ("jobs:tiny", "adam", 3),
        ("jobs:dropped", "momentum", 1),
        ("jobs:tiny", "lars", 2),
        ("jobs:renormed", "sgd", 2),
        ("jobs:partly_frozen", "sgd", 2),
    ],
)
def test_a_replica_that_computes_where_the_shards_step_has_the_bits_of_one_that_is_sent_them(
    tmp_path: Path, task: str, optimizer: str, shards: int
) -> None:
    """Over TCP it is; a model with buffers, or that writes to its parameters, computes on copies of its own."""
    strategy = Synchronous(replicas=1, shards=shards, optimizer=optim(optimizer, lr=0.05))
    held = []
    for transport in TRANSPORTS:
        jobs.run(tmp_path / transport, strategy, Local(transport), task=task, epochs=3)
        held.append(load_file(tmp_path / transport / "model.safetensors"))
    first, *others = held
    assert others
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())


def test_replicas_find_what_the_shards_step_in_rounds_of_all_only() -> None:
    of_all, late = Synchronous(4), (Synchronous(4, backup_workers=1), Synchronous(4, quorum=0.5))
    made = Job("digits", of_all).settings()
    assert of_all.needs_memory(made, "shared")
    assert not of_all.needs_memory(made, "tcp")
    apart = Synchronous(4, standby=1), Synchronous(4, partitions=2), OwnRounds(4)
    for one in (*late, *apart, Bounded(4), Softsync(4)):
        assert not one.needs_memory(Job("digits", one).settings(), "shared")


@pytest.mark.parametrize("task", ["jobs:steady", "jobs:steady_with_buffers"])
def test_no_parameter_changes_while_one_of_several_replicas_computes(tmp_path: Path, task: str) -> None:
    """Its forward pass looks at them at its beginning and its end."""
    result = jobs.run(tmp_path, Synchronous(replicas=3, shards=2, optimizer=ADAGRAD), task=task, epochs=6)
    assert (result["outcome"], result["samples"]) == ("done", 6 * jobs.SAMPLES)


@pytest.mark.parametrize("task", ["jobs:clamped", "jobs:clamped_past_autograd"])
def test_a_model_that_writes_to_a_parameter_where_others_read_it_is_named(tmp_path: Path, task: str) -> None:
    says = r"writes to its parameter '1.weight' as it computes.*train with "
    with pytest.raises(TrainingError, match=says + "--transport tcp"):
        jobs.run(tmp_path / "rounds", Synchronous(2, 1), task=task)
    with pytest.raises(TrainingError, match=says + "--path served"):
        jobs.run(tmp_path / "direct", Downpour(2, 1), task=task)
    for strategy, local in ((Synchronous(2, 1), Local("tcp")), (Downpour(2, 1), Local(path="served"))):
        assert jobs.run(tmp_path / local.carrier, strategy, local, task=task)["outcome"] == "done"


def test_a_synchronous_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """On another number of replicas and shards."""
    first = jobs.run(tmp_path, Synchronous(3, 3), epochs=3)
    more = jobs.run(tmp_path, Synchronous(2, 2), epochs=6, resume=True)
    assert (first["samples"], more["samples"], more["outcome"]) == (3 * jobs.SAMPLES, 6 * jobs.SAMPLES, "done")
    assert more["updates"] > first["updates"]
