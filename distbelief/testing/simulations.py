"""Simulations under observation: one run of a job with checkers beside it, and faults that are drawn for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from distbelief.core import records, roles
from distbelief.core.messages import Message
from distbelief.core.records import Record
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.transport.cluster_model import NetworkModel, Outage
from distbelief.transport.virtual import VirtualNetwork

MESSAGE_LIMIT = 200_000
"""Messages after which a job counts as one that does not end, unless another limit is given."""


class Checker(Protocol):
    """Observer beside a network."""

    def sent(self, sender: str, to: str, message: Message) -> None:
        """A living role has sent a message."""

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """A message is about to be handled by a living role."""


def attach(network: VirtualNetwork, *checkers: Checker) -> None:
    """Stand at a network's hooks, after those who stand there already."""
    before, watch = network.before_send, network.watch
    known: dict[int, Message] = {}

    def sent(sender: str, to: str, message: Message) -> None:
        before(sender, to, message)
        again = to == roles.COORDINATOR and id(message) in known  # since one before has died
        if network.says(sender, message) and not again:
            if to == roles.COORDINATOR:
                known[id(message)] = message
            for checker in checkers:
                checker.sent(sender, to, message)

    def delivered(sender: str, to: str, message: Message) -> None:
        watch(sender, to, message)
        for checker in checkers:
            checker.delivered(sender, to, message)

    network.before_send, network.watch = sent, delivered


class Observed:
    """Simulated run with checkers beside it.

    Args:
        job: what is run; nothing is kept on disk.
        cluster: where.
        limit: messages after which the job counts as one that does not end.

    >>> from distbelief.strategies import Downpour
    >>> run = Observed(Job(task="digits", strategy=Downpour(replicas=2)), Simulated(phantom=True)).run()
    >>> print(run.outcome)
    done
    """

    def __init__(self, job: Job, cluster: Simulated | None = None, limit: int = MESSAGE_LIMIT) -> None:
        cluster = cluster or Simulated()
        self.records: list[Record] = []
        self.simulation = Simulation(
            job,
            cluster.settings(job),
            cluster,
            lambda _moment, _role, record: self.records.append(record),
            validates=True,
        )
        self._left = limit
        self.watch(self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        """Count a message."""
        self._left -= 1
        assert self._left, f"the job does not end: {sender} sends {message} to {to}, one too many"

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """Do nothing: what is sent was counted."""

    def watch(self, *checkers: Checker) -> None:
        """Let more checkers stand beside it."""
        attach(self.simulation.network, *checkers)

    def run(self) -> Observed:
        """Run to the end."""
        self.simulation.run()
        return self

    @property
    def outcome(self) -> str:
        """Return how the job ended."""
        return next(record.outcome for record in self.records if isinstance(record, records.Finished))

    def vector(self) -> bytes:
        """The moving range of the server's vector, put together from the shards; empty where it is a phantom's."""
        return b"".join(bytes(shard.held.moving().numpy()) for shard in self.simulation.shards)  # type: ignore[attr-defined]  # slices of torch's: no phantom is read


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
    outages = []
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        side = set(chance.sample(everybody, chance.randint(1, len(everybody) - 1)))
        if dying and chance.random() < 0.5:
            side = {chance.choice(dying), *chance.sample(everybody, chance.randint(0, 1))}
        start = chance.choice((0.0, 0.01, 0.1, 1.0)) * chance.expovariate(1.0)
        outages.append(
            Outage(start, start + chance.choice((1e-3, 0.02, 0.2, 5.0)) * (0.1 + chance.random()), tuple(sorted(side)))
        )
    return tuple(outages)
