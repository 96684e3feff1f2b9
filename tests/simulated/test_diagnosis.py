"""What is wrong with a job: each rule has a run in which it is found and one in which it is not, and a job that is well
has none.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drawn import in_chunks, sweep

import distbelief as db
from distbelief.cli import main
from distbelief.core import records
from distbelief.core.records import Record
from distbelief.errors import LossNotFinite
from distbelief.places import attempt
from distbelief.record import diagnosis
from distbelief.record.diagnosis import GRACE, Diagnosis, Level, diagnose
from distbelief.record.folder import RunFolder
from distbelief.record.metrics import read_metrics
from distbelief.record.recorder import Recorder
from distbelief.record.summary import Summary
from distbelief.record.timeline import Timeline

EVERY = 20
"""Records between two diagnoses."""
CHUNK = 8
"""Jobs that are well, at once."""


class Run(NamedTuple):
    """A job, and the virtual cluster that it runs on."""

    strategy: Any
    options: dict[str, Any]
    cluster: dict[str, Any]


def slow(factor: float, *replicas: int) -> db.ComputeModel:
    return db.ComputeModel(step=0.1, slow=dict.fromkeys(replicas, factor))


def phantom(strategy: Any, compute: db.ComputeModel, epochs: int = 20, batch_size: int = 64, **cluster: Any) -> Run:
    options = {"epochs": epochs, "batch_size": batch_size}
    return Run(strategy, options, {"compute": compute, "phantom": True, **cluster})


def digits(strategy: Any, step: float = 0.3, epochs: int = 12) -> Run:
    return Run(strategy, {"epochs": epochs}, {"compute": db.ComputeModel(step=step)})


NARROW = db.NetworkModel(bandwidth=3e4)
HEAVY = db.Handling(memory=5e6)
FAST = db.ComputeModel(step=0.05)
FOUND: dict[str, list[Run]] = {
    "rate": [digits(db.Downpour(8, 2, db.optim("sgd", lr=0.3))), digits(db.Downpour(8, 2, db.optim("sgd", lr=4.0)))],
    "momentum": [digits(db.Downpour(8, 2, db.optim("momentum", lr=0.02)))],
    "staleness": [phantom(db.Downpour(4, 2), slow(20.0, 2)), phantom(db.Softsync(4, 2, n=4), slow(20.0, 2))],
    "silent": [
        phantom(db.Synchronous(4, 2, backup_workers=1), slow(5e3, 3), 1, batch_size=3),
        phantom(db.Downpour(4, 2), slow(5e3, 3), 12),
    ],
    "idle": [phantom(db.Downpour(8, 2), slow(50.0, 4, 5, 6, 7), 40)],
    "shards": [
        phantom(db.Downpour(8, 1), FAST, handling=HEAVY),
        phantom(db.Locking(8), db.ComputeModel(step=0.02), 60, handling=HEAVY),
    ],
    "network": [
        phantom(db.Downpour(4, 2), slow(1.0), 12, network=NARROW),
        phantom(db.Synchronous(4, 2), slow(1.0), 6, network=db.NetworkModel(bandwidth=1e4)),
        phantom(db.Allreduce(4), slow(1.0), 6, network=db.NetworkModel(bandwidth=1e4)),
    ],
    "alone": [phantom(db.Downpour(4, 2), slow(1.0), 12, network=NARROW)],
}
"""Runs in which a rule finds something."""
NOT_FOUND: dict[str, list[Run]] = {
    "rate": [digits(db.Downpour(8, 2, db.optim("sgd", lr=0.05))), digits(db.Synchronous(4, 2))],
    "momentum": [digits(db.Synchronous(8, 2, db.optim("momentum", lr=0.02)), epochs=16)],
    "staleness": [
        phantom(db.Downpour(4, 2), db.ComputeModel(step=0.1, spread="exponential")),
        phantom(db.Downpour(4, 2), slow(3.0, 2)),
        phantom(db.Downpour(4, 2, push_every=2, fetch_every=6, prefetch=1), slow(1.0)),
    ],
    "silent": [
        phantom(db.Synchronous(4, 2, backup_workers=1), slow(1.5, 3)),
        phantom(db.Downpour(4, 2, warm_start_steps=100), slow(1.0)),
    ],
    "idle": [phantom(db.Downpour(8, 2), slow(4.0, 4, 5, 6, 7), 40)],
    "shards": [
        phantom(db.Downpour(8, 8), FAST, 40, handling=HEAVY),
        phantom(db.Downpour(4, 2), slow(1.0), 12, network=NARROW),
    ],
    "network": [
        phantom(db.Downpour(8, 1), FAST, handling=HEAVY),
        phantom(db.Synchronous(32, 2), db.ComputeModel(step=0.1, spread="exponential"), 60),
        phantom(db.Allreduce(4), slow(1.0)),
    ],
    "alone": [phantom(db.Downpour(4, 2), slow(1.0), 20)],
}
"""Runs that are much like these, in which it finds nothing."""


class Watch:
    """All that is found while a job runs, and at its end."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        watch = self
        self.found: dict[str, Diagnosis] = {}
        self.early: list[Diagnosis] = []
        """Found before any rule may find anything."""

        class Watching(Recorder):
            """Diagnoses after every few records."""

            taken = 0
            past: Timeline | None = None

            def take(self, seconds: float, record: Record) -> None:
                super().take(seconds, record)
                self.taken += 1
                self.past = self.past or Timeline.of(self.job)
                self.past.take(seconds, record, self.summary)
                if self.taken % EVERY == 0 or isinstance(record, records.Finished):
                    for timeline in (self.past, None):
                        watch.look(diagnose(self.summary, timeline), self.summary.seconds, self.summary.cause)

        monkeypatch.setattr(attempt, "Recorder", Watching)
        options = {"task": "digits", **run.options}
        try:
            result = db.run(db.Job(strategy=run.strategy, **options), on=db.Simulated(**run.cluster))
            self.told = {one["rule"]: one for one in result["diagnosis"]}
        except LossNotFinite:
            self.told = {}

    def look(self, found: list[Diagnosis], seconds: float, cause: str) -> None:
        self.found |= {one.rule: one for one in found}
        self.early += [] if seconds >= GRACE or cause else found

    @property
    def wrong(self) -> list[str]:
        return [f"{one.rule}: {one.sentence}" for one in self.found.values() if one.level is Level.WRONG]


