"""A plan: what is compared, what is left out and why, parts that add up, and an answer that follows what it should."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from asking import Ask
from torch import nn

import distbelief as db
from distbelief.cli import main, tables
from distbelief.errors import Interrupted, UsageError
from distbelief.lab import number
from distbelief.lab.cost.options import PlanRequest
from distbelief.lab.cost.splitting import PartitionCost, SplitCost, WholeStep
from distbelief.lab.cost.trace import Tracer
from distbelief.lab.plan import halving
from distbelief.lab.plan import plan as planning
from distbelief.lab.plan.candidates import PLANNED, Machines, PlanCandidate, candidates, memory
from distbelief.lab.plan.halving import Measurements
from distbelief.lab.plan.plan import Row, TrainingPlan
from distbelief.lab.plan.pricing import PricedCluster, Pricing, Terms, memory_speed
from distbelief.lab.plan.scaling import curve_of, scaling
from distbelief.places.simulated.handling import INSTANT, Handling
from distbelief.split.options import Split
from distbelief.tasks import Task, TensorData

WIDE = 256
DATA = TensorData(torch.zeros(8, WIDE), torch.zeros(8, dtype=torch.int64))
TASK = Task(model=lambda: nn.Linear(WIDE, WIDE, bias=False), train=lambda: DATA)
VECTOR = 4 * WIDE * WIDE
"""Bytes of its parameters."""
SGD = db.optim("sgd")
TRACE = Tracer(TASK, DATA.batch(torch.arange(2))).follow(64, SGD)
HERE = Machines(1, 2)
"""What this machine is said to be."""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Candidates are said to have steps of 1 ms here, without being run, and memory to be as fast as it usually is."""
    monkeypatch.setattr(planning, "this_machine", lambda: HERE)
    monkeypatch.setattr(halving, "LOCK", f"\0{tmp_path}")
    monkeypatch.setattr(halving, "busy", lambda: 1.0)
    monkeypatch.setattr(halving, "measure", at(1e-3))
    monkeypatch.setattr(planning, "memory_speed", lambda *_: Handling())
    monkeypatch.setattr(planning, "held", lambda: 10_000_000)
    monkeypatch.setattr(planning.splitting, "measure", refuse)


def at(compute: float, **steps: float) -> Any:
    """What measures that each step takes so long, or with these strategies as long as they are said to take."""

    def measure(_: Any, asked: list[PlanCandidate], request: PlanRequest, *__: Any, **___: Any) -> Measurements:
        found = {}
        for one in asked:
            step = steps.get(one.strategy.name, compute)
            found[str(one)] = Terms(step, 0.0, 0.0, 0.0, one.replicas * request.batch_size / step, 0.0)
        best = sorted(found.items(), key=lambda item: -item[1].samples_per_second)
        return Measurements(dict(best), {})

    return measure


def refuse(*_: Any, **__: Any) -> Any:
    raise UsageError("it cannot be split")


def made(machines: str = "2x2", network: db.NetworkModel | None = None, tell: Any = bool, **more: Any) -> TrainingPlan:
    return planning.plan(TASK, PlanRequest(machines=machines, network=network or db.NetworkModel(), **more), tell)


@pytest.mark.long
def test_the_split_that_a_task_brings_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[str] = []

    def asked(_: Task, split: Split, *__: Any) -> Any:
        priced.append(split.text)
        raise UsageError("it cannot be split")

    monkeypatch.setattr(planning.splitting, "measure", asked)
    own = dataclasses.replace(TASK, split="fc*=columns")
    import_module("distbelief.places.simulated.running")  # else it would keep what is patched for this test
    monkeypatch.setattr(db.tasks, "resolve", lambda *_: own)
    planning.plan(own, PlanRequest(machines="2x2"))
    assert set(priced) == {"fc*=columns"}
    priced.clear()
    assert main.run(["split", "digits"]) == main.run(["split", "digits", "--split", "stages"]) == 2
    assert priced == ["fc*=columns", "stages"]


@pytest.mark.long
def test_parts_of_a_step_add_up_and_the_first_is_the_fastest() -> None:
    rows = made().rows
    assert {(row.partitions, row.reason) for row in rows if row.machines == "2x2" and not row.terms} == {
        (2, "it cannot be split")
    }
    rates = [row.rate for row in rows if row.machines == "2x2" and row.terms]
    assert rates == sorted(rates, reverse=True)
    for row in rows[: len(rates)]:
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


