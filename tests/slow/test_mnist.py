"""MNIST to the accuracy that is promised: real processes, five seeds. Minutes, so not part of `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

import distbelief as db


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_two_replicas_with_adagrad_reach_97_5_percent_in_five_epochs(seed: int, tmp_path: Path) -> None:
    strategy = db.Downpour(replicas=2, shards=2, optimizer=db.optim("adagrad", lr=0.02))
    result = db.run(
        db.Job(task="mnist", strategy=strategy, epochs=5, evaluate_every=5, seed=seed, out=str(tmp_path / "run"))
    )
    assert result["samples"] == 5 * 60_000
    assert result["test_accuracy"] >= 0.975
