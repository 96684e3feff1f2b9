"""A plan: what is compared, what is left out and why, parts that add up, and an answer that follows what it should."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import distbelief as db
from distbelief.cli import main
from distbelief.costs.profile import Point, Profile
from distbelief.costs.trace import Tracer
from distbelief.errors import UsageError
from distbelief.places.simulated.handling import INSTANT, Handling
from distbelief.planner import plan as planning
from distbelief.planner.candidates import PLANNED, Candidate, Machines, candidates, memory
from distbelief.planner.plan import Plan
from distbelief.planner.pricing import Cluster, Pricing, handling
from distbelief.tasks import Task, TensorData

WIDE = 256
DATA = TensorData(torch.zeros(8, WIDE), torch.zeros(8, dtype=torch.int64))
TASK = Task(model=lambda: nn.Linear(WIDE, WIDE, bias=False), train=lambda: DATA)
VECTOR = 4 * WIDE * WIDE
"""Bytes of its parameters."""
SGD = db.optim("sgd")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile with 1 ms a minibatch of any size, and memory as fast as it usually is."""
    points = [Point(1, 0.0, 0.5e-3, 0.5e-3, 9), Point(64, 0.0, 0.5e-3, 0.5e-3, 9)]
    monkeypatch.setattr(planning.profiling, "measure", lambda *_, **__: Profile(points, {}, 1.0))
    monkeypatch.setattr(planning, "handling", lambda *_: Handling())
    monkeypatch.setattr(planning, "held", lambda: 10_000_000)


def made(machines: str = "2x2", network: db.NetworkModel | None = None, **more: Any) -> Plan:
    return planning.plan(TASK, machines, network, **more)


def test_parts_of_a_step_add_up_and_the_first_is_the_fastest() -> None:
    rows = made().rows
    rates = [row.terms.samples_per_second for row in rows if row.terms]
    assert rates == sorted(rates, reverse=True)
    for row in rows:
        assert row.terms is not None
        assert row.terms.step == pytest.approx(row.replicas * 64 / row.terms.samples_per_second)
        assert min(row.terms.compute, row.terms.update, row.terms.communicate, row.terms.wait) >= 0
        assert row.terms.compute == pytest.approx(1e-3)


def test_a_price_is_what_the_virtual_cluster_says() -> None:
    """One replica and one shard on a network where only the bytes count: a step, and twice the vector on the line."""
    cluster = Cluster(Machines(2, 1), db.NetworkModel(latency=0.0, bandwidth=1e8), 1e-3, INSTANT)
    one = Candidate(db.Allreduce(replicas=2, optimizer=SGD))
    rate, _ = Pricing(TASK, 64).rate(one, cluster)
    # halving and doubling, or a ring, of two: half of the vector each way, twice
    assert 2 * 64 / rate == pytest.approx(1e-3 + VECTOR / 1e8, rel=0.05)
    alone, sent = Pricing(TASK, 64).rate(Candidate(db.Single(optimizer=SGD)), cluster)
    assert 64 / alone == pytest.approx(1e-3, rel=0.01)
    assert sent == 0


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


def test_what_does_not_fit_is_a_row_with_its_reason() -> None:
    tracer = Tracer(TASK, DATA.batch(torch.arange(2)))
    trace = tracer.follow(64, SGD)
    held = memory(Candidate(db.Downpour(replicas=4, shards=2, optimizer=SGD)), trace, 1000)
    assert held["shard"] == 1000 + math.ceil(3 * VECTOR / 2)
    assert held["replica"] > 1000 + 4 * VECTOR
    adam = memory(Candidate(db.Allreduce(2, db.optim("adam"))), tracer.follow(64, db.optim("adam")), 0)["replica"]
    assert adam - memory(Candidate(db.Allreduce(2, SGD)), trace, 0)["replica"] == pytest.approx(2 * VECTOR, rel=0.01)
    rows = {row.what: row.memory for row in made().rows}
    limit = (rows["single"] + rows["downpour, 2 replicas, 2 shards"]) / 2
    found = {row.what: row for row in made(max_memory=limit).rows}
    assert "needs" in found["downpour, 2 replicas, 2 shards"].reason
    assert found["downpour, 2 replicas, 2 shards"].terms is None
    assert found["single"].terms is not None


def test_a_trial_that_fails_is_a_row_and_ends_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Pricing.terms

    def fails(self: Pricing, candidate: Candidate, cluster: Cluster) -> Any:
        if candidate.strategy.name == "hogwild":
            raise UsageError("not here")
        return terms(self, candidate, cluster)

    monkeypatch.setattr(Pricing, "terms", fails)
    rows = made().rows
    assert [row.reason for row in rows if row.command.startswith("hogwild")] == ["not here", "not here"]
    assert rows[0].terms is not None


def test_candidates_are_powers_of_two_and_all_cores() -> None:
    found = [str(one) for one in candidates(Machines(3, 2), PLANNED, SGD)]
    assert "single" in found
    assert {one for one in found if one.startswith("allreduce")} == {f"allreduce, {n} replicas" for n in (2, 4, 6)}
    assert "downpour, 6 replicas, 3 shards" in found
    assert "hogwild, 4 replicas" not in found


def test_it_says_from_where_on_one_more_replica_brings_too_little() -> None:
    terms = made(strategies=("allreduce",)).first.terms
    assert terms is not None

    def row(replicas: int, rate: float) -> planning.Row:
        one = db.Allreduce(replicas)
        return planning.Row(str(one), f"allreduce --replicas {replicas}", replicas, 0, 0,
            planning.msgspec.structs.replace(terms, samples_per_second=rate))  # fmt: skip

    assert planning._enough([row(1, 100.0), row(2, 190.0), row(4, 200.0)], "allreduce").startswith("from 2 replicas on")
    assert "up to 4" in planning._enough([row(1, 100.0), row(2, 190.0), row(4, 350.0)], "allreduce")


def test_memory_is_as_fast_as_an_update_was() -> None:
    assert handling(SGD, 1 << 16).memory > 1e8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "which task?"),
        (["mnits"], "did you mean 'mnist'?"),
        (["digits", "--machines", "four"], "--machines 'four': write hosts and the cores of each, such as 4x8"),
        (["digits", "--machines", "0x2"], "0 hosts, must be from 1 to 256"),
        (["digits", "--network", "latency=10"], "its unit is missing"),
        (["digits", "--network", "bandwith=1Gbit"], "did you mean 'bandwidth'?"),
        (["digits", "--max-memory", "1MB"], "least is needed by"),
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