@pytest.mark.long
def test_a_straggler_binds_where_the_others_wait_for_it_and_is_told_where_it_is_gone() -> None:
    line = db.NetworkModel(latency=0.0, bandwidth=1e12)
    found = made("4x1", line, slow={1: 4.0}, strategies=("allreduce", "downpour"))
    terms = {row.what: row.terms for row in found.rows if row.machines == "4x1"}
    waited, alone = terms["allreduce, 4 replicas"], terms["downpour, 1 replica, 1 shard"]
    # three of the four milliseconds would not be there, and three of four replicas wait as long
    assert waited.binds == "a straggler"
    assert waited.spared["a straggler"] == pytest.approx(3e-3, rel=0.1)
    assert waited.wait == pytest.approx(3 / 4 * 3e-3, rel=0.1)
    assert sum(waited.spared.values()) == pytest.approx(4 * 64 / waited.samples_per_second)
    assert alone.spared["a straggler"] == 0.0  # replica 1 is none of its replicas
    assert found.changes[2].startswith("without a straggler: ")
    assert float(found.changes[2].split(", ")[-1].split()[0].replace(",", "")) > waited.samples_per_second


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stragglers", "9:2"], "replica 9 cannot be slow: there are replicas 0 to 1"),
        (["--stragglers", "1:0"], "replica 1 slower 0.0 times: must be more than 0"),
        (["--stragglers", "5%x10"], "a plan knows only replicas on slower machines"),
        (["--stragglers", "1:2,1:3"], "--stragglers 1:: is given twice; leave one off"),
        (["--network", "latency=1us,latency=2us"], "--network latency=: is given twice; leave one off"),
    ],
)
def test_a_straggler_or_a_network_that_cannot_be_is_refused_before_anything_is_measured(
    words: list[str], told: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "Needs", lambda *_: pytest.fail("it is refused first"))
    assert told in ask(["plan", "digits", "--machines", "1x2", *words], 2).err


def test_what_a_process_holds_without_a_model_has_no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    [held] = memory(PlanCandidate(db.Single(optimizer=SGD)), TRACE, 0).values()
    monkeypatch.setattr(planning, "held", lambda: 10**9)
    assert made("1x2", strategies=("single",)).first.memory == round(10**9 + 1.15 * held + 4e6)


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
    found = {row.what: row for row in made(max_memory=limit).rows if row.machines == "2x2"}
    assert "needs" in found["downpour, 2 replicas, 2 shards"].reason
    assert found["downpour, 2 replicas, 2 shards"].terms is None
    assert found["single"].terms is not None


def test_an_optimizer_that_some_candidates_cannot_have_is_their_reason_and_ends_no_plan() -> None:
    rows = made("2x1", optimizer=db.optim("lars"), strategies=("downpour", "allreduce")).rows
    found = {row.what: row for row in rows if row.machines == "2x1"}
    assert "--optimizer lars needs the norms of whole layers" in found["downpour, 2 replicas, 2 shards"].reason
    assert found["downpour, 1 replica, 1 shard"].terms is not None
    assert found["allreduce, 2 replicas"].terms is not None


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


def test_memory_is_as_fast_as_an_update_was() -> None:
    """Of SGD gradient and parameters are touched, of Adam two more vectors."""
    assert memory_speed(SGD, 1000, 1e-6).memory == pytest.approx(8e9)
    assert memory_speed(db.optim("adam"), 1000, 1e-6).memory == pytest.approx(16e9)


def split_cost(computes: float, split: str = "neurons", partitions: int = 2) -> SplitCost:
    """Of partitions alike, beside a whole model of 1 ms."""
    held = {"parameters": 5_000_000, "gradients": 5_000_000, "optimizer state": 1_000_000, "kept and received": 2_000}
    own = [PartitionCost(number, 10, held, computes, 0.0, 0.1e-3, 2, 100) for number in range(partitions)]
    whole = WholeStep(0.0, 1e-3, 0.1e-3, {"parameters": 9_000_000})
    step: dict[str, Any] = {"traced": "", "batch_size": 64, "schedule": "sequential", "microbatches": 1, "step": 1.0,
        "sending": 0.0}  # fmt: skip
    nowhere: dict[str, Any] = {"placements": [], "crossings": [], "ways": []}
    return SplitCost(task="", split=Split(split, partitions), partition_costs=own, whole=whole, **step, **nowhere)


