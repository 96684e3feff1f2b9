"""What options of `hogwild` and `locking` do, one by one; that none is dead is in test_options, and those of locks are
in test_hogwild.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from watching.observed import Observed, mapping_of

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Hogwild


def play(plain: SimpleNamespace, cluster: Simulated | None = None, **options: Any) -> tuple[Observed, torch.Tensor]:
    """A job of two replicas, and its parameters at its end."""
    own = {
        "replicas": 2,
        **{name: options.pop(name) for name in ("replicas", "optimizer", "restarts") if name in options},
    }
    job = Job(**{"task": plain.classes(plain.mlp, samples=40), "strategy": Hogwild(**own), "batch_size": 4, **options})
    run = Observed(job, cluster or Simulated(compute=ComputeModel(spread="constant")))
    run.run()
    return run, mapping_of(run.simulation).clone()


@pytest.mark.parametrize("options", [{"initial_accumulator_value": 0.5}, {"lr_decay": 0.1}, {"eps": 0.1}], ids=str)
def test_the_options_of_adagrad_are_torchs(plain: SimpleNamespace, options: dict[str, float]) -> None:
    task = plain.classes(plain.mlp, samples=40)
    theirs = plain.sequential(task, "adagrad", lr=0.05, epochs=2, **options)
    run, ours = play(plain, replicas=1, optimizer=optim("adagrad", lr=0.05, **options), epochs=2)
    for entry in run.simulation.coordinator.plan.layout.entries:  # type: ignore[union-attr]
        found = ours[entry.start : entry.start + entry.tensor.size].view(torch.float32).view(entry.tensor.shape)
        assert torch.equal(found, theirs[entry.tensor.name])


@pytest.mark.parametrize(("every", "epochs"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])])
def test_evaluate_every_and_target_accuracy(plain: SimpleNamespace, every: int, epochs: list[int]) -> None:
    run, _ = play(plain, epochs=4, evaluate_every=every)
    assert [record.epoch for record in run.records if isinstance(record, records.Tested)] == epochs
    if every:
        assert play(plain, epochs=6, evaluate_every=every, target_accuracy=1e-9)[0].outcome == "target"


def made(run: Observed) -> int:
    """The checkpoints of a job."""
    return sum(isinstance(record, records.Checkpointed) for record in run.records)


def test_checkpoints_are_made_as_often_as_they_are_asked_for(plain: SimpleNamespace) -> None:
    """Beside the first, where there are any while an epoch is made."""
    assert [made(play(plain, epochs=4, checkpoint_every=n, snapshot_every="0")[0]) for n in (1, 2, 0)] == [4, 2, 1]
    assert (
        made(play(plain, epochs=4, checkpoint_every=0, snapshot_every="5")[0])
        > made(play(plain, epochs=4, checkpoint_every=0)[0]) + 2
    )


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_checkpoints_are_kept(plain: SimpleNamespace, tmp_path: Path, keep: int) -> None:
    job = Job(plain.classes(plain.mlp), Hogwild(), epochs=5, batch_size=4, keep_checkpoints=keep, out=str(tmp_path))
    Simulated().run(job)
    assert len(list((tmp_path / "checkpoints").iterdir())) == keep
