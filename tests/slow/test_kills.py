"""Every role of real jobs is killed at random moments, many times: each job reaches its accuracy all the same."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import distbelief as db
from distbelief.core import records
from distbelief.places.attempt import Attempt

KILLS = int(os.environ.get("DISTBELIEF_KILLS", "60"))
ROLES = ["replica 0", "replica 1", "shard 0", "shard 1", "standby 0", "coordinator", "evaluator"]
ADAGRAD = db.optim("adagrad", lr=0.05)
STRATEGIES = [
    db.Downpour(2, 2, ADAGRAD), db.Downpour(2, 2, ADAGRAD, push_every=2, prefetch=1), db.Synchronous(2, 2, ADAGRAD),
    db.Synchronous(2, 2, ADAGRAD, backup_workers=1), db.Softsync(2, 2, ADAGRAD), db.Bounded(2, 2, ADAGRAD, staleness=1),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_job_reaches_its_accuracy_whoever_is_killed_whenever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    role, strategy = ROLES[seed % len(ROLES)], STRATEGIES[seed // len(ROLES) % len(STRATEGIES)]
    strategy = dataclasses.replace(strategy, standby=1 if role.startswith("standby") else chance.randint(0, 1))
    place = db.Local(chance.choice(("shared", "tcp")))
    left, killed = [chance.randint(1, 150)], list[int]()
    record = Attempt.record

    def watched(self: Attempt, moment: float, who: str, what: records.Record) -> None:
        record(self, moment, who, what)
        kept.append(isinstance(what, records.Checkpointed))
        if any(kept) and not killed:
            left[0] -= 1
            if left[0] <= 0:
                for process in multiprocessing.active_children():
                    if process.name == role and process.pid:
                        os.kill(process.pid, signal.SIGKILL)
                        killed.append(process.pid)

    kept: list[bool] = []
    monkeypatch.setattr(Attempt, "record", watched)
    options: dict[str, Any] = {
        "epochs": 12,
        "batch_size": 16,
        "snapshot_every": "100",
        "seed": seed,
        "out": str(tmp_path / "run"),
    }
    result = db.run(db.Job(task="digits", strategy=strategy, **options), on=place)
    assert result["outcome"] == "done"
    assert result["test_accuracy"] >= 0.9, f"{role} of {strategy} was killed"
    assert killed, "nobody was killed: the job was over before"
