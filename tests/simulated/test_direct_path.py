"""The direct path on the virtual cluster: the same machines, and a replica's own time for what it updates."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from oracles import classes, mlp
from watching.observed import Observed, Watcher

from distbelief.core import roles
from distbelief.core.conversations import pushing
from distbelief.core.messages import Message
from distbelief.core.optimizer import optim
from distbelief.core.records import Cause, Checkpointed, Note
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import Handling
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Allreduce, Bounded, Downpour, Softsync, Strategy, Synchronous
from distbelief.testing.accounting import Accounting
from distbelief.testing.simulations import Endings
from distbelief.transport.cluster_model import Hosts

STEADY = ComputeModel(step=1e-3, spread="constant")
STRATEGIES = {
    "downpour": Downpour(3, 2), "sums": Downpour(2, 3, push_every=2, fetch_every=3),
    "bounded": Bounded(3, 2, staleness=0), "ahead": Downpour(2, 1, prefetch=1), "softsync": Softsync(2, 2, n=2),
}  # fmt: skip


def observe(strategy: Strategy, path: str = "direct", **place: Any) -> Observed:
    cluster = Simulated(**{"compute": STEADY, "hosts": Hosts(cores=2), "path": path, **place})
    return Observed(Job(classes(mlp, samples=43), strategy, batch_size=4, epochs=2), cluster)


class Pushes(Watcher):
    """When each push was applied at each shard, and how many messages each role has sent."""

    def __init__(self, run: Observed) -> None:
        self.run, self.moments, self.said = run, dict[str, list[float]](), Counter[str]()
        run.watch(self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        self.said[sender] += 1

    def delivered(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, pushing.Push):
            self.moments.setdefault(to, []).append(self.run.simulation.clock.time)


class HoldsItsOwnPushes(Watcher):
    """Each gradient is computed from parameters that hold all that its replica has pushed before."""

    def __init__(self, run: Observed) -> None:
        self.acknowledged: dict[tuple[str, str, int, int], int] = {}
        run.watch(self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, pushing.Pushed):
            self.acknowledged.setdefault((to, sender, message.incarnation, message.clock), message.version.updates)
        elif isinstance(message, pushing.Push) and message.clock > 1:
            before = self.acknowledged.get((sender, to, message.incarnation, message.clock - 1))
            assert before is not None, f"push {message.clock - 1} of {sender} is not made, and it pushes the next"
            assert before <= message.version.updates, f"push {message.clock} of {sender} is from before its last"


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_one_replica_ends_with_the_bits_of_the_served_path_and_sooner(name: str) -> None:
    ends = {}
    for path in ("direct", "served"):
        run = observe(Downpour(1, 2, optimizer=optim(name, lr=0.05)), path)
        run.run()
        ends[path] = run.simulation.clock.now(), [one.held.arrays()["vector.moving"] for one in run.simulation.shards]
    (sooner, direct), (later, served) = ends["direct"], ends["served"]
    assert all(map(torch.equal, direct, served))
    assert sooner < later


def test_a_shard_is_updated_by_one_replica_at_a_time_in_the_replicas_own_time() -> None:
    """Memory so slow that an update takes longer than a step: then the lock says how fast all are together."""
    run = observe(Downpour(3, 1, optimizer=optim("sgd")), handling=Handling(message=0.0, memory=1e5), hosts=Hosts(4))
    pushes = Pushes(run)
    run.run()
    size = run.simulation.shards[0].held.moving().nbytes
    update, [moments] = 2 * size / 1e5, pushes.moments.values()
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert update > 1e-3
    assert min(gaps) == pytest.approx(update)
    assert sum(gap == pytest.approx(update) for gap in gaps) > len(gaps) / 2, "who waits begins as the lock is free"
    assert run.simulation.network.endpoints["shard 0"].thread.worked <= update, "it copies initial values, once"
    assert run.simulation.network.endpoints["replica 0"].thread.worked > 5 * update


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_replica_that_dies_at_any_message_keeps_no_lock_and_loses_nothing(name: str) -> None:
    calm = observe(STRATEGIES[name])
    said = Pushes(calm)
    calm.run()
    assert calm.outcome == "done"
    for message in some(range(1, said.said["replica 1"] + 1), SEEDS // 2):
        run = observe(STRATEGIES[name], crashes=(Crash("replica 1", message),), restart_seconds=1e-3)
        accounting = Accounting(run)
        run.run()
        accounting.finish(run.outcome, ["replica 1"])
        assert run.outcome == "done", f"message {message}"
        assert not any(memory.turns for memory in run.simulation.network.memories.values()), f"message {message}"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_shard_whose_process_dies_at_any_message_has_lost_nothing_as_the_job_ends(name: str) -> None:
    """It comes again soon, or after the replicas have left."""
    calm = observe(STRATEGIES[name])
    said = Pushes(calm)
    calm.run()
    last, notes = said.said["shard 0"], Counter[bool]()
    messages = [*range(1, last - 12, 3), *range(last - 12, last + 1)]
    for message, restart_seconds in some(product(messages, (1e-3, 1.0))):
        crashes = (Crash("shard 0", message),)
        run = observe(STRATEGIES[name], crashes=crashes, restart_seconds=restart_seconds)
        accounting, endings = Accounting(run), Endings(run)
        run.run()
        assert endings.hold() is Cause.EPOCHS_DONE, f"message {message}"
        accounting.finish(run.outcome, ["shard 0"])
        assert [record.error for record in run.told(Checkpointed)][-1] == ""
        assert accounting.checkpoints
        told = [record.text for record in run.told(Note)]
        notes[any("nothing that was applied is lost" in text for text in told)] += 1
    assert notes[True] > (3 if SEEDS >= 50 else 1) * notes[False], (
        "only before its first parameters has it nothing to go on from"
    )


@pytest.mark.parametrize("seed", [19, *range(100, 100 + SEEDS)])
@pytest.mark.long
def test_what_was_asked_of_a_shard_that_died_answers_nothing_that_is_asked_later(seed: int) -> None:
    """Slow memory: the questions to a shard that dies wait for its lock, and are answered after its next life began.
    With seed 19 a replica was told twice, and made its next step before its last push was applied.
    """
    chance = random.Random(seed)
    spread = chance.choice(("constant", "lognormal", "exponential"))
    memory, restart_seconds = chance.choice((1e5, 1e6, 1e9)), chance.choice((1e-3, 1e-2))
    place = {
        "compute": ComputeModel(step=1e-3, spread=spread), "handling": Handling(message=6e-6, memory=memory),
        "restart_seconds": restart_seconds,
    }  # fmt: skip
    strategy = Downpour(3, 2, optimizer=optim("sgd"))
    calm = observe(strategy, **place)
    said = Pushes(calm)
    calm.run()
    for message in [36, chance.randint(1, said.said["shard 0"])]:
        run = observe(strategy, crashes=(Crash("shard 0", message),), **place)
        accounting = Accounting(run)
        HoldsItsOwnPushes(run)
        run.run()
        accounting.finish(run.outcome, ["shard 0"])
        assert run.outcome == "done"


def test_a_holder_that_dies_in_the_middle_of_an_update_has_made_none() -> None:
    run = observe(Downpour(2, 1, optimizer=optim("sgd")), handling=Handling(message=0.0, memory=1e5))
    network, killed = run.simulation.network, []

    def strike(_: None) -> None:
        shard = network.memories[roles.shard(0)]
        if not killed and len({turn[0].role for turn in shard.turns}) == 2:  # one has the lock, the other waits for it
            killed.append(shard.turns[0][0].role)
            run.simulation.kill(killed[0])
            assert shard.turns[0][0].role != killed[0]
        elif not killed:
            run.simulation.clock.call_later(1e-4, strike, None)

    run.simulation.clock.call_later(1e-4, strike, None)
    accounting = Accounting(run)
    run.run()
    accounting.finish(run.outcome, killed)
    assert (len(killed), run.outcome) == (1, "done")


@pytest.mark.parametrize(
    ("strategy", "place", "why"),
    [
        (Downpour(), {"hosts": None}, "machines of their own; put all on one with --hosts cores=N"),
        (Downpour(), {"hosts": Hosts(cores=2, replicas=1)}, "only the roles of one host share memory"),
        (Downpour(standby=1), {}, "--standby 1"),
        (Synchronous(), {}, "strategy synchronous has the shards' processes"),
        (Allreduce(), {}, "strategy allreduce has no shards"),
        (Downpour(), {"path": "direkt"}, "did you mean 'direct'"),
    ],
)
def test_the_direct_path_is_refused_with_what_stands_against_it(
    strategy: Strategy, place: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        observe(strategy, **place)