def of(table: dict[str, list[Run]]) -> list[Any]:
    return [pytest.param(rule, run, id=f"{rule}-{i}") for rule, runs in table.items() for i, run in enumerate(runs)]


@pytest.mark.parametrize(("rule", "run"), of(FOUND))
def test_each_rule_finds_what_it_is_for(rule: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(run, monkeypatch)
    assert rule in watch.found, watch.found
    assert watch.found[rule].level is (Level.ADVICE if rule == "alone" else Level.WRONG)
    assert not watch.early


@pytest.mark.parametrize(("rule", "run"), of(NOT_FOUND))
def test_no_rule_finds_what_only_looks_like_it(rule: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(run, monkeypatch)
    assert rule not in watch.found, watch.found[rule]


def test_each_rule_is_tried_both_ways() -> None:
    on_processes = {"starved", "beside", "cores", "memory", "disk"}
    assert FOUND.keys() == NOT_FOUND.keys()
    assert len(FOUND.keys() | on_processes) == 13


def test_momentum_on_stale_pushes_is_advice_as_long_as_the_loss_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(digits(db.Downpour(8, 2, db.optim("momentum", lr=0.002))), monkeypatch)
    assert watch.told["momentum"]["level"] == Level.ADVICE
    assert watch.told["momentum"]["remedy"] == "--optimizer sgd"


# jobs that are well

STRATEGIES: dict[str, Any] = {
    "downpour": lambda n, k: db.Downpour(n, k, db.optim("adagrad", lr=0.02)),
    "downpour, scaled": lambda n, k: db.Downpour(n, k, staleness_scaling="inverse"),
    "downpour, seldom": lambda n, k: db.Downpour(n, k, db.optim("sgd", lr=0.01), push_every=2, fetch_every=4),
    # at a rate of 0.02 the loss of eight such replicas doubles for a while after the warm start
    "downpour, warm": lambda n, k: db.Downpour(n, k, db.optim("adagrad", lr=0.005), prefetch=1, warm_start_steps=20),
    "local steps": lambda n, k: db.Downpour(
        n, k, db.optim("delayed-nesterov"), push_every=2, local_optimizer=db.optim("sgd", lr=0.05)
    ),
    "bounded": lambda n, k: db.Bounded(n, k, db.optim("adam", lr=0.001), staleness=2),
    "softsync": lambda n, k: db.Softsync(n, k, db.optim("sgd", lr=0.05), n=1),
    "synchronous": lambda n, k: db.Synchronous(n, k, db.optim("momentum", lr=0.02)),
    "synchronous, backup": lambda n, k: db.Synchronous(n, k, backup_workers=min(1, n - 1)),
    "allreduce": lambda n, _: db.Allreduce(n, db.optim("momentum", lr=0.02)),
    "allreduce, accumulated": lambda n, _: db.Allreduce(n, accumulate=2),
    "hogwild": lambda n, _: db.Hogwild(n, db.optim("adagrad", lr=0.02)),
    "locking": lambda n, k: db.Locking(n, db.optim("sgd", lr=0.05), shards=k),
    "sandblaster": lambda n, k: db.Sandblaster(n, k, 6, portion_size=64),
    "single": lambda _n, _k: db.Single(db.optim("adam", lr=0.002)),
    "split downpour": lambda n, _: db.Downpour(n, 2, db.optim("adagrad", lr=0.02), partitions=2, split="stages"),
    "split allreduce": lambda n, _: db.Allreduce(n, partitions=2, split="stages", microbatches=2),
    "split single": lambda _n, _k: db.Single(partitions=2, split="neurons"),
}
"""Every way to train, with rates that fit up to eight replicas."""


def well(seed: int) -> tuple[str, Run]:
    """A job that is well: its replicas are about as fast, and its network and shards are no hindrance."""
    chance = random.Random(seed)
    names = list(STRATEGIES)
    name = names[seed % len(names)]
    n, step = chance.choice((2, 3, 4, 8)), chance.choice((0.2, 0.3, 0.5))
    strategy = STRATEGIES[name](n, chance.choice((1, 2, 4)))
    compute = db.ComputeModel(
        step=step,
        spread=chance.choice(("constant", "lognormal", "exponential")),
        slow={0: 1.5} if n > 1 and "single" not in name and chance.random() < 0.3 else {},
        straggle_chance=chance.choice((0.0, 0.01)),
    )
    options: dict[str, Any] = {"seed": seed}
    if name != "sandblaster":
        rows, replicas = -(-1437 // 64), 1 if "single" in name else n
        options["epochs"] = max(4, round(15.0 * replicas / (rows * step)))
    plain = chance.random() < 0.5
    network = {} if name == "single" else {"network": db.NetworkModel(latency=chance.choice((50e-6, 1e-3)))}
    return name, Run(strategy, options, {"compute": compute, "phantom": plain, **network})


@in_chunks(CHUNK)
def test_nothing_is_wrong_with_a_job_that_is_well(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(seed: int) -> Counter[str]:
        name, run = well(seed)
        with monkeypatch.context() as patched:
            watch = Watch(run, patched)
        assert not watch.wrong
        return Counter([name])

    sweep(seeds, hold, well)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_beginning_of_a_run_of_every_strategy_can_be_diagnosed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also in its first seconds, and where a role dies and comes again, by what its folder keeps."""
    monkeypatch.setattr(diagnosis, "GRACE", -1.0)
    strategy = STRATEGIES[name](3, 2)
    crashes = () if isinstance(strategy, db.Single) else (db.Crash("replica 1", 20), db.Crash("coordinator", 40))
    if "split" in name:
        crashes = ()
    job = db.Job("digits", strategy, out=tmp_path, **({} if name == "sandblaster" else {"epochs": 2}))
    db.run(job, on=db.Simulated(compute=db.ComputeModel(step=0.1), crashes=crashes, phantom=True))
    sums, timeline = Summary(RunFolder(tmp_path).read_job()), Timeline.of({})
    diagnosed = 0
    for seconds, record in read_metrics(tmp_path / "metrics.jsonl"):
        sums.take(seconds, record)
        timeline.take(seconds, record, sums)
        diagnose(sums, timeline)
        diagnosed += sums.seconds > 0
    assert diagnosed > 5


def test_a_report_says_what_is_wrong_with_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        "well": db.Downpour(8, 2, db.optim("adagrad", lr=0.02)),
        "wrong": db.Downpour(8, 2, db.optim("sgd", lr=0.3)),
    }
    for name, strategy in runs.items():
        cluster = db.Simulated(compute=db.ComputeModel(step=0.3))
        db.run(db.Job("digits", strategy, epochs=12, out=tmp_path / name), on=cluster)
    assert main.run(["report", *(str(tmp_path / name) for name in runs), "--out", str(tmp_path / "report")]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "try --" in line]
    assert [line.partition(": the loss has risen")[0] for line in told] == [
        "downpour on digits (simulated), optimizer sgd 0.3"
    ]
