"""Simulations under observation: one run of a job with checkers beside it, and the trace of its messages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import torch

from distbelief.core import records, roles, wire
from distbelief.core.messages import Message
from distbelief.core.records import Record
from distbelief.core.settings import Holder
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.testing.checkers import Checker, Rules, attach
from distbelief.transport.virtual import NetworkModel, Outage


class Observed:
    """One simulated run, with `Rules` beside it where nobody waits for anybody; `Accounting` knows the other
    consistencies
    too.

    Args:
        job: what is run; nothing is kept on disk.
        cluster: where.
        limit: of messages.

    >>> from distbelief.strategies import Downpour
    >>> run = Observed(Job(task="digits", strategy=Downpour(replicas=2)), Simulated(phantom=True)).run()
    >>> print(run.outcome, run.rules.counted)
    done 1437
    """

    def __init__(self, job: Job, cluster: Simulated | None = None, limit: int = 200_000) -> None:
        cluster = cluster or Simulated()
        self.records: list[Record] = []
        self.simulation = Simulation(
            job, cluster.settings(job), cluster, lambda _moment, _role, record: self.records.append(record)
        )
        self.rules = Rules(self._alive, limit)
        # where a shard goes back, `Accounting` knows what that undoes, and with a standby what is said later than it is
        # done
        settings, fallen = (
            self.simulation.settings,
            any(roles.kind(crash.role) is roles.Kind.SHARD for crash in cluster.crashes),
        )
        self._ruled = not (
            settings.strategy.attendance
            or settings.strategy.one_moment
            or settings.standby
            or settings.partitions > 1
            or settings.strategy.held_by is not Holder.SHARDS
            or fallen
        )
        if self._ruled:
            self.watch(self.rules)

    def _alive(self, role: str, incarnation: int) -> bool:
        endpoint = self.simulation.network.endpoints[role]
        return endpoint.incarnation == incarnation and not endpoint.closed

    def watch(self, *checkers: Checker) -> None:
        """Let more checkers stand beside it."""
        attach(self.simulation.network, *checkers)

    def run(self) -> Observed:
        """Run to the end, and hold the rules of the end."""
        self.simulation.run()
        if self._ruled:
            self.rules.finish(self.outcome, self.simulation.killed)
        return self

    @property
    def outcome(self) -> str:
        """How the job ended."""
        return next(record.outcome for record in self.records if isinstance(record, records.Finished))

    def vector(self) -> bytes:
        """The moving range of the server's vector, put together from the shards; empty where it is a phantom's."""
        return b"".join(bytes(shard.held.moving().numpy()) for shard in self.simulation.shards)  # type: ignore[attr-defined]  # slices of torch's: no phantom is read


def mapping_of(simulation: Simulation) -> torch.Tensor:
    """The parameters and buffers that replicas share, as they are: 1-D uint8."""
    assert simulation.memory is not None
    assert simulation.coordinator.plan is not None
    return simulation.memory[: simulation.coordinator.plan.layout.total]


class Trace:
    """What was delivered in a simulation, in order: moment (to a nanosecond), sender, receiver and the message's
    frame.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._clock = simulation.clock
        self._hash = blake2b(digest_size=16)
        self.marks = ""
        """Two hexadecimal digits for each message: where two traces part, their marks do."""
        attach(simulation.network, self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        """What is only sent stands in no trace."""

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """Take a message into the trace."""
        line = msgspec.msgpack.encode((f"{self._clock.now():.9f}", sender, to)) + wire.encode(message)
        self._hash.update(line)
        self.marks += blake2b(line, digest_size=1).hexdigest()

    @property
    def digest(self) -> str:
        """One number for all of it."""
        return self._hash.hexdigest()


def draw_network(chance: random.Random) -> NetworkModel:
    """A network for a sweep: fast or slow, even or not.

    >>> draw_network(random.Random(2)).latency
    0.0
    """
    return NetworkModel(
        latency=chance.choice((0.0, 50e-6, 5e-3)),
        bandwidth=chance.choice((1e5, 1e9)),
        jitter=chance.choice((0.0, 1.0, 20.0)),
        delay_chance=chance.choice((0.0, 0.1)),
        delay=chance.choice((1e-3, 0.1, 3.0)),
    )


def draw_compute(chance: random.Random, slow: float) -> ComputeModel:
    """Computing times for a sweep; with chance `slow`, the first replica is always slow.

    >>> draw_compute(random.Random(2), slow=1.0).slow
    {0: 20.0}
    """
    return ComputeModel(
        spread=chance.choice(("constant", "lognormal", "exponential")),
        slow={0: 20.0} if chance.random() < slow else {},
        straggle_chance=chance.choice((0.0, 0.1)),
        straggle_factor=50.0,
    )


def draw_revivals(chance: random.Random, restarts: int) -> tuple[Crash, ...]:
    """Deaths of the coordinator for a sweep, after each of which it comes again.

    >>> draw_revivals(random.Random(7), restarts=3)
    (Crash(role='coordinator', message=7),)
    """
    if not restarts or chance.random() > 0.4:
        return ()
    return tuple(
        Crash(roles.COORDINATOR, chance.randint(1, chance.choice((12, 80)))) for _ in range(chance.randint(1, restarts))
    )


def draw_outages(chance: random.Random, replicas: int, shards: int, dying: Sequence[str]) -> tuple[Outage, ...]:
    """Up to three outages for a sweep; often those who are to die are on one side, so that a death and a cut meet.

    >>> draw_outages(random.Random(6), 3, 2, ["replica 2"])[0].side
    ('replica 2',)
    """
    everybody = [roles.COORDINATOR, *map(roles.replica, range(replicas)), *map(roles.shard, range(shards))]
    found = []
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        side = set(chance.sample(everybody, chance.randint(1, len(everybody) - 1)))
        if dying and chance.random() < 0.5:
            side = {chance.choice(dying), *chance.sample(everybody, chance.randint(0, 1))}
        start = chance.choice((0.0, 0.01, 0.1, 1.0)) * chance.expovariate(1.0)
        found.append(
            Outage(start, start + chance.choice((1e-3, 0.02, 0.2, 5.0)) * (0.1 + chance.random()), tuple(sorted(side)))
        )
    return tuple(found)
