"""The inline carrier and the simulated cluster are one algorithm, message for message and bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oracles import classes, mlp
from watching.observed import Observed

from distbelief.core import roles, wire
from distbelief.core.conversations.membership import Here
from distbelief.core.effects import Arrival, Batch, Computed
from distbelief.core.messages import Message
from distbelief.core.optimizer import Optimizer
from distbelief.core.portions import ANEW
from distbelief.core.settings import Settings
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import INSTANT
from distbelief.places.simulated.simulated import Simulated
from distbelief.replica.downpour import DownpourTraining
from distbelief.replica.served_replica import ServedReplica
from distbelief.runtime.driver import Driver
from distbelief.runtime.player import Worker
from distbelief.server.shard import Shard
from distbelief.server.slice import TorchSlice
from distbelief.strategies import Downpour
from distbelief.strategies.parameter_server.players import coordinator
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import Trainer, build_model
from distbelief.testing.simulations import attach
from distbelief.transport.cluster_model import NetworkModel
from distbelief.transport.inline import Inline

Sequence = list[tuple[str, str, bytes]]


class Stage:
    """A job over the inline carrier: the oldest message or computation is always the next."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self.network, self.seen = Inline(), Sequence()
        self.driver = Driver(self, lambda *_: None)
        self.network.endpoint("computations").deliver = lambda arrival: arrival.event()  # type: ignore[operator]
        self.shards = [Shard(i, TorchSlice) for i in range(settings.shards)]

        self.driver.add_machine(
            roles.COORDINATOR, coordinator(settings, False, ANEW), self.network.endpoint(roles.COORDINATOR), _Nowhere()
        )
        for i, shard in enumerate(self.shards):
            endpoint = self.network.endpoint(roles.shard(i))
            self.driver.add_machine(roles.shard(i), shard, endpoint, _Nowhere())
            endpoint.send(roles.COORDINATOR, Here())
        for i in range(settings.replicas):
            model = build_model(task, settings.seed, "cpu")
            flat = FlatModule(model)
            trainer = Trainer(task, model, settings, settings.clip_norm)
            story = ServedReplica(DownpourTraining, roles.replica(i), flat, len(trainer.data)).story()
            self.driver.add_story(
                roles.replica(i), story, self.network.endpoint(roles.replica(i)), _worker(self, flat, trainer)
            )
        for role, endpoint in self.network.endpoints.items():
            if role != "computations":
                endpoint.deliver = self._watched(role, endpoint.deliver)

    def _watched(self, role: str, deliver: Callable[[Arrival], None]) -> Callable[[Arrival], None]:
        def watched(arrival: Arrival) -> None:
            if isinstance(arrival.event, Message):
                self.seen.append((arrival.sender, role, wire.encode(arrival.event)))
            deliver(arrival)

        return watched

    def call_later(self, *_: Any) -> None:
        """No time passes here."""

    def now(self) -> float:
        return 0.0

    def glance(self) -> None:
        """What has arrived by now is delivered already."""

    def turn(self) -> None:
        assert self.network.step(), "every role waits for another"


def _worker(stage: Stage, flat: FlatModule, trainer: Trainer) -> Worker:
    def compute(batch: Batch, answer: Callable[[Computed], None]) -> None:
        computed = trainer.compute(batch)
        computation = Arrival("", lambda: answer(Computed(computed.loss, computed.samples, 0.0)))  # type: ignore[arg-type]
        stage.network.queue.append(("computations", computation))

    return Worker(lambda _, arena: flat.bind(arena.gradients, arena.parameters), compute)


class _Nowhere:
    def save_part(self, *_: Any) -> None: ...

    def commit(self, *_: Any) -> None: ...

    def load_part(self, *_: Any) -> Any:
        raise AssertionError("nothing to load")


class Sequenced:
    """What a simulation delivers, without the times."""

    def __init__(self) -> None:
        self.seen = Sequence()

    def sent(self, sender: str, to: str, message: Message) -> None: ...

    def delivered(self, sender: str, to: str, message: Message) -> None:
        self.seen.append((sender, to, wire.encode(message)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": 1},
        {"push_every": 3, "fetch_every": 2, "local_lr": 0.01},
        {"warm_start_steps": 4, "prefetch": 1, "push_every": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (3, 2), (4, 4)])
def test_simulated_is_inline_where_no_time_passes(options: dict[str, Any], replicas: int, shards: int) -> None:
    task = classes(mlp, samples=40)
    strategy = Downpour(replicas=replicas, shards=shards, optimizer=Optimizer("adam", 0.01), **options)
    job = Job(task=task, strategy=strategy, batch_size=4, epochs=2, evaluate_every=0, clip_norm=0.5)
    nothing_takes_time = Simulated(
        network=NetworkModel(latency=0.0, bandwidth=float("inf")), compute=ComputeModel(step=0.0), handling=INSTANT
    )
    run, sequenced = Observed(job, nothing_takes_time), Sequenced()
    attach(run.simulation.network, sequenced)
    run.run()
    stage = Stage(task, job.settings())
    ends = dict(stage.network.endpoints)
    stage.driver.run()
    assert stage.seen == sequenced.seen
    assert b"".join(bytes(shard.held.moving().numpy()) for shard in stage.shards) == run.vector()
    for role, end in run.simulation.network.endpoints.items():
        assert (end.traffic.sent, end.traffic.received) == (ends[role].traffic.sent, ends[role].traffic.received), role
        assert end.traffic.sent["push" if roles.is_replica(role) else "control"] > 0
