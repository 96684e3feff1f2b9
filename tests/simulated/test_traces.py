"""A simulation follows from its seed alone, to the last message and bit; and a change that should change nothing leaves
the golden traces.

After a change that is meant to change what is sent or when, renew them, and look at what has changed:

    DISTBELIEF_RENEW=1 python -m pytest tests/simulated/test_traces.py -k golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from watching.observed import Observed
from watching.trace import Trace

from distbelief.core.optimizer import optim
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import INSTANT
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Downpour
from distbelief.transport.cluster_model import NetworkModel

GOLDEN = Path(__file__).with_name("golden.json")
# no logarithms in here, which another C library may round otherwise
STEADY = ComputeModel(spread="constant", slow={1: 1.7}, straggle_chance=0.1)
UNSTEADY = NetworkModel(jitter=2.0, delay_chance=0.05, delay=1e-3)

JOBS = {
    "plain": (
        Downpour(replicas=3, shards=2),
        Simulated(network=UNSTEADY, compute=STEADY, phantom=True, handling=INSTANT),
    ),
    "prefetch and warm start": (
        Downpour(replicas=3, shards=3, prefetch=1, fetch_every=2, push_every=3, warm_start_steps=6),
        Simulated(network=UNSTEADY, compute=STEADY, phantom=True, handling=INSTANT),
    ),
    "deaths": (
        Downpour(replicas=4, shards=2, push_every=2),
        Simulated(
            network=UNSTEADY,
            compute=STEADY,
            phantom=True,
            handling=INSTANT,
            crashes=(Crash("replica 0", 4), Crash("replica 2", 30)),
        ),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_golden_traces_stay(plain: SimpleNamespace, name: str) -> None:
    strategy, cluster = JOBS[name]
    run = Observed(
        Job(task=plain.classes(plain.mlp, samples=60), strategy=strategy, epochs=2, batch_size=4, seed=3), cluster
    )
    trace = Trace(run.simulation)
    run.run()
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("DISTBELIEF_RENEW"):
        known[name] = {"messages": len(trace.marks) // 2, "digest": trace.digest, "marks": trace.marks}
        GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    golden = known[name]
    same = (
        next(
            (i for i, (a, b) in enumerate(zip(trace.marks, golden["marks"], strict=False)) if a != b), len(trace.marks)
        )
        // 2
    )
    assert trace.digest == golden["digest"], (
        f"message {same + 1} of {golden['messages']} is another; renew the trace if that is meant"
    )


def traced(plain: SimpleNamespace, seed: int) -> tuple[str, bytes]:
    strategy = Downpour(replicas=4, shards=3, optimizer=optim("adam", lr=0.01), push_every=2, prefetch=1)
    cluster = Simulated(network=UNSTEADY, compute=ComputeModel(spread="lognormal"), crashes=(Crash("replica 1", 40),))
    run = Observed(
        Job(task=plain.classes(plain.mlp, samples=60), strategy=strategy, epochs=2, batch_size=4, seed=seed), cluster
    )
    trace = Trace(run.simulation)
    run.run()
    return trace.digest, run.vector()


def test_one_seed_is_one_trace_and_one_vector_and_another_seed_is_another(plain: SimpleNamespace) -> None:
    first, again, other = traced(plain, 1), traced(plain, 1), traced(plain, 2)
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]
