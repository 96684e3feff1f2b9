"""Jobs on a topology: rounds take their closed form, and the busiest link is named with who shares it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask

import distbelief as db
from distbelief.errors import UsageError
from distbelief.transport.virtual import HEADER

STEP = 1e-3
SIZE = 1_000_000


def play(strategy: Any, topology: str, rounds: int = 2, size: int = SIZE, **options: Any) -> dict[str, Any]:
    """A job of phantoms in which only the network takes time, but steps."""
    samples = rounds * strategy.replicas
    data = db.TensorData(torch.zeros(samples, 1), torch.zeros(samples, dtype=torch.int64))
    task = db.Task(model=lambda: torch.nn.Linear(size // 4, 1, bias=False), train=lambda: data)
    place = db.Simulated(
        options.pop("network", db.NetworkModel(latency=20e-6, bandwidth=1.25e8)),
        db.ComputeModel(step=STEP, spread="constant"), phantom=True, handling=db.INSTANT, topology=topology, **options,
    )  # fmt: skip
    return db.run(db.Job(task=task, strategy=strategy, batch_size=1, evaluate_every=0, checkpoint_every=0), on=place)


def round_seconds(strategy: Any, topology: str) -> float:
    """Of one all-reduce: what two rounds more take, less their steps."""
    short, long = (float(play(strategy, topology, rounds)["seconds"]) for rounds in (2, 4))
    return (long - short) / 2 - STEP


def test_a_ring_in_walk_order_takes_as_long_as_on_one_switch() -> None:
    """Each link once a step: of 2 (p - 1) pieces, the latency is that of the longest way."""
    piece, steps = (SIZE / 8 + HEADER) / 1.25e8, 14
    for topology, cables in (("tree:8", 2), ("tree:2x4", 4), ("tree:4x2", 4)):
        took = round_seconds(db.Allreduce(8, algorithm="ring"), topology)
        assert took == pytest.approx(steps * (piece + cables * 10e-6), rel=0.02)


def test_far_partners_share_an_uplink() -> None:
    took = round_seconds(db.Allreduce(8, algorithm="halving-doubling"), "tree:2x4")
    near, far = (SIZE / 2 + SIZE / 4) / 1.25e8 + 2 * 20e-6, 4 * SIZE / 8 / 1.25e8 + 40e-6
    assert took == pytest.approx(2 * (near + far), rel=0.02)


def test_slow_uplinks_of_a_file_are_slow(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text(
        "SwitchName=a Nodes=n[0-1] LinkSpeed=1000\nSwitchName=b Nodes=n[2-3] LinkSpeed=1000\n"
        "SwitchName=c Switches=a,b LinkSpeed=250\n"
    )
    took = round_seconds(db.Allreduce(4, algorithm="ring"), str(file))
    assert took == pytest.approx(6 * ((SIZE / 4 + HEADER) / 31.25e6 + 40e-6), abs=1.5 * STEP)  # rounds overlap a step


def test_the_busiest_link_of_a_parameter_server_is_the_shards_own() -> None:
    told = {shards: play(db.Synchronous(16, shards=shards), "fat-tree:4", 6)["network"] for shards in (1, 4)}
    one = told[1]["busiest"]
    assert "host 0" in one["link"]
    assert 0.4 < one["busy"] < 0.6  # in rounds, half of the time it is sent to
    assert one["flows"] >= 30  # of 15 replicas pushes, fetches or their answers
    assert {role for source, target, _ in one["shared_by"] for role in (source, target)} >= {"shard 0"}
    assert told[1]["told"].count("no switch makes faster; more shards do") == 1
    assert told[1]["host_sends"] > 3 * told[4]["host_sends"]
    assert told[4]["least"] == pytest.approx(2 * 15 / 16 * SIZE)


def test_a_ring_sends_the_least_that_can_be() -> None:
    told = play(db.Allreduce(8, algorithm="ring"), "tree:2x4")["network"]
    assert told["host_sends"] == pytest.approx(told["least"], rel=0.01)
    assert told["least"] == 2 * 7 / 8 * SIZE
    assert (told["topology"], told["hosts"], told["of"]) == ("tree:2x4", 8, 8)


def test_several_replicas_of_a_host_share_its_link() -> None:
    """Two on each of two hosts, by hosts or by --per-host: a host sends its sum once."""
    shared = db.Hosts(cores=4, replicas=2)
    for options in ({"hosts": shared}, {}):
        strategy = db.Allreduce(4, algorithm="hierarchical", per_host=2)
        told = play(strategy, "tree:2x2", **options)["network"]
        assert told["hosts"] == 2
        assert told["host_sends"] == pytest.approx(SIZE, rel=0.01)


def test_the_seed_chooses_routes_and_the_same_seed_is_the_same_job() -> None:
    def one(seed: int) -> tuple[float, str]:
        data = db.TensorData(torch.zeros(64, 1), torch.zeros(64, dtype=torch.int64))
        task = db.Task(model=lambda: torch.nn.Linear(250_000, 1, bias=False), train=lambda: data)
        job = db.Job(task=task, strategy=db.Downpour(16, shards=4), batch_size=1, evaluate_every=0, seed=seed)
        result = db.run(job, on=db.Simulated(phantom=True, topology="fat-tree:4"))
        return float(result["seconds"]), str(result["network"])

    assert one(0) == one(0) != one(1)


def test_an_endless_bandwidth_is_refused() -> None:
    with pytest.raises(UsageError, match="a bandwidth that is finite"):
        play(db.Downpour(2), "tree:2", network=db.NetworkModel(bandwidth=float("inf")))


def test_draw_shows_order_loads_and_the_busiest_link(ask: Ask, tmp_path: Path) -> None:
    said = ask("draw ring --topology tree:4x8").out
    assert "in this order: host 0, host 1, " in said
    assert "a host sends at most 1.94 times the vector; the least is 1.94" in said
    assert "  switch 0: switch 1 to switch 4 1.94 there, 1.94 back" in said
    assert "  switch 4: host 24 to host 31 1.94 there, 1.94 back" in said
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=a Nodes=n0,n2\nSwitchName=b Nodes=n1,n3\nSwitchName=c Switches=a,b LinkSpeed=1000\n")
    said = ask(["draw", "ring", "--topology", str(file)]).out
    assert "in this order: n0, n2, n1, n3" in said
    assert "it would be 3.00 by names" in said
    assert "the busiest link is" in said
