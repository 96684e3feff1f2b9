"""Standbys of shards that descend: what they hold, and that a shard's death costs nothing, whenever it dies."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from oracles import smooth
from torch import Tensor
from watching.observed import Observed, Watcher

from distbelief.core import records
from distbelief.core.conversations import membership
from distbelief.core.messages import Message
from distbelief.core.records import Cause
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Sandblaster
from distbelief.testing.simulations import Endings
from distbelief.transport.cluster_model import NetworkModel

SAMPLES, ITERATIONS = 83, 5
KINDS: list[dict[str, Any]] = [
    {"deterministic": True}, {"deterministic": True, "batch_size": 40}, {"deterministic": True, "method": "cg"},
    {"deterministic": True, "method": "gradient", "line_search": "none", "step": 0.1}, {"deterministic": True,
        "backup_portions": 0},
]  # fmt: skip


def stage(*crashes: Crash, dtype: torch.dtype = torch.float64, **options: Any) -> Observed:
    strategy = Sandblaster(3, 2, ITERATIONS, portion_size=4, send_every=2, tolerance=0.0, **{"standby": 1, **options})
    network, compute = NetworkModel(jitter=3.0), ComputeModel(spread="exponential")
    job = Job(smooth(SAMPLES, dtype), strategy, evaluate_every=0, checkpoint_every=0)
    return Observed(job, Simulated(network, compute, crashes, restart_seconds=1e-3))


@functools.cache
def calm(kind: int) -> tuple[bytes, int]:
    """The bits of a run without standbys and deaths, and how many messages its second shard sends."""
    run, sent = stage(standby=0, **KINDS[kind]), Counter[str]()
    run.look(lambda sender, *_: sent.update([sender]))
    run.simulation.run()
    return run.vector(), sent["shard 1"]


class Last(Watcher):
    """Keeps all that standbys hold when they are told to stop."""

    def __init__(self, run: Observed) -> None:
        self.run, self.held = run, dict[str, tuple[dict[str, Tensor], Any]]()
        run.watch(self)

    def delivered(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, membership.Stop) and to.startswith("standby"):
            standby: Any = self.run.simulation.driver._players[to].machine
            held, shard = standby.following.held.everything(), standby.following.shard
            self.held[to] = {name: value.clone() for name, value in held.items()}, shard


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [*KINDS, {}, {"line_search": "none", "step": 3.0, "deterministic": False}], ids=str)
def test_a_standby_holds_every_vector_of_its_shard_bit_for_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    run = stage(dtype=dtype, **options)
    last = Last(run)
    run.simulation.run()
    for index, shard in enumerate(run.simulation.shards):
        arrays, twin = last.held[f"standby {index}"]
        own = shard.held.everything()  # type: ignore[attr-defined]
        assert arrays.keys() == own.keys()
        assert len(arrays) > 5
        assert all(torch.equal(arrays[name], own[name]) for name in own)
        for name in ("_newest", "_taken", "_into", "_ordered", "_next"):
            assert getattr(twin.sums, name) == getattr(shard.sums, name)
        assert twin.version.updates == shard.version.updates > 2


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda kind: str(KINDS[kind]))
def test_whenever_a_shard_dies_nobody_goes_back_and_the_bits_are_those_of_calm(kind: int) -> None:
    """Also as it sends its standby what it holds: then there is a checkpoint to go back to."""
    bits, count = calm(kind)
    stood, moments = 0, some(range(1, count, 7), SEEDS // 2)
    for moment in moments:
        run = stage(Crash("shard 1", moment), **KINDS[kind])
        endings = Endings(run)
        run.simulation.run()
        died = run.simulation.killed == ["shard 1"]
        if endings.hold() is Cause.SHARD_UNSAVED:
            continue
        assert run.vector() == bits, f"it died at its message {moment}"
        succeeded = run.told(records.Succeeded)
        rewound = run.told(records.Rewound)
        if not died or rewound:
            continue
        stood += len(succeeded)
        iterations = [record.iteration for record in run.told(records.Iterated)]
        assert iterations == sorted(iterations)
        if "batch_size" not in KINDS[kind]:
            evaluations = sum(record.evaluations for record in run.told(records.Iterated))
            counted = run.trained()
            assert counted == evaluations * SAMPLES, "a portion counted twice, or was lost"
    assert stood > len(moments) / 2


@pytest.mark.long
def test_a_standby_that_comes_in_the_midst_of_an_evaluation_is_sent_what_waits_for_its_turn() -> None:
    """The standby of the heir has begun to follow while work units were summed in order."""
    bits, count = calm(0)
    twice = 0
    for first, second in some(product(range(20, count, 13), (12, 20, 28))):
        run = stage(Crash("shard 1", first), Crash("shard 1", second), deterministic=True)
        endings = Endings(run)
        run.simulation.run()
        if endings.hold() is not Cause.SHARD_UNSAVED:
            assert run.vector() == bits, f"it died at messages {first} and {second}"
            twice += [isinstance(record, records.Succeeded) for record in run.records].count(True) == 2
    assert twice > min(3, SEEDS // 7)
