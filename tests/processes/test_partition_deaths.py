"""Partitions are killed at drawn moments, in every way to split: the job ends by itself with what it promises."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import jobs
import pytest

from distbelief.core import records, roles
from distbelief.core.optimizer import optim
from distbelief.core.records import Record
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Downpour, Single, Synchronous

DEATHS = int(os.environ.get("DISTBELIEF_DEATHS", "2"))
WAYS = {
    "stages": ("jobs:tiny", "stages"),
    "neurons": ("jobs:tiny", "neurons"),
    "filters": ("jobs:pictured", "1=filters,6=neurons"),
    "regions": ("jobs:pictured", "1=regions,3=regions,6=neurons"),
    "branches": ("jobs:branching", "branches"),
    "time": ("jobs:recurrent", "time"),
    "groups": ("jobs:pictured", "groups"),
    "samples": ("jobs:tiny", "0=samples,2=neurons"),
}
STRATEGIES = [Downpour, Synchronous, Allreduce, Single]
EPOCHS, BATCHES = jobs.LONG, -(-jobs.SAMPLES // jobs.BATCH)


@pytest.mark.parametrize("seed", range(DEATHS))
def test_a_job_does_what_it_promises_whichever_partition_is_killed_at(
    tmp_path: Path, watch: jobs.Watch, seed: int
) -> None:
    chance = random.Random(f"a partition dies {seed}")
    way, kind = list(WAYS)[seed % len(WAYS)], STRATEGIES[(seed + seed // len(WAYS)) % len(STRATEGIES)]
    task, split = WAYS[way]
    replicas = 1 if kind is Single else 2
    named: dict[str, Any] = {} if kind is Single else {"replicas": replicas, "restarts": chance.randint(0, 1)}
    strategy: Any = kind(**named, partitions=2, split=split, optimizer=optim("sgd", lr=0.05))
    victim = f"replica {chance.randrange(replicas)}.{chance.randrange(2)}"
    after = chance.choice((records.Joined, records.Stepped, records.Stepped, records.EpochDone, records.Checkpointed))
    left = 1 if after is records.Checkpointed else chance.randint(1, {records.Joined: replicas}.get(after, 12))
    killed: list[int] = []

    def act(record: Record) -> None:
        nonlocal left
        if isinstance(record, after):
            left -= 1
            if left <= 0 and not killed and (found := jobs.kill(victim, signal.SIGKILL)):
                killed.append(found)

    watch.act = act
    result = jobs.run(
        tmp_path, strategy, task=task, epochs=EPOCHS, seed=seed, evaluate_every=0, snapshot_every="100",
        on=Local(transport=chance.choice(("shared", "tcp"))),
    )  # fmt: skip
    case = f"{victim} after {after.__name__}: {strategy}"
    assert killed, f"nobody was killed: {case}"
    assert result["outcome"] == "done", case
    died = [one for one in watch.of(records.Gone) if one.died]
    assert [one.role for one in died] == [roles.lead_of(victim)], case
    assert result["samples"] == EPOCHS * jobs.SAMPLES, case
    # a split `single` goes back to its checkpoint, and makes again the steps since that, of 100 updates at most
    again = result["steps"] - EPOCHS * BATCHES
    assert 0 <= again <= (200 if kind is Single else 0), case
    _hold_counts(kind, result, watch.accounts(), died[0].lost, case)


def _hold_counts(kind: type, result: dict[str, Any], applied: list[records.Applied], lost: int, case: str) -> None:
    """What the holders of the parameters have applied: exactly what counts, but for what pushes have done before a
    death, of which each holder sees at most what is dealt again.
    """
    exact = kind in (Allreduce, Single)
    assert applied, case
    for one in applied:
        twice = one.samples - EPOCHS * jobs.SAMPLES
        assert 0 <= twice <= (0 if exact else lost * jobs.BATCH), f"{one}: {case}"
    if kind is Single:
        assert result["updates"] == EPOCHS * BATCHES, case
    elif kind is Downpour:
        assert result["steps"] <= result["updates"] <= result["steps"] + lost, case
    else:
        assert result["steps"] / 2 <= result["updates"] <= result["steps"] + (0 if exact else lost), case


def test_partitions_whose_link_breaks_while_both_live_begin_a_new_life(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTED", str(tmp_path / "mark"))
    strategy = Downpour(replicas=2, partitions=2, split="stages", optimizer=optim("sgd", lr=0.05))
    result = jobs.run(tmp_path / "run", strategy, task="jobs:parting", epochs=EPOCHS, evaluate_every=0)
    assert (tmp_path / "mark").exists()
    assert result["outcome"] == "done"
    assert [one.role for one in watch.of(records.Gone) if one.died] == ["replica 0.0"]