LAYERS = Task(
    model=lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE)), train=lambda: DATA
)  # as many operations before the cut as behind it


def split_step(strategy: db.Strategy, cost: SplitCost, **more: Any) -> Terms:
    """A step of the whole takes 2 ms, twice what it took beside the split one, so all that computes does."""
    cluster = PricedCluster(Machines(1, 2), db.NetworkModel(), 2e-3, INSTANT, INSTANT, splits={2: cost})
    return Pricing(LAYERS, 64).price(PlanCandidate(strategy), dataclasses.replace(cluster, **more))


def test_a_split_model_takes_the_time_of_its_schedule_on_the_virtual_cluster() -> None:
    one = db.Single(partitions=2, optimizer=SGD)
    together = split_step(one, split_cost(0.6e-3), together=0.5)
    assert together.step == pytest.approx(2 * 0.6e-3 / 0.5, rel=0.05)
    assert together.step == pytest.approx(64 / together.samples_per_second, rel=0.05)
    in_turn = split_step(one, split_cost(0.6e-3, "stages"))
    assert in_turn.step == pytest.approx(2 * 2 * 0.6e-3, rel=0.05)
    assert in_turn.wait == pytest.approx(2 * 0.6e-3, rel=0.1)
    slow = split_step(one, split_cost(0.6e-3, "stages"), slow=((0, 2.0),))
    assert slow.step == pytest.approx(2 * in_turn.step, rel=0.05)


def test_each_partition_of_a_split_model_updates_its_part_and_messages_cost_it_time() -> None:
    """Each of two partitions holds half of two layers, of whose parameters an update touches two vectors, after its sum
    was copied.
    """
    one, usual = (
        db.Single(partitions=2, optimizer=SGD),
        split_step(db.Single(partitions=2, optimizer=SGD), split_cost(0.6e-3)).step,
    )
    half = VECTOR + 4 * WIDE
    memory = split_step(one, split_cost(0.6e-3), private=Handling(0.0, half / 1e-3))
    assert memory.step - usual == pytest.approx(4e-3, rel=0.05)
    assert split_step(one, split_cost(0.6e-3), handling=Handling(1e-3, math.inf)).step > usual + 2e-3


def test_split_replicas_are_priced_as_jobs_of_theirs() -> None:
    """Two replicas of two partitions each, on four cores, compute as one does; on two, they take turns."""
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

    def measured(_: Task, split: Any, *__: Any) -> tuple[SplitCost, list[Any]]:
        asked.append(split.partitions)
        if split.partitions > 2:
            raise UsageError("not over so many")
        return split_cost(0.3e-3), []

    monkeypatch.setattr(planning.splitting, "measure", measured)
    found = planning.plan(LAYERS, PlanRequest(machines="2x4", strategies=("single",)))
    rows = {row.what: row for row in found.rows if row.machines == "2x4"}
    assert asked == [2, 4]
    assert rows["single, 4 partitions"].reason == "not over so many"
    assert rows["single, 2 partitions"].command == "single --partitions 2"
    assert found.first.what == "single, 2 partitions"
    apart = planning.plan(LAYERS, PlanRequest(machines="8x1", strategies=("single",))).rows
    assert [row.what for row in apart if row.machines == "8x1"] == ["single"]
    found = planning.plan(LAYERS, PlanRequest(machines="2x4", strategies=("downpour", "allreduce")))
    both = {row.what: row for row in found.rows if row.machines == "2x4"}
    for replicas in (1, 2, 4):  # two partitions each, on hosts of four cores
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


def test_a_minibatch_that_does_not_fit_this_machine_is_refused_before_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distbelief.lab.cost.cost.free_memory", lambda: 1_000)
    with pytest.raises(UsageError, match=r"--batch-size 64: it needs .* GB, and 0\.0 GB are free here; plan with a"):
        made()


def test_the_command_shows_a_table_or_json(ask: Ask) -> None:
    shown = ask("plan digits --max-memory 40GB").out
    for told in ("digits on 1x2", "hogwild, 2 replicas", "samples/s", "planned in ", "distbelief train digits"):
        assert told in shown
    assert planning.UNSEEN in shown
    found = json.loads(ask("plan digits --machines 1x1 --strategies single --json").out)
    assert found["rows"][0]["command"] == "single"
    assert [row["machines"] for row in found["rows"] if row["measured"]] == ["1x2"] * 2


