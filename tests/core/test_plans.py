"""A plan: what is compared, what is left out and why, parts that add up, and an answer that follows what it should."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import distbelief as db
from distbelief.cli import main, plan_tables
from distbelief.errors import Interrupted, UsageError
from distbelief.lab.cost.profile import Profile, StepTime
from distbelief.lab.cost.splitting import HomeCost, SplitCost, WholeStep
from distbelief.lab.cost.trace import Tracer
from distbelief.lab.plan import lockstep, trials
from distbelief.lab.plan import plan as planning
from distbelief.lab.plan.candidates import PLANNED, Machines, PlanCandidate, candidates, memory
from distbelief.lab.plan.lockstep import LockstepCosts
from distbelief.lab.plan.plan import TrainingPlan
from distbelief.lab.plan.pricing import PricedCluster, Pricing, Terms, memory_speed
from distbelief.lab.plan.trips import DirectHandling
from distbelief.places.simulated.handling import INSTANT, Handling
from distbelief.schedules import price as schedules_price
from distbelief.split.options import Split
from distbelief.tasks import Task, TensorData

WIDE = 256
DATA = TensorData(torch.zeros(8, WIDE), torch.zeros(8, dtype=torch.int64))
TASK = Task(model=lambda: nn.Linear(WIDE, WIDE, bias=False), train=lambda: DATA)
VECTOR = 4 * WIDE * WIDE
"""Bytes of its parameters."""
SGD = db.optim("sgd")
NOTHING_SEEN = LockstepCosts({}, {})
measure_lockstep = lockstep.measure


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A profile with 1 ms a minibatch of any size, and memory as fast as it usually is."""
    points = [StepTime(1, 0.0, 0.5e-3, 0.5e-3, 9), StepTime(64, 0.0, 0.5e-3, 0.5e-3, 9)]
    monkeypatch.setattr(planning.profiling, "measure", lambda *_, **__: Profile(points, {}, 1.0))
    monkeypatch.setattr(planning.trips, "measure", lambda *_: Handling())
    monkeypatch.setattr(planning.trips, "measure_direct", lambda *_: DirectHandling())
    monkeypatch.setattr(planning, "memory_speed", lambda *_: Handling())
    monkeypatch.setattr(planning, "held", lambda: 10_000_000)
    monkeypatch.setattr(planning.side_by_side, "measure", lambda *_: None)
    monkeypatch.setattr(planning.splitting, "measure", refuse)
    monkeypatch.setattr(planning.lockstep, "measure", lambda *_: NOTHING_SEEN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def refuse(*_: Any, **__: Any) -> Any:
    raise UsageError("it cannot be split")


def made(machines: str = "2x2", network: db.NetworkModel | None = None, **more: Any) -> TrainingPlan:
    return planning.plan(TASK, machines, network, **more)


@pytest.mark.long
def test_the_split_that_a_task_brings_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a plan, and by `split`, where none is named."""
    priced: list[str] = []

    def asked(_: Task, split: Split, **__: Any) -> Any:
        priced.append(split.text)
        raise UsageError("it cannot be split")

    monkeypatch.setattr(planning.splitting, "measure", asked)
    own = dataclasses.replace(TASK, split="fc*=columns")
    monkeypatch.setattr(db.tasks, "resolve", lambda *_: own)
    planning.plan(own, "2x2")
    assert set(priced) == {"fc*=columns"}
    priced.clear()
    assert main.run(["split", "digits"]) == main.run(["split", "digits", "--split", "stages"]) == 2
    assert priced == ["fc*=columns", "stages"]


@pytest.mark.long
def test_parts_of_a_step_add_up_and_the_first_is_the_fastest() -> None:
    rows = made().rows
    assert {(row.partitions, row.reason) for row in rows if not row.terms} == {(2, "it cannot be split")}
    rates = [row.terms.samples_per_second for row in rows if row.terms]
    assert rates == sorted(rates, reverse=True)
    for row in rows[: len(rates)]:
        assert row.terms is not None
        assert row.terms.step == pytest.approx(row.replicas * 64 / row.terms.samples_per_second, rel=0.01)
        assert min(row.terms.compute, row.terms.update, row.terms.communicate, row.terms.wait) >= 0
        assert row.terms.compute == pytest.approx(1e-3, rel=0.1)
        assert sum(row.terms.spared.values()) == pytest.approx(row.replicas * 64 / row.terms.samples_per_second)


def test_a_price_is_what_the_virtual_cluster_says() -> None:
    """One replica and one shard on a network where only the bytes count: a step, and twice the vector on the line."""
    cluster = PricedCluster(Machines(2, 1), db.NetworkModel(latency=0.0, bandwidth=1e8), 1e-3, INSTANT, INSTANT)
    one = PlanCandidate(db.Allreduce(replicas=2, optimizer=SGD))
    rate = Pricing(TASK, 64).price(one, cluster).samples_per_second
    # halving and doubling, or a ring, of two: half of the vector each way, twice
    assert 2 * 64 / rate == pytest.approx(1e-3 + VECTOR / 1e8, rel=0.05)
    alone = Pricing(TASK, 64).price(PlanCandidate(db.Single(optimizer=SGD)), cluster)
    assert 64 / alone.samples_per_second == pytest.approx(1e-3, rel=0.01)
    assert alone.bytes_per_step == 0


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        (db.Downpour(8, shards=2, optimizer=SGD), 0.16),
        (db.Synchronous(8, shards=2, optimizer=SGD), 0.1),
        (db.Allreduce(8, optimizer=SGD), 0.01),
        (db.Downpour(2, shards=2, optimizer=SGD, partitions=2), 0.03),
    ],
)
def test_a_few_steps_have_the_price_of_many(
    strategy: db.Strategy, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start of the job to its end, such steps would be 33, 20, 4 and 12 % slower."""
    line, split = db.NetworkModel(latency=50e-6, bandwidth=1e9), {2: split_cost(0.6e-3)}
    cluster = PricedCluster(Machines(2, 4), line, 1e-3, Handling(), Handling(), splits=split)
    found = []
    for steps in (4, 100):
        monkeypatch.setattr("distbelief.lab.plan.pricing.STEPS", steps)
        found.append(Pricing(LAYERS, 64, steps).price(PlanCandidate(strategy), cluster))
    few, many = found
    assert few.samples_per_second == pytest.approx(many.samples_per_second, rel=error)
    assert few.step == pytest.approx(many.step, rel=1.3 * error)
    assert few.bytes_per_step == pytest.approx(many.bytes_per_step, rel=1e-4)  # frames grow with their numbers


def test_many_replicas_are_priced_by_the_least_steps_and_look_once_for_their_algorithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a plan for many machines takes seconds for."""
    pricing, cluster = Pricing(TASK, 64), PricedCluster(Machines(16, 4), db.NetworkModel(), 1e-3, INSTANT, INSTANT)
    for one, steps in ((db.Downpour(64, shards=16), 4), (db.Allreduce(64), 4), (db.Allreduce(16), 24)):
        assert len(pricing._job(PlanCandidate(one)).task.train()) == one.replicas * steps * 64
    asked: list[int] = []
    one_by_one = schedules_price.price
    monkeypatch.setattr(
        schedules_price, "price", lambda schedule, *more: [asked.append(schedule.ranks), one_by_one(schedule, *more)][1]
    )
    schedules_price.cheapest.cache_clear()
    pricing.price(PlanCandidate(db.Allreduce(16, optimizer=SGD)), cluster)
    assert asked == [16] * len(schedules_price.CHOICES)


@pytest.mark.long
def test_a_slow_network_binds_and_one_process_wins() -> None:
    slow = made(network=db.NetworkModel(latency=50e-6, bandwidth=1e6), strategies=("single", "allreduce", "downpour"))
    assert slow.first.replicas <= 2  # on one host nothing is sent
    [across] = [row for row in slow.rows if row.what == "allreduce, 4 replicas"]
    assert across.terms is not None
    assert across.terms.binds == "network"
    fast = made(network=db.NetworkModel(latency=1e-6, bandwidth=1e11), strategies=("single", "allreduce"))
    assert fast.first.what == "allreduce, 4 replicas"
    assert fast.first.terms is not None
    assert fast.first.terms.binds == "processor"


def test_twice_the_bandwidth_and_a_straggler_are_priced() -> None:
    found = made(network=db.NetworkModel(latency=50e-6, bandwidth=1e8), strategies=("allreduce",))
    assert found.first.terms is not None
    rates = [float(told.split(", ")[-1].split()[0].replace(",", "")) for told in found.changes]
    assert rates[0] > found.first.terms.samples_per_second
    assert rates[2] < found.first.terms.samples_per_second


@pytest.mark.long
def test_a_straggler_binds_where_the_others_wait_for_it_and_is_told_where_it_is_gone() -> None:
    line = db.NetworkModel(latency=0.0, bandwidth=1e12)
    found = made("4x1", line, slow={1: 4.0}, strategies=("allreduce", "downpour"))
    terms = {row.what: row.terms for row in found.rows}
    waited, alone = terms["allreduce, 4 replicas"], terms["downpour, 1 replica, 1 shard"]
    assert waited is not None
    assert alone is not None
    # three of the four milliseconds would not be there, and three of four replicas wait as long
    assert waited.binds == "a straggler"
    assert waited.spared["a straggler"] == pytest.approx(3e-3, rel=0.1)
    assert waited.wait == pytest.approx(3 / 4 * 3e-3, rel=0.1)
    assert sum(waited.spared.values()) == pytest.approx(4 * 64 / waited.samples_per_second)
    assert alone.spared["a straggler"] == 0.0  # replica 1 is none of its replicas
    assert found.changes[2].startswith("without a straggler: ")
    assert float(found.changes[2].split(", ")[-1].split()[0].replace(",", "")) > waited.samples_per_second


def test_steps_that_vary_make_one_of_those_who_wait_for_each_other_a_straggler() -> None:
    cluster = PricedCluster(
        Machines(4, 1), db.NetworkModel(latency=0.0, bandwidth=1e12), 1e-3, INSTANT, INSTANT, variation=0.5
    )
    pricing = Pricing(TASK, 64)
    met, free = (
        pricing.terms(PlanCandidate(one), cluster).spared for one in (db.Allreduce(4), db.Downpour(4, shards=1))
    )
    assert met["a straggler"] > 0.2e-3
    assert free["a straggler"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    "where", [(tempfile, "mkdtemp"), (trials.Local, "run"), (shutil, "rmtree")], ids=lambda at: at[1]
)
def test_a_trial_that_is_interrupted_at_any_moment_leaves_no_folder(
    where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also while its folder is made, and while it is removed."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(trials.Local, "run", lambda *_: {"outcome": "completed"})
    monkeypatch.setattr(trials, "terms_of", lambda _: None)
    called = getattr(*where)

    def interrupted(*args: Any, **options: Any) -> Any:
        found = called(*args, **options) if where[1] == "mkdtemp" else None
        signal.raise_signal(signal.SIGINT)
        return called(*args, **options) if found is None else found

    monkeypatch.setattr(*where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trials.run("digits", PlanCandidate(db.Single()), 64, 1.0)
    assert [*tmp_path.iterdir()] == []
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stragglers", "9:2"], "replica 9 cannot be slow: there are replicas 0 to 1"),
        (["--stragglers", "1:0"], "replica 1 slower 0.0 times: must be more than 0"),
        (["--stragglers", "5%x10"], "a plan takes replicas on slower machines alone"),
        (["--stragglers", "1:2,1:3"], "--stragglers 1:: stands there twice; leave one of them off"),
        (["--network", "latency=1us,latency=2us"], "--network latency=: stands there twice; leave one of them off"),
    ],
)
def test_a_straggler_or_a_network_that_cannot_be_is_refused_before_anything_is_measured(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_here", lambda *_: pytest.fail("it is refused first"))
    assert main.run(["plan", "digits", "--machines", "1x2", *words]) == 2
    assert told in capsys.readouterr().err


def test_what_a_process_holds_without_a_model_has_no_margin() -> None:
    trace = Tracer(TASK, DATA.batch(torch.arange(2))).follow(64, SGD)
    [(kind, needs)] = planning._needs(PlanCandidate(db.Single(optimizer=SGD)), trace, 10**9, {}).items()
    [held] = memory(PlanCandidate(db.Single(optimizer=SGD)), trace, 0).values()
    assert (kind, needs) == ("replica", round(10**9 + 1.15 * held + 4e6))


@pytest.mark.long
def test_what_does_not_fit_is_a_row_with_its_reason() -> None:
    tracer = Tracer(TASK, DATA.batch(torch.arange(2)))
    trace = tracer.follow(64, SGD)
    held = memory(PlanCandidate(db.Downpour(replicas=4, shards=2, optimizer=SGD)), trace, 1000)
    assert held["shard"] == 1000 + math.ceil(3 * VECTOR / 2)
    assert held["replica"] > 1000 + 4 * VECTOR
    adam = memory(PlanCandidate(db.Allreduce(2, db.optim("adam"))), tracer.follow(64, db.optim("adam")), 0)["replica"]
    assert adam - memory(PlanCandidate(db.Allreduce(2, SGD)), trace, 0)["replica"] == pytest.approx(
        2 * VECTOR, rel=0.01
    )
    rows = {row.what: row.memory for row in made().rows}
    limit = (rows["single"] + rows["downpour, 2 replicas, 2 shards"]) / 2
    found = {row.what: row for row in made(max_memory=limit).rows}
    assert "needs" in found["downpour, 2 replicas, 2 shards"].reason
    assert found["downpour, 2 replicas, 2 shards"].terms is None
    assert found["single"].terms is not None


@pytest.mark.long
def test_a_trial_that_fails_is_a_row_and_ends_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Pricing.terms

    def fails(self: Pricing, candidate: PlanCandidate, cluster: PricedCluster) -> Any:
        if candidate.strategy.name == "hogwild":
            raise UsageError("not here")
        return terms(self, candidate, cluster)

    monkeypatch.setattr(Pricing, "terms", fails)
    rows = made().rows
    assert [row.reason for row in rows if row.command.startswith("hogwild")] == ["not here", "not here"]
    assert rows[0].terms is not None


def test_an_optimizer_that_some_candidates_cannot_have_is_their_reason_and_ends_no_plan() -> None:
    rows = {row.what: row for row in made("2x1", optimizer=db.optim("lars"), strategies=("downpour", "allreduce")).rows}
    assert "--optimizer lars needs the norms of whole layers" in rows["downpour, 2 replicas, 2 shards"].reason
    assert rows["downpour, 1 replica, 1 shard"].terms is not None
    assert rows["allreduce, 2 replicas"].terms is not None
    # nor does one of which it is asked whether it waits, before it is priced
    assert not Pricing(TASK, 64).meets(PlanCandidate(db.Hogwild(2, optimizer=db.optim("lars"))))


def test_candidates_are_powers_of_two_and_all_cores() -> None:
    found = [str(one) for one in candidates(Machines(3, 2), PLANNED, SGD)]
    assert "single" in found
    whole = {f"allreduce, {n} replicas" for n in (2, 4, 6)}
    split = {f"allreduce, {n} replicas, 2 partitions" for n in (2, 3)}
    assert {one for one in found if one.startswith("allreduce")} == whole | split
    odd = [str(one) for one in candidates(Machines(2, 3), ["allreduce"], SGD)]
    # all partitions of a replica are on one host
    assert [one for one in odd if one.endswith("2 partitions")] == ["allreduce, 2 replicas, 2 partitions"]
    assert "downpour, 6 replicas, 3 shards" in found
    assert "hogwild, 4 replicas" not in found


def test_it_says_from_where_on_one_more_replica_brings_too_little() -> None:
    terms = made(strategies=("allreduce",)).first.terms
    assert terms is not None

    def row(replicas: int, rate: float) -> planning.Row:
        one = db.Allreduce(replicas)
        return planning.Row(str(one), f"allreduce --replicas {replicas}", replicas, 0, 0, 1,
            planning.msgspec.structs.replace(terms, samples_per_second=rate))  # fmt: skip

    assert planning._enough([row(1, 100.0), row(2, 190.0), row(4, 200.0)], "allreduce").startswith("from 2 replicas on")
    assert "up to 4" in planning._enough([row(1, 100.0), row(2, 190.0), row(4, 350.0)], "allreduce")


def test_memory_is_as_fast_as_an_update_was() -> None:
    """Of SGD gradient and parameters are touched, of Adam two more vectors."""
    assert memory_speed(SGD, 1000, 1e-6).memory == pytest.approx(8e9)
    assert memory_speed(db.optim("adam"), 1000, 1e-6).memory == pytest.approx(16e9)


def test_messages_cost_who_has_a_shard_and_memory_costs_who_shares_it() -> None:
    """Slow messages are paid by those with a shard alone; slow memory of others by all but one process by itself."""
    messages, memory = Handling(1e-3, math.inf), Handling(0.0, VECTOR / 1e-3)

    def steps(served: Handling, own: Handling, *strategies: db.Strategy) -> list[float]:
        cluster = PricedCluster(Machines(1, 2), db.NetworkModel(), 1e-3, served, own)
        pricing = Pricing(TASK, 64)
        return [1e3 * pricing.price(PlanCandidate(one), cluster).step for one in strategies]

    alone, mapped = db.Single(optimizer=SGD), db.Hogwild(replicas=1, optimizer=SGD)
    both, sums = db.Hogwild(replicas=2, optimizer=SGD), db.Allreduce(2, SGD)
    served = db.Synchronous(replicas=1, shards=1, optimizer=SGD)
    assert steps(messages, INSTANT, alone, mapped, both, sums) == pytest.approx([1.0] * 4, rel=0.05)
    # a push, a fetch, and its answer: that of the push goes out while the next gradient is computed
    assert steps(messages, INSTANT, served) == pytest.approx([1.0 + 3.0], rel=0.05)
    # an update touches two vectors, each in a millisecond
    assert steps(memory, INSTANT, alone, mapped, both) == pytest.approx([1.0, 1.0, 3.0], rel=0.05)
    assert steps(INSTANT, memory, alone, mapped, both) == pytest.approx([3.0, 3.0, 1.0], rel=0.05)


def test_a_step_is_that_of_a_process_of_a_job_where_one_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "resolve", lambda *_: TASK)
    monkeypatch.setattr(planning.side_by_side, "measure", lambda *_: planning.Steps(2e-3, 1e-6))
    found = planning.plan("own:task", "1x1", strategies=("single",))
    assert found.step == 2e-3
    assert made("1x1", strategies=("single",)).step == pytest.approx(1e-3)


def split_cost(computes: float, split: str = "neurons", homes: int = 2) -> SplitCost:
    """Of homes alike, beside a whole model of 1 ms."""
    held = {"parameters": 5_000_000, "gradients": 5_000_000, "optimizer state": 1_000_000, "kept and received": 2_000}
    own = [HomeCost(number, 10, held, computes, 0.0, 0.1e-3, 2, 100) for number in range(homes)]
    whole = WholeStep(0.0, 1e-3, 0.1e-3, {"parameters": 9_000_000})
    return SplitCost(task="", split=split, partitions=homes, traced="", batch_size=64, schedule="sequential",
        microbatches=1, placements=[], homes=own, whole=whole, step=1.0, crossings=[], ways=[])  # fmt: skip


LAYERS = Task(
    model=lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE)), train=lambda: DATA
)  # as many operations before the cut as behind it


def split_step(strategy: db.Strategy, cost: SplitCost, **more: Any) -> Terms:
    """A step of the whole takes 2 ms, twice what it took beside the split one, so all that computes does."""
    cluster = PricedCluster(Machines(1, 2), db.NetworkModel(), 2e-3, INSTANT, INSTANT, splits={2: cost})
    return Pricing(LAYERS, 64).price(PlanCandidate(strategy), dataclasses.replace(cluster, **more))


@pytest.mark.parametrize("variation", [0.1, 0.3])
def test_who_waits_for_others_in_each_step_waits_for_the_longest_and_nobody_else_does(variation: float) -> None:
    """Of two lognormal times with mean 1 the longer is as much longer as the error function says."""
    cluster = PricedCluster(Machines(1, 2), db.NetworkModel(), 1e-3, INSTANT, INSTANT)
    longer = 1 + math.erf(math.sqrt(math.log1p(variation**2)) / 2)
    cost, pricing = split_cost(1e-3), Pricing(LAYERS, 64, 400)

    def times(strategy: db.Strategy) -> float:
        found = []
        for one in (0.0, variation):
            priced = dataclasses.replace(cluster, variation=one, splits={2: cost})
            found.append(pricing.price(PlanCandidate(strategy), priced).samples_per_second)
        return found[0] / found[1]

    for meets in (db.Allreduce(2, SGD), db.Synchronous(2, shards=1, optimizer=SGD)):
        assert times(meets) == pytest.approx(longer, rel=0.03)
    assert 1.02 < times(db.Single(partitions=2, split="neurons", optimizer=SGD)) < 1.05 * longer
    for goes_on in (db.Single(optimizer=SGD), db.Downpour(2, shards=1, optimizer=SGD), db.Hogwild(2, optimizer=SGD)):
        assert times(goes_on) == 1.0


def test_a_split_model_takes_the_time_of_its_schedule_on_the_virtual_cluster() -> None:
    """Homes that compute at the same time, and slow each other down; or one after the other."""
    one = db.Single(partitions=2, optimizer=SGD)
    together = split_step(one, split_cost(0.6e-3), together=0.5)
    assert together.step == pytest.approx(2 * 0.6e-3 / 0.5, rel=0.05)
    assert together.step == pytest.approx(64 / together.samples_per_second, rel=0.05)
    in_turn = split_step(one, split_cost(0.6e-3, "stages"))
    assert in_turn.step == pytest.approx(2 * 2 * 0.6e-3, rel=0.05)
    assert in_turn.wait == pytest.approx(2 * 0.6e-3, rel=0.1)
    slow = split_step(one, split_cost(0.6e-3, "stages"), slow=((0, 2.0),))
    assert slow.step == pytest.approx(2 * in_turn.step, rel=0.05)


def test_each_home_of_a_split_model_updates_its_part_and_messages_cost_it_time() -> None:
    """Each of two homes holds half of two layers, of whose parameters an update touches two vectors, after its sum was
    copied.
    """
    one, usual = (
        db.Single(partitions=2, optimizer=SGD),
        split_step(db.Single(partitions=2, optimizer=SGD), split_cost(0.6e-3)).step,
    )
    half = VECTOR + 4 * WIDE
    memory = split_step(one, split_cost(0.6e-3), own=Handling(0.0, half / 1e-3))
    assert memory.step - usual == pytest.approx(4e-3, rel=0.05)
    assert split_step(one, split_cost(0.6e-3), handling=Handling(1e-3, math.inf)).step > usual + 2e-3


def test_split_replicas_are_priced_as_jobs_of_theirs() -> None:
    """Two replicas of two homes each, on four cores, compute as one does; on two, they take turns."""
    cost, four = split_cost(0.6e-3), Machines(1, 4)
    for strategy in (
        db.Allreduce(2, optimizer=SGD, partitions=2),
        db.Downpour(2, shards=2, optimizer=SGD, partitions=2),
    ):
        wide, narrow = split_step(strategy, cost, machines=four), split_step(strategy, cost)
        assert wide.compute == pytest.approx(1.2e-3, rel=0.1)
        assert narrow.samples_per_second < 0.6 * wide.samples_per_second
        assert wide.samples_per_second > 1.5 * 64 / 1.5e-3


@pytest.mark.long
def test_a_model_is_split_over_the_cores_of_a_host_or_a_row_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(_: Task, split: Any, **__: Any) -> tuple[SplitCost, list[Any]]:
        asked.append(split.partitions)
        if split.partitions > 2:
            raise UsageError("not over so many")
        return split_cost(0.3e-3), []

    monkeypatch.setattr(planning.splitting, "measure", measured)
    found = planning.plan(LAYERS, "2x4", strategies=("single",))
    rows = {row.what: row for row in found.rows}
    assert asked == [2, 4]
    assert rows["single, 4 partitions"].reason == "not over so many"
    assert rows["single, 2 partitions"].command == "single --partitions 2"
    assert found.first.what == "single, 2 partitions"
    assert "no more replicas" in found.why
    assert "single, 2 partitions" not in {row.what for row in planning.plan(LAYERS, "8x1", strategies=("single",)).rows}
    both = {row.what: row for row in planning.plan(LAYERS, "2x4", strategies=("downpour", "allreduce")).rows}
    for replicas in (1, 2, 4):  # two homes each, on hosts of four cores
        split = both[f"downpour, {_named(replicas)}, 2 partitions, 2 shards"]
        assert split.terms is not None
        assert split.command == f"downpour --replicas {replicas} --partitions 2 --shards 2"
    assert both["allreduce, 2 replicas, 4 partitions"].reason == "not over so many"
    assert "allreduce, 8 replicas, 2 partitions" not in both


def _named(replicas: int) -> str:
    return f"{replicas} replica{'s' * (replicas > 1)}"


def test_a_partition_holds_the_vectors_of_its_part_alone() -> None:
    """4 of the parameters and what is kept with a server; without, one more of them, and the optimizer's state."""
    trace = Tracer(TASK, DATA.batch(torch.arange(2))).follow(64, SGD)
    cost = split_cost(0.3e-3)
    served = memory(PlanCandidate(db.Downpour(2, shards=2, optimizer=SGD, partitions=2)), trace, 1000, cost)
    assert served == {"partition": 1000 + 4 * 5_000_000 + 2_000, "shard": 1000 + 3 * VECTOR // 2}
    for strategy in (db.Allreduce(2, optimizer=SGD, partitions=2), db.Single(optimizer=SGD, partitions=2)):
        alone = memory(PlanCandidate(strategy), trace, 1000, cost)
        assert alone == {"partition": 1000 + 4 * 5_000_000 + 1_000_000 + 2_000}


def test_who_updates_memory_of_one_host_pays_what_that_was_measured_to_cost() -> None:
    """By himself, or among several; who is on another host, or in rounds, pays for messages to the shard."""
    direct = DirectHandling(Handling(1e-3, math.inf), Handling(2e-3, math.inf))
    cluster = PricedCluster(Machines(1, 3), db.NetworkModel(), 1e-3, INSTANT, INSTANT, direct)
    pricing = Pricing(TASK, 64)

    def step(strategy: db.Strategy, on: PricedCluster = cluster) -> float:
        return 1e3 * pricing.price(PlanCandidate(strategy), on).step

    # a push, a fetch, and their two answers
    assert step(db.Downpour(1, shards=1, optimizer=SGD)) == pytest.approx(1.0 + 4.0, rel=0.1)
    # others are waited for where they have the lock, for the push and for the fetch
    assert 1.0 + 8.0 <= step(db.Downpour(2, shards=1, optimizer=SGD)) * 1.02 < 1.0 + 8.0 + 4.0
    assert step(db.Synchronous(2, shards=1, optimizer=SGD)) == pytest.approx(1.0, rel=0.1)
    apart = dataclasses.replace(cluster, machines=Machines(2, 1))
    assert step(db.Downpour(2, shards=2, optimizer=SGD), apart) < 3.0


WAITING = (
    db.Allreduce(2, SGD),
    db.Synchronous(2, shards=1, optimizer=SGD),
    db.Single(optimizer=SGD, partitions=2),
    db.Downpour(1, shards=2, optimizer=SGD, partitions=2),
)


@pytest.mark.parametrize("strategy", WAITING)
@pytest.mark.long
def test_steps_that_took_longer_than_their_price_are_priced_so_by_gradients_and_messages(strategy: db.Strategy) -> None:
    """Half as long again in computing, and three times as long in all else."""
    handling = Handling(20e-6, 10e9)
    cluster = PricedCluster(Machines(1, 2), db.NetworkModel(), 1e-3, handling, handling, splits={2: split_cost(0.6e-3)})
    pricing, one = Pricing(LAYERS, 64), PlanCandidate(strategy)
    assert pricing.meets(one)
    usual = pricing.price(one, cluster)
    other = usual.step - usual.compute
    seen = Terms(1.5 * usual.compute, 0.0, 0.0, 3 * other, 1.0, 0.0)
    found = lockstep.explained(one, pricing, cluster, seen)
    now = pricing.price(one, dataclasses.replace(cluster, lockstep={one.kind: found}))
    assert found.gradient == pytest.approx(1.5)
    assert 2 < found.messages < 3.1
    assert now.step == pytest.approx(seen.step, rel=0.02)
    assert now.compute == pytest.approx(seen.compute, rel=0.1)  # what messages take of a core lengthens it too
    # it is of this kind alone
    hogwild = PlanCandidate(db.Hogwild(2, optimizer=SGD))
    assert not pricing.meets(hogwild)
    assert pricing.price(hogwild, dataclasses.replace(cluster, lockstep={one.kind: found})) == pricing.price(
        hogwild, cluster
    )


def test_messages_are_as_dear_as_can_be_where_no_price_is_as_long_as_the_steps() -> None:
    cluster = PricedCluster(Machines(1, 2), db.NetworkModel(), 1e-3, INSTANT, INSTANT)
    found = lockstep.explained(PlanCandidate(WAITING[0]), Pricing(LAYERS, 64), cluster, Terms(1e-3, 0, 0, 1.0, 1.0, 0))
    assert found == pytest.approx((1.0, lockstep.MOST), rel=0.01)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is trained with for a moment, on a machine of four cores: its gradients take twice as long as any price."""
    asked: list[str] = []

    def run(_: Any, one: PlanCandidate, *__: Any, whole: bool) -> Terms:
        assert not whole
        asked.append(str(one))
        if one.strategy.name == "synchronous":
            raise UsageError("not here")
        return Terms(2e-3, 0.0, 0.0, 0.1e-3, 1.0, 0.0)

    monkeypatch.setattr(trials, "run", run)
    monkeypatch.setattr(planning.lockstep, "measure", measure_lockstep)
    monkeypatch.setattr(planning, "this_machine", lambda: Machines(1, 4))
    monkeypatch.setattr(planning, "resolve", lambda *_: LAYERS)
    monkeypatch.setattr(planning.splitting, "measure", lambda *_, **__: (split_cost(0.5e-3), []))
    return asked


def rates(found: TrainingPlan) -> dict[str, float]:
    """Of each row that has a price."""
    return {row.what: row.terms.samples_per_second for row in found.rows if row.terms is not None}


@pytest.mark.long
def test_who_waits_is_tried_once_for_each_kind_by_the_fewest_processes(tried: list[str]) -> None:
    """Also for other machines; one that fails is priced without, and told."""
    asked = ("allreduce", "synchronous", "hogwild")
    found = planning.plan("own:task", "2x4", strategies=asked)
    assert sorted(tried) == [
        "allreduce, 2 replicas", "allreduce, 2 replicas, 2 partitions", "synchronous, 2 replicas, 1 shard"
    ]  # fmt: skip
    without, now = rates(planning.plan(LAYERS, "2x4", strategies=asked)), rates(found)
    assert len(tried) == 3
    for name in ("allreduce, 2 replicas", "allreduce, 8 replicas", "allreduce, 4 replicas, 2 partitions"):
        assert now[name] < 0.7 * without[name]
    for name in ("synchronous, 4 replicas, 2 shards", "hogwild, 2 replicas"):
        assert now[name] == without[name]
    assert any(re.search(r"allreduce: gradients (1\.9|2\.0)", note) for note in found.notes)
    assert any(note.startswith("synchronous, 2 replicas, 1 shard was not tried") for note in found.notes)


@pytest.mark.long
def test_nobody_is_tried_on_a_busy_machine_or_one_too_small_or_beside_long_steps(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(busy: float, step: float, left: float) -> None:
        points = [StepTime(64, 0.0, step / 2, step / 2, 9)]
        monkeypatch.setattr(planning.profiling, "measure", lambda *_, **__: Profile(points, {}, busy))
        monkeypatch.setattr(planning, "free_memory", lambda: left)
        planning.plan("own:task", "1x4", strategies=("allreduce",))

    for busy, step, left in ((2.0, 1e-3, 1e12), (1.0, 1.0, 1e12), (1.0, 1e-3, 1e3)):
        planned(busy, step, left)
        assert tried == []
    planned(1.0, 1e-3, 1e12)
    assert tried != []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "which task?"),
        (["mnits"], "did you mean 'mnist'?"),
        (["digits", "--machines", "four"], "--machines 'four': write hosts and the cores of each, such as 4x8"),
        (["digits", "--machines", "0x2"], "0 hosts, must be from 1 to 256"),
        (["digits", "--network", "latency=10"], "its unit is missing"),
        (["digits", "--network", "bandwith=1Gbit"], "did you mean 'bandwidth'?"),
        (["digits", "--network", "bandwidth=manyGbit"], "--network"),
        (["digits", "--network", "bandwidth=0Gbit"], "bandwidth"),
        (["digits", "--max-memory", "1MB"], "least is needed by"),
        (["digits", "--max-memory", "0"], "--max-memory 0: must be more than 0, and finite"),
        (["digits", "--batch-size", "0"], "--batch-size 0: must be from 1 to"),
        (["digits", "--seconds", "nan"], "--seconds nan: must be more than 0, and finite"),
        (
            ["digits", "--machines", "1x1", "--strategies", "allreduce"],
            "--strategies allreduce: there is nothing to choose from on 1x1",
        ),
        (["digits", "--strategies", "downpoor"], "did you mean 'downpour'?"),
        (["digits", "--optimizer", "adm"], "did you mean 'adam'?"),
        (["mnist", "--data-dir", "/nowhere"], "no MNIST in /nowhere"),
    ],
)
def test_a_wrong_word_is_one_line_with_the_right_one(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["plan", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_minibatch_that_does_not_fit_this_machine_is_refused_before_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distbelief.lab.cost.cost.free_memory", lambda: 1_000)
    with pytest.raises(UsageError, match=r"--batch-size 64: it needs .* GB, and 0\.0 GB are left here; plan with a"):
        made()


@pytest.mark.long
def test_the_command_shows_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "digits", "--machines", "1x2", "--max-memory", "40GB"]) == 0
    shown = capsys.readouterr().out
    for told in (
        "digits on 1x2",
        "hogwild, 2 replicas",
        "samples/s",
        "with twice the bandwidth",
        "distbelief train digits",
    ):
        assert told in shown
    assert planning.UNSEEN in shown
    assert main.run(["plan", "digits", "--machines", "1x1", "--strategies", "single", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["command"] == "single"


@pytest.mark.long
def test_the_table_has_every_part_of_a_step_and_the_lines_below_it_say_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    rows = made().rows
    [served] = [row for row in rows if row.what == "downpour, 4 replicas, 2 shards"]
    limit = served.memory - 1.0
    monkeypatch.setattr(planning, "this_machine", lambda: Machines(2, 2))
    monkeypatch.setattr(trials, "run", at(1000.0))
    found = made(max_memory=limit, run=1, told=said.append)
    tables: list[Any] = []
    monkeypatch.setattr(plan_tables, "show", lambda *table: tables.append(table))
    plan_tables.show_plan(found)
    shown = capsys.readouterr().out
    first = found.first
    assert first.terms is not None
    (title, head, rows_shown), measured = tables
    assert head[1:] == (
        "what", "step, ms", "compute", "update", "communicate", "wait", "for", "samples/s", "memory, GB", "MB a step",
        "binds",
    )  # fmt: skip
    terms, number = first.terms, plan_tables.number
    parts = (terms.step, terms.compute, terms.update, terms.communicate, terms.wait)
    sent = number(terms.bytes_per_step / 1e6) if terms.bytes_per_step else ""
    assert rows_shown[0] == [
        "1", first.what, *(number(1e3 * part) for part in parts), terms.waits_for, f"{terms.samples_per_second:,.0f}",
        f"{first.memory / 1e9:.2f}", sent, terms.binds,
    ]  # fmt: skip
    assert f"minibatches of 64, {limit / 1e9:.3g} GB for a process: a step of each replica" in title
    [needs] = [row.reason for row in found.rows if row.what == served.what]
    [row] = [row for row in rows_shown if row[1] == served.what]
    assert row[:-1] == ["", served.what, *[""] * 7, f"{served.memory / 1e9:.2f}", ""]
    assert f"{row[-1]} {needs}\n" in shown
    # those that cannot be split have one reason, which stands there once
    told = "it cannot be split"
    split = {row[-1] for row, of in zip(rows_shown, found.rows, strict=True) if of.reason == told}
    assert [f"{number} {told}" for number in split] == [line for line in shown.splitlines() if line.endswith(told)]
    assert len(rows_shown) == len(found.rows)
    assert needs.startswith("its replica needs")
    assert measured[:2] == (
        "trained with for some seconds: a step in ms",
        ("", "", "compute", "update", "communicate", "wait", "step", "samples/s"),
    )
    assert [row[1] for row in measured[2]] == ["predicted", "measured", "error"]
    for told in (found.why, *found.changes, f"distbelief train {found.task} {first.command} --batch-size 64"):
        assert told in shown
    assert {row.what for row in found.rows} | {f"training with {first.what}"} <= set(said)


def test_the_command_that_a_plan_ends_with_names_its_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("sgd", "single --batch-size 64"), ("adam", "single --optimizer adam --batch-size 64")):
        plan_tables.show_plan(made("1x1", strategies=("single",), optimizer=db.optim(name)))
        assert capsys.readouterr().out.splitlines()[-1].endswith(f" {words}")


def test_the_first_is_first_for_a_reason() -> None:
    found = made(strategies=("single", "allreduce"))
    assert found.first.terms is not None
    [single] = [row for row in found.rows if row.what == "single"]
    assert single.terms is not None
    rate, other = found.first.terms.samples_per_second, single.terms.samples_per_second
    assert found.why.startswith(f"allreduce, 4 replicas: {rate:,.0f} samples/s; ")
    assert f"and what binds is {found.first.terms.binds}; {rate / other:.2f} times single, of whose step " in found.why
    assert found.why.endswith("one more replica brings 5% or more up to 4, the most there can be")
    told = [line.partition(":")[0] for line in found.changes]
    assert told == ["with twice the bandwidth", "with half the latency", "with a straggler (replica 0 half as fast)"]
    assert all(": still allreduce, 4 replicas, " in line for line in found.changes)


def test_another_answer_is_told_where_a_change_brings_it() -> None:
    """A line on which two hosts are hardly slower than one, so that a replica of half the speed decides."""
    found = made(
        "2x1", network=db.NetworkModel(latency=0.0, bandwidth=VECTOR / 0.8e-3), strategies=("single", "allreduce")
    )
    assert found.first.what == "allreduce, 2 replicas"
    assert found.changes[2].startswith("with a straggler (replica 0 half as fast): still allreduce, 2 replicas")
    slower = made(
        "2x1", network=db.NetworkModel(latency=0.0, bandwidth=VECTOR / 1.3e-3), strategies=("single", "allreduce")
    )
    assert slower.first.what == "single"
    assert slower.changes[0].startswith("with twice the bandwidth: allreduce, 2 replicas")


def test_cores_that_slow_each_other_down_make_a_step_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "resolve", lambda *_: TASK)
    asked = ("single", "allreduce")
    alone = {row.what: row.terms for row in planning.plan("own:task", "1x2", strategies=asked).rows}
    monkeypatch.setattr(planning.side_by_side, "measure", lambda *_: planning.Steps(1e-3, 1e-6, 0.5))
    found = planning.plan("own:task", "1x2", strategies=asked)
    slowed = {row.what: row.terms for row in found.rows}
    assert slowed["single"] == alone["single"]
    assert slowed["allreduce, 2 replicas"].compute == pytest.approx(2e-3, rel=0.1)  # type: ignore[union-attr]
    assert any("50% of its speed" in note for note in found.notes)


HERE = str(planning.this_machine())
FEW = ("single", "hogwild")


def at(rate: float) -> Any:
    """What every trial measures."""
    return lambda *_, **__: Terms(1e-3, 0.0, 0.0, 0.0, rate, 0.0)


@pytest.mark.long
def test_the_best_are_run_and_later_plans_are_corrected_by_what_was_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trials, "run", at(1000.0))
    first = made(HERE, run=2, strategies=("single", "hogwild"))
    assert [row.measured is not None for row in first.rows] == [True, True, *[False] * (len(first.rows) - 2)]
    kept = trials.read(tmp_path / "distbelief" / "calibration.json")
    assert [one.what for one in kept] == [row.what for row in first.rows[:2]]
    assert all(one.measured.samples_per_second == 1000.0 for one in kept)
    again = made(HERE, strategies=("single", "hogwild"))
    [before] = [row for row in first.rows if row.what == kept[0].what]
    [after] = [row for row in again.rows if row.what == kept[0].what]
    assert before.terms is not None
    assert after.terms is not None
    assert after.corrected < 1
    assert after.terms.samples_per_second == pytest.approx(before.terms.samples_per_second * after.corrected)
    assert after.terms.step == pytest.approx(before.terms.step / after.corrected)
    assert any("corrected by trials of this task" in note for note in again.notes)
    # what a trial is kept with is the price itself: a correction is not corrected again
    made(HERE, run=1, strategies=("single", "hogwild"))
    newest = trials.read(tmp_path / "distbelief" / "calibration.json")[-1]
    prices = [row.terms.samples_per_second for row in first.rows if row.what == newest.what and row.terms]
    assert newest.predicted.samples_per_second == pytest.approx(prices[0])


def test_what_this_machine_cannot_hold_is_not_run_but_the_next_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "run", at(1000.0))
    monkeypatch.setattr(planning, "this_machine", lambda: Machines(1, 2))
    usual = made("1x2", strategies=("single", "allreduce"))
    [one] = [row for row in usual.rows if row.what == "single"]
    assert usual.first.what == "allreduce, 2 replicas"
    monkeypatch.setattr(planning, "free_memory", lambda: 1.5 * one.memory)
    found = {row.what: row for row in made("1x2", run=1, strategies=("single", "allreduce")).rows}
    assert found["single"].measured is not None
    first = found[usual.first.what]
    assert (first.measured, first.terms is not None) == (None, True)
    assert "its 2 processes need up to" in first.reason


@pytest.mark.long
def test_other_machines_are_corrected_by_no_trial_of_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trials, "run", at(1000.0))
    file = tmp_path / "own.json"
    made(HERE, run=1, calibration=file, strategies=FEW)
    assert all(row.corrected == 1.0 for row in made("3x7", calibration=file, strategies=FEW).rows)
    made(HERE, run=1, strategies=FEW)
    monkeypatch.setattr(trials, "this_kind", lambda: "another")
    found = made(HERE, strategies=FEW)  # a usual file is that of all machines which share a home
    assert all(row.corrected == 1.0 for row in found.rows)
    assert any("1 trials" in note and "of another machine" in note for note in found.notes)
    # one that is named is to be of use; of a plan for other machines it is not asked
    with pytest.raises(UsageError, match=r"own\.json: its trials are of .*, and this is another; name a file"):
        made(HERE, calibration=file, strategies=FEW)
    assert made("3x7", calibration=file, strategies=FEW).rows[0].terms is not None


@pytest.mark.parametrize("rate", [0.0, -5.0])
@pytest.mark.long
def test_a_trial_whose_rate_cannot_be_makes_no_calibration_file(
    rate: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trials, "run", at(rate))
    file = tmp_path / "own.json"
    made(HERE, run=1, calibration=file)
    assert trials.read(file) == []
    monkeypatch.setattr(trials, "run", at(10.0))
    made(HERE, run=1, calibration=file)
    [kept] = trials.read(file)
    measured = msgspec.structs.replace(kept.measured, samples_per_second=rate)
    file.write_bytes(msgspec.json.encode([msgspec.structs.replace(kept, measured=measured)]))
    with pytest.raises(
        UsageError, match=rf"own\.json: is no calibration file \(a trial of .* with {rate:g} samples/s\)"
    ):
        made(HERE, calibration=file)


def test_a_calibration_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_bytes(b" " * (trials.MOST_BYTES + 1))
    with pytest.raises(UsageError, match="it has 4,194,305 bytes, more than 4,194,304"):
        made(HERE, calibration=file)


@pytest.mark.parametrize("command", ["plan", "cost", "split"])
def test_half_a_profile_says_nothing_and_is_told_so(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning.profiling, "measure", interrupted)
    monkeypatch.setattr(planning.splitting, "measure", interrupted)
    assert main.run([command, "digits"]) == 130
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "a part of a profile says nothing, and nothing is kept; --seconds N makes it shorter" in told.err


def test_a_price_that_is_interrupted_is_no_job_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        raise Interrupted("interrupted before the job began")

    monkeypatch.setattr("distbelief.lab.plan.pricing.Simulated.run", run)
    assert main.run(["plan", "digits"]) == 130
    assert "interrupted: a part of a profile says nothing" in capsys.readouterr().err


@pytest.mark.parametrize("began", [True, False])
def test_a_trial_that_is_interrupted_ends_the_plan_and_keeps_nothing(
    began: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> dict[str, str]:
        if not began:
            raise Interrupted("interrupted before the job began")
        return {"outcome": "interrupted"}

    monkeypatch.setattr(db.Local, "run", run)
    with pytest.raises(Interrupted, match="its trial was interrupted"):
        made(HERE, run=1)
    assert not trials.usual_file().parent.exists()


def test_trials_of_another_optimizer_or_of_split_replicas_correct_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "run", at(1000.0))
    made(HERE, run=1, strategies=("single",))
    [kept] = trials.read(trials.usual_file())
    rows = made(HERE, strategies=("single",)).rows
    assert [row.corrected < 1 for row in rows if row.what == "single"] == [True]
    other = made(HERE, strategies=("single",), optimizer=db.optim("adam")).rows
    assert all(row.corrected == 1.0 for row in other)
    steeper, heavier = db.optim("sgd", lr=3.0), db.optim("sgd", momentum=0.9)  # whose update reads and writes a state
    for optimizer, counts in ((steeper, True), (heavier, False)):
        [row] = [row for row in made(HERE, strategies=("single",), optimizer=optimizer).rows if row.what == "single"]
        assert (row.corrected < 1) is counts
    terms = kept.predicted
    split = planning.Row("single, 2 partitions", "single --partitions 2", 1, 0, 0, 2, terms)
    assert planning._corrected(split, [kept], kept.task, 64, SGD).corrected == 1.0
    assert planning._corrected(msgspec.structs.replace(split, partitions=1), [kept], kept.task, 64, SGD).corrected < 1


def test_what_is_measured_on_a_busy_machine_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [StepTime(1, 0.0, 0.5e-3, 0.5e-3, 9)]
    monkeypatch.setattr(planning.profiling, "measure", lambda *_, **__: Profile(points, {}, 2.0))
    monkeypatch.setattr(trials, "run", at(1000.0))
    found = made(HERE, run=1)
    assert found.rows[0].measured is not None
    assert any("keeps nothing" in note for note in found.notes)
    assert trials.read(trials.usual_file()) == []


def test_a_run_that_fails_is_told_and_ends_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise UsageError("not here")

    monkeypatch.setattr(trials, "run", fails)
    found = made(HERE, run=1)
    assert (found.rows[0].measured, found.rows[0].reason) == (None, "not here")
    assert found.rows[0].terms is not None


def test_an_epoch_that_takes_too_long_is_not_run() -> None:
    with pytest.raises(UsageError, match="an epoch would take 500 s, more than 120"):
        trials.run("digits", PlanCandidate(db.Single()), 64, 500.0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--run", "1", "--machines", "9x9"], "runs on this machine, which is"),
        (["--run", "-1"], "--run -1: must be 0 or more"),
        (["--calibration", "spoilt.json"], "is no calibration file"),
        (["--run", "1", "--calibration", "/proc/none/own.json"], "cannot be written"),
    ],
)
def test_a_run_or_a_calibration_that_cannot_be_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "_here", lambda *_: pytest.fail("it is refused before anything is measured"))
    Path("spoilt.json").write_text('[{"machine": 3')
    assert main.run(["plan", "digits", *words]) == 2
    assert told in capsys.readouterr().err


def test_auto_trains_with_the_first_of_the_plan_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[db.Job] = []
    result = {"outcome": "done", "run": "there", "task": "digits"}
    monkeypatch.setattr(db.Local, "run", lambda _, job, __: [trained.append(job), result][1])
    found, asked = made("1x2", strategies=("allreduce",)), dict[str, Any]()
    monkeypatch.setattr(planning, "plan", lambda task, **more: [asked.update(more, task=task), found][1])
    assert main.run(["train", "digits", "auto", "--batch-size", "32", "--optimizer", "adam", "--json"]) == 0
    assert (asked["task"], asked["batch_size"], asked["optimizer"].name) == ("digits", 32, "adam")
    [job] = trained
    assert job.strategy == db.Allreduce(replicas=2, optimizer=db.optim("adam"))
    assert job.batch_size == 32
    capsys.readouterr()
    monkeypatch.setattr("distbelief.record.live.summary", lambda *_: "")
    assert main.run(["train", "digits", "auto"]) == 0
    assert f"{found.why}\ndistbelief train digits allreduce --replicas 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digits", "auto", "--replicas", "3"], "--replicas: auto chooses it"),
        (["digits", "auto", "--resume"], "--resume goes on with what was chosen"),
        (["digits", "auto", "--push-every", "3"], "it belongs to strategy downpour"),
        (["digits", "auto", "--device", "cuda"], "--device cuda: auto plans for cpu"),
        (["digits", "auto", "--threads", "2"], "--threads 2: auto plans for 1"),
        (["digts", "auto"], "did you mean 'digits'?"),
    ],
)
def test_auto_refuses_what_a_plan_knows_nothing_of(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["train", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_last_minibatch_that_no_replica_could_compute_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning.profiling, "measure", lambda *_, **__: pytest.fail("it is measured"))
    data = TensorData(torch.zeros(65, 8), torch.zeros(65, dtype=torch.int64))
    task = Task(model=lambda: nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10)), train=lambda: data)
    with pytest.raises(UsageError, match="the last minibatch of an epoch is of one sample"):
        planning.plan(task, "1x2")
