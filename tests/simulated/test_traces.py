"""A simulation follows from its seed alone, to the last message and bit."""

from __future__ import annotations

from oracles import classes, mlp
from watching.observed import Observed
from watching.trace import Trace

from distbelief.core.optimizer import optim
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Downpour
from distbelief.transport.cluster_model import NetworkModel

# no logarithms in here, which another C library may round otherwise
UNSTEADY = NetworkModel(jitter=2.0, delay_chance=0.05, delay=1e-3)


def traced(seed: int) -> tuple[str, bytes]:
    strategy = Downpour(replicas=4, shards=3, optimizer=optim("adam", lr=0.01), push_every=2, prefetch=1)
    cluster = Simulated(network=UNSTEADY, compute=ComputeModel(spread="lognormal"), crashes=(Crash("replica 1", 40),))
    run = Observed(Job(task=classes(mlp, samples=60), strategy=strategy, epochs=2, batch_size=4, seed=seed), cluster)
    trace = Trace(run.simulation)
    run.run()
    return trace.digest, run.vector()


def test_one_seed_is_one_trace_and_one_vector_and_another_seed_is_another() -> None:
    first, again, other = traced(1), traced(1), traced(2)
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]