def shown_table(plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch) -> tuple[str, tuple[str, ...], list[list[str]]]:
    """Title, columns and rows of the table of a plan."""
    shown: list[tuple[str, tuple[str, ...], list[list[str]]]] = []
    monkeypatch.setattr(tables, "show", lambda *table: shown.append(table))
    tables.show_plan(plan)
    [table] = shown
    return table


@pytest.mark.long
def test_the_table_has_every_part_of_a_step_and_the_lines_below_it_say_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    [served] = [row for row in made().rows if row.what == "downpour, 4 replicas, 2 shards"]
    limit = served.memory - 1.0
    found = made(max_memory=limit, tell=said.append)
    title, head, rows = shown_table(found, monkeypatch)
    shown, first = capsys.readouterr().out, found.first
    assert head == (
        "", "what", "predicted", "measured", "error", "step, ms", "compute", "update", "communicate", "wait",
        "memory, GB", "binds",
    )  # fmt: skip
    assert first.predicted is not None
    terms = first.predicted
    parts = (terms.step, terms.compute, terms.update, terms.communicate, terms.wait)
    assert rows[0] == [
        "1", first.what, f"{terms.samples_per_second:,.0f}", "", "", *(number(1e3 * part) for part in parts),
        f"{first.memory / 1e9:.2f}", terms.binds,
    ]  # fmt: skip
    assert f"minibatches of 64, {limit / 1e9:.3g} GB for a process: samples/s, and a step" in title
    [needs] = [row.reason for row in found.rows if row.what == served.what]
    [row] = [row for row in rows if row[1] == served.what]
    assert row[:-1] == ["", served.what, *[""] * 8, f"{served.memory / 1e9:.2f}"]
    assert f"{row[-1]} {needs}\n" in shown
    assert needs.startswith("its replica needs")
    # those that cannot be split have one reason, which stands there once
    told = "it cannot be split"
    split = {row[-1] for row, of in zip(rows, found.rows, strict=True) if of.reason == told}
    assert [f"{number} {told}" for number in split] == [line for line in shown.splitlines() if line.endswith(told)]
    for told in (found.why, *found.changes, f"distbelief train {found.task} {first.command} --batch-size 64"):
        assert told in shown
    assert f"{first.what}, simulated on 2x2" in said


