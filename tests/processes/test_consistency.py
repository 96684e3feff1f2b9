"""Rounds on real processes: nobody's parameters change as he computes. The rest is held in tests/simulated."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jobs
import pytest

from distbelief.core.optimizer import optim
from distbelief.errors import TrainingError
from distbelief.job import Job
from distbelief.places.processes.local import Local
from distbelief.strategies import Bounded, Downpour, Softsync, Strategy, Synchronous


@dataclass(frozen=True)
class OwnRounds(Synchronous):
    """A strategy from outside the package, which may have others play its replicas."""


@pytest.mark.parametrize(
    ("task", "optimizer", "shards"),
    [
        ("jobs:tiny", "lars", 3),
        ("jobs:dropped", "momentum", 1),
        ("jobs:renormed", "adam", 2),
        ("jobs:partly_frozen", "sgd", 2),
    ],
)
def test_a_replica_that_computes_where_the_shards_step_has_the_bits_of_one_that_is_sent_them(
    tmp_path: Path, task: str, optimizer: str, shards: int
) -> None:
    """On the virtual cluster it is sent them; a model with buffers, or that writes, computes on copies of its own."""
    job = partial(jobs.job, strategy=Synchronous(1, shards, optimizer=optim(optimizer, lr=0.05)), task=task)
    for place, name in ((Local(), "memory"), (jobs.PLAIN, "sent")):
        place.run(job(tmp_path / name, evaluate_every=0, checkpoint_every=0))
    assert jobs.same(tmp_path / "memory", tmp_path / "sent")


def test_replicas_find_what_the_shards_step_in_rounds_of_all_only() -> None:
    of_all, late = Synchronous(4), (Synchronous(4, backup_workers=1), Synchronous(4, quorum=0.5))
    made = Job("digits", of_all).settings()
    assert of_all.needs_memory(made, "shared")
    assert not of_all.needs_memory(made, "tcp")
    apart = Synchronous(4, standby=1), Synchronous(4, partitions=2), OwnRounds(4)
    for one in (*late, *apart, Bounded(4), Softsync(4)):
        assert not one.needs_memory(Job("digits", one).settings(), "shared")


def test_no_parameter_changes_while_one_of_several_replicas_computes(tmp_path: Path) -> None:
    """Its forward pass looks at them at its beginning and its end."""
    result = jobs.run(tmp_path, Synchronous(replicas=3, shards=2), task="jobs:steady", epochs=2, evaluate_every=0)
    assert (result["outcome"], result["samples"]) == ("done", 2 * jobs.SAMPLES)


@pytest.mark.parametrize(
    ("task", "strategy", "remedy", "place"),
    [
        ("jobs:clamped", Synchronous(2, 1), "--transport tcp", Local("tcp")),
        ("jobs:clamped_past_autograd", Downpour(2, 1), "--path served", Local(path="served")),
    ],
    ids=["rounds", "direct"],
)
def test_a_model_that_writes_to_a_parameter_where_others_read_it_is_named(
    tmp_path: Path, task: str, strategy: Strategy, remedy: str, place: Local
) -> None:
    says = f"writes to its parameter '1.weight' as it computes.*train with {remedy}"
    with pytest.raises(TrainingError, match=says):
        jobs.run(tmp_path / "wrong", strategy, task=task, evaluate_every=0)
    assert jobs.run(tmp_path / "right", strategy, place, task=task, evaluate_every=0)["outcome"] == "done"