def test_what_is_priced_is_graded_by_what_was_measured_here_in_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all steps take 2 ms with two replicas, 1 ms alone, and none are exchanged in no time."""
    monkeypatch.setattr(halving, "measure", at(1e-3, allreduce=2e-3))
    found = made("4x2", strategies=("single", "allreduce"))
    rows = {row.what: row for row in found.rows if row.measured}
    assert {*rows} == {"single", "single, 2 partitions", "allreduce, 2 replicas"}
    assert all(row.machines == "1x2" for row in rows.values())
    single, both = rows["single"], rows["allreduce, 2 replicas"]
    assert single.predicted.samples_per_second == pytest.approx(64e3, rel=0.05)
    assert both.predicted.samples_per_second == pytest.approx(64e3, rel=0.2)  # cores slow each other down
    *_, shown = shown_table(found, monkeypatch)
    [line] = [row for row in shown if row[1] == "here: allreduce, 2 replicas"]
    error = both.predicted.samples_per_second / both.rate - 1
    assert line[:5] == ["", line[1], f"{both.predicted.samples_per_second:,.0f}", "64,000", f"{error:+.0%}"]
    assert found.first.machines == "4x2"
    assert found.first.measured is None


def test_what_is_measured_here_is_shown_without_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made("1x2", strategies=("single", "hogwild"))
    assert [row.predicted for row in found.rows] == [None] * len(found.rows)
    assert found.why.startswith(
        "hogwild, 2 replicas: 128,000 samples/s, measured; computing takes 100% of a step; 2.00 times"
    )
    assert found.changes == []
    _, head, rows = shown_table(found, monkeypatch)
    assert head[:4] == ("", "what", "samples/s", "step, ms")
    assert rows[0][:4] == ["1", "hogwild, 2 replicas", "128,000", "1"]


def test_the_command_that_a_plan_ends_with_names_its_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("sgd", "single --batch-size 64"), ("adam", "single --optimizer adam --batch-size 64")):
        tables.show_plan(made("1x1", strategies=("single",), optimizer=db.optim(name)))
        assert capsys.readouterr().out.splitlines()[-1].endswith(f" {words}")


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
    """By so much as gradients took longer where each core had a replica which waited for none."""
    monkeypatch.setattr(halving, "measure", at(1e-3, hogwild=2e-3, allreduce=3e-3))
    rows = {row.what: row.predicted for row in made("2x2", strategies=("allreduce", "hogwild")).rows if row.predicted}
    for what, step in (("single", 1e-3), ("allreduce, 4 replicas", 2e-3)):
        assert rows[what].compute == pytest.approx(step, rel=0.1)


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "this machine is busy with something else: its cores were free 50% of the time"
    assert busy not in made("1x2").notes
    monkeypatch.setattr(halving, "busy", lambda: 2.0)
    assert busy in made("1x2").notes


def test_what_this_machine_has_not_the_memory_for_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    [one] = [row for row in made("1x2").rows if row.what == "single"]
    monkeypatch.setattr(planning, "free_memory", lambda: 1.5 * one.memory)
    found = {row.what: row for row in made("1x2").rows}
    assert found["single"].measured is not None
    assert found["hogwild, 2 replicas"].measured is None
    assert found["hogwild, 2 replicas"].reason.startswith("its 2 processes need up to")


def test_where_no_candidate_runs_it_is_single_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {str(one): "not here" for one in candidates(HERE, PLANNED, SGD)}
    monkeypatch.setattr(halving, "measure", lambda *_: Measurements({}, failed))
    for machines in ("1x2", "4x8"):
        found = made(machines)
        assert (found.first.command, found.first.reason) == ("single", "not here")
        assert found.why == "single, since no candidate has run here: not here"


@pytest.mark.parametrize("command", ["plan", "cost", "split"])
def test_half_of_a_measurement_says_nothing_and_is_told_so(
    command: str, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("distbelief.lab.cost.profile.measure", interrupted)
    monkeypatch.setattr(planning.splitting, "measure", interrupted)
    monkeypatch.setattr(halving, "measure", interrupted)
    told = ask([command, "digits"], 130)
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "an unfinished measurement is not kept; --seconds N makes it shorter" in told.err


def test_a_price_that_is_interrupted_is_no_job_that_has_not_begun(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    def run(*_: object) -> None:
        raise Interrupted("interrupted before the job began")

    monkeypatch.setattr("distbelief.lab.plan.pricing.Simulated.run", run)
    assert "interrupted: an unfinished measurement is not kept" in ask("plan digits --machines 2x2", 130).err


def test_auto_trains_with_the_first_of_the_plan_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[db.Job] = []
    result = {"outcome": "done", "run": "there", "task": "digits"}
    monkeypatch.setattr(db.Local, "run", lambda _, job, __: [trained.append(job), result][1])
    found, asked = made("1x2", strategies=("allreduce",)), dict[str, Any]()
    monkeypatch.setattr(planning, "plan", lambda task, request, _: [asked.update(vars(request), task=task), found][1])
    assert main.run(["train", "digits", "auto", "--batch-size", "32", "--optimizer", "adam", "--json"]) == 0
    assert (asked["task"], asked["batch_size"], asked["optimizer"].name) == ("digits", 32, "adam")
    [job] = trained
    assert job.strategy == db.Allreduce(replicas=2, optimizer=db.optim("adam"))
    assert job.batch_size == 32
    capsys.readouterr()
    monkeypatch.setattr("distbelief.record.live.summary", lambda *_: "")
    assert main.run(["train", "digits", "auto"]) == 0
    seconds = f"planned in {found.seconds:.0f} s"
    assert f"{found.why}\n{seconds}\ndistbelief train digits allreduce --replicas 2" in capsys.readouterr().out


def test_a_last_minibatch_that_no_replica_could_compute_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(halving, "measure", lambda *_: pytest.fail("it is measured"))
    data = TensorData(torch.zeros(65, 8), torch.zeros(65, dtype=torch.int64))
    task = Task(model=lambda: nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10)), train=lambda: data)
    with pytest.raises(UsageError, match="the last minibatch of an epoch has one sample"):
        planning.plan(task, PlanRequest(machines="1x2"))


def known_row(count: int, measured: float = 0.0, predicted: float = 0.0) -> Row:
    terms = [Terms(1e-3, 0.0, 0.0, 0.0, rate, 0.0) if rate else None for rate in (measured, predicted)]
    sizes: dict[str, Any] = {"command": "", "machines": "", "replicas": count, "shards": 0, "partitions": 1}
    return Row(what=f"{count} replicas", memory=1, measured=terms[0], predicted=terms[1], **sizes)


def test_what_one_more_brings_is_worked_out_of_rates() -> None:
    """100 samples a second of one, and 10 of each beyond 4; a twentieth of what one makes is not under it."""
    rates = {1: 100.0, 2: 190.0, 4: 300.0, 8: 320.0, 16: 350.0}
    curve = curve_of("rounds", [*rates], [known_row(count, predicted=rate) for count, rate in rates.items()])
    assert [point.speedup for point in curve.points] == pytest.approx([1, 1.9, 3, 3.2, 3.5])
    assert [point.efficiency for point in curve.points] == pytest.approx([1, 0.95, 0.75, 0.4, 3.5 / 16])
    assert [point.more for point in curve.points] == [None, *map(pytest.approx, (0.9, 0.55, 0.05, 0.0375))]
    assert curve.enough == 8
    assert curve.told == "rounds: beyond 8, one more replica brings under 5 % of the rate of one"
    growing = curve_of("rounds", (1, 2), [known_row(1, predicted=100.0), known_row(2, predicted=150.0)])
    assert growing.told == "rounds: up to 2, one more replica brings 5 % of the rate of one, or more"
    # what dips and grows again has not ended to pay
    dips = [known_row(count, predicted=rate) for count, rate in ((1, 100.0), (2, 90.0), (4, 200.0))]
    assert curve_of("rounds", (1, 2, 4), dips).enough is None


def test_what_was_measured_is_over_what_was_measured_and_what_was_simulated_over_what_was_simulated() -> None:
    rows = [known_row(1, 100.0, 200.0), known_row(2, 150.0, 380.0), known_row(4, predicted=700.0), known_row(8)]
    points = curve_of("rounds", (1, 2, 4, 8), rows).points
    assert [point.speedup for point in points] == [1.0, 1.5, 3.5, None]
    assert [point.more for point in points] == [None, 0.5, pytest.approx((700 - 380) / 200 / 2), None]
    assert [(point.measured, point.simulated) for point in points[1:3]] == [(150.0, 380.0), (None, 700.0)]


def test_replicas_that_fit_this_machine_are_measured_and_all_are_simulated_on_as_many_as_they_need() -> None:
    """On a line where only bytes count, and none inside of hosts: two hosts send each other half of a vector twice,
    over one line each, or over one for each of their replicas.
    """
    line = db.NetworkModel(latency=0.0, bandwidth=1e8)
    asked: dict[str, Any] = {"batch_size": 64, "optimizer": SGD}
    [curve] = scaling(TASK, (2, 4), PlanRequest(network=line, strategies=("allreduce",), **asked)).curves
    assert [(point.what, point.measured is not None) for point in curve.points] == [
        ("single", True), ("allreduce, 2 replicas", True), ("allreduce, 4 replicas", False),
    ]  # fmt: skip
    assert [point.speedup for point in curve.points[:2]] == [1.0, 2.0]
    one, _, four = (point.simulated for point in curve.points)
    assert 4 * 64 / four == pytest.approx(64 / one + VECTOR / 2 / 1e8, rel=0.1)
    assert curve.points[2].binds == "network"
    [apart] = scaling(TASK, (2,), PlanRequest(network=line, strategies=("allreduce",), machines="2x1", **asked)).curves
    assert [point.measured for point in apart.points] == [None, None]
    assert 2 * 64 / (apart.points[1].simulated or 0) == pytest.approx(64 / one + VECTOR / 1e8, rel=0.1)


def test_a_split_is_measured_over_each_number_of_partitions(
    monkeypatch: pytest.MonkeyPatch, ask: Ask, tmp_path: Path
) -> None:
    """As `split` predicts each by itself: in shared memory where this machine has the cores, else over the network."""
    asked: list[tuple[str, int, int, bool]] = []

    def measured(_: Task, split: Split, steps: Any, __: Any, line: Any, ___: Any) -> Any:
        asked.append((split.text, split.partitions, steps.batch_size, line.bandwidth == 1e6))
        cost = split_cost(1e-3 / split.partitions, split.text, split.partitions)
        step = 1.1e-3 / split.partitions + (0.2e-3 if line.bandwidth == 1e6 else 0.0)
        return [msgspec.structs.replace(cost, batch_size=32, step=step, sending=0.2e-3)]

    monkeypatch.setattr(planning.splitting, "measure", measured)
    line = "split digits --partitions 2,4 --split neurons --batch-size 32 --network bandwidth=1MB"
    [curve] = json.loads(ask([*line.split(), "--json"]).out)["curves"]
    assert asked == [("neurons", 2, 32, False), ("neurons", 4, 32, True)]
    assert [(point["count"], point["measured"] is not None) for point in curve["points"]] == [
        (1, True), (2, True), (4, False),
    ]  # fmt: skip
    # 1.1 ms of the whole, and the update of 0.1 ms, which is not divided here
    assert [32 / point["simulated"] for point in curve["points"]] == pytest.approx([1.1e-3, 0.55e-3, 0.475e-3])
    assert [point["efficiency"] for point in curve["points"]] == pytest.approx([1, 0.5, 1.1 / 0.475 / 4])
    assert [point["binds"] for point in curve["points"]] == ["processor"] * 3
    shown, picture = ask([*line.split(), "--draw", str(tmp_path / "p.svg")]).out, (tmp_path / "p.svg").read_text()
    for told in ("partitions", "efficiency", "one more", "neurons: "):
        assert told in shown
    assert picture.count("<circle") == 3
    assert picture.count('fill="white" stroke') == 1
    assert "ideal" in picture


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan", "which task?"),
        ("plan mnits", "did you mean 'mnist'?"),
        ("plan digits --machines four", "--machines 'four': write hosts and the cores of each, such as 4x8"),
        ("plan digits --machines 0x2", "0 hosts, must be from 1 to 256"),
        ("plan digits --network latency=10", "its unit is missing"),
        ("plan digits --network bandwidth=manyGbit", "--network"),
        ("plan digits --network bandwidth=0Gbit", "bandwidth"),
        ("plan digits --max-memory 1MB", "needs the least memory"),
        ("plan digits --max-memory 0", "--max-memory 0: must be more than 0, and at most 1e+15"),
        ("plan digits --batch-size 0", "--batch-size 0: must be from 1 to"),
        ("plan digits --seconds nan", "--seconds nan: must be more than 0, and at most 1e+15"),
        ("plan digits --machines 1x1 --strategies allreduce", "--strategies allreduce: none of them runs on 1x1"),
        ("plan digits --strategies downpoor", "did you mean 'downpour'?"),
        ("plan digits --optimizer adm", "did you mean 'adam'?"),
        ("plan mnist --data-dir /nowhere", "no MNIST in /nowhere"),
        ("train digits auto --replicas 3", "--replicas: auto chooses it"),
        ("train digits auto --resume", "--resume: name the strategy that auto chose"),
        ("train digits auto --push-every 3", "it belongs to strategy downpour"),
        ("train digits auto --device cuda", "--device cuda: auto plans for cpu"),
        ("train digits auto --threads 2", "--threads 2: auto plans for 1"),
        ("plan digits --replicas 0", "--replicas 0: numbers are from 1 to 256, the smaller of a range first, as in 1-"),
        ("plan digits --replicas 8-2", "--replicas 8-2: numbers are from 1 to 256"),
        ("plan digits --replicas two", "--replicas two: numbers are from 1 to 256"),
        ("plan digits --replicas 1,8 --machines 2x2", "--replicas 8: 2x2 have 4 cores; name more machines"),
        ("plan digits --replicas 2 --strategies single", "--strategies single: has one replica"),
        ("plan digits --draw x.svg", "--draw x.svg: draws what --replicas shows"),
        ("plan digits --strategy allreduce", "did you mean --strategies?"),
        ("split digits --partitions 0", "--partitions 0: numbers are from 1 to 1024"),
        ("split digits --partitions 1,2 --draw-step x.svg", "--draw-step and --device need one number of --partitions"),
        ("split digits --partitions 1-2 --device cuda", "--draw-step and --device need one number of --partitions"),
        ("split digits --partitions 2,4 --split stage", "did you mean 'stages'?"),
    ],
)
def test_a_wrong_word_is_one_line_with_the_right_one(words: str, told: str, ask: Ask) -> None:
    err = ask(words, 2).err
    assert told in err
    assert err.count("\n") == 1
