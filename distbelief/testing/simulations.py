"""Observed simulations: a job's run with checkers attached, random faults, and the endings that these faults allow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from distbelief.core import records, roles
from distbelief.core.conversations import initialising, mirroring
from distbelief.core.messages import Message
from distbelief.core.records import Cause, Outcome, Record
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.transport.cluster_model import NetworkModel, Outage
from distbelief.transport.virtual import VirtualNetwork

Kind = TypeVar("Kind", bound=Record)
MESSAGE_LIMIT = 200_000
"""Default number of messages after which a job counts as endless."""


class Checker(Protocol):
    """Observer of the messages of a network."""

    def sent(self, sender: str, to: str, message: Message) -> None:
        """Handle a message that a living role has sent."""

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """Handle a message that a living role is about to receive."""


def attach(network: VirtualNetwork, *checkers: Checker) -> None:
    """Attach checkers to a network, after any attached earlier."""
    before, watch = network.before_send, network.watch
    known: dict[int, Message] = {}

    def sent(sender: str, to: str, message: Message) -> None:
        before(sender, to, message)
        again = to == roles.COORDINATOR and id(message) in known  # a new coordinator reports it again
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
    """Simulated run with checkers attached.

    It keeps nothing on disk. After `limit` messages the job counts as endless.

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
        self._left -= 1
        assert self._left, f"the job does not end: {sender} sends {message} to {to}, one too many"

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """Do nothing: messages are counted when they are sent."""

    def watch(self, *checkers: Checker) -> None:
        """Attach more checkers."""
        attach(self.simulation.network, *checkers)

    def run(self) -> Observed:
        """Run to the end."""
        self.simulation.run()
        return self

    @property
    def outcome(self) -> str:
        """Return how the job ended."""
        return self.recorded(records.Finished)[0].outcome

    def recorded(self, kind: type[Kind]) -> list[Kind]:
        """Return the records of some kind in order."""
        return [record for record in self.records if isinstance(record, kind)]

    def vector(self) -> bytes:
        """Concatenate the shards' trained ranges and buffers; return nothing for a phantom."""
        return b"".join(bytes(shard.held.moving().numpy()) for shard in self.simulation.shards)  # type: ignore[attr-defined]  # slices of torch's: no phantom is read


def draw_network(chance: random.Random) -> NetworkModel:
    """Draw a network for a sweep: fast or slow, even or not.

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
    """Draw computing times for a sweep; with probability `slow`, the first replica is always slow.

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
    """Draw deaths of the coordinator for a sweep; it is restarted after each.

    >>> draw_revivals(random.Random(7), restarts=3)
    (Crash(role='coordinator', message=7),)
    """
    if not restarts or chance.random() > 0.4:
        return ()
    return tuple(
        Crash(roles.COORDINATOR, chance.randint(1, chance.choice((12, 80)))) for _ in range(chance.randint(1, restarts))
    )


def draw_outages(chance: random.Random, replicas: int, shards: int, dying: Sequence[str]) -> tuple[Outage, ...]:
    """Draw up to three outages for a sweep. They often cut off roles that will die, so that both faults meet.

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


DONE = frozenset({Cause.EPOCHS_DONE, Cause.CONVERGED, Cause.NO_DESCENT})
"""Causes for which a successful job ends."""


class Death(NamedTuple):
    """Death of one life of a role, with the state of the job at that moment."""

    role: str
    incarnation: int
    started: bool
    saved: bool
    """True if there was a checkpoint."""
    ending: bool
    """True if the replicas had been asked to leave."""
    covered: bool | None = False
    """True if the coordinator knew that a standby had the state of this shard; None if it was about to learn it."""
    lasts: bool = False
    """True if the coordinator knew that the state of this shard survives its process."""


def causes(replicas: int, restarts: int, deaths: Sequence[Death], interrupted: bool) -> Collection[Cause]:
    """Return the allowed causes of the end of a job on shards.

    `restarts` is the number for each role, and `deaths` are those of the job's roles. `interrupted` is true if the job
    was interrupted before it was ending.

    >>> shard = Death("shard 0", 0, started=True, saved=True, ending=False)
    >>> causes(2, 1, [shard], interrupted=False) == DONE
    True
    >>> causes(2, 1, [shard._replace(saved=False)], interrupted=False) == DONE | {Cause.SHARD_UNSAVED}
    True
    >>> causes(2, 1, [shard._replace(ending=True, lasts=True)], interrupted=False) == DONE
    True
    >>> causes(2, 1, [shard._replace(incarnation=1)], interrupted=False)
    {<Cause.SHARD_SPENT: 'a shard died in its last life'>}
    """
    shards = [death for death in deaths if roles.kind(death.role) is roles.Kind.SHARD and not death.covered]
    spent = [death for death in shards if death.incarnation >= restarts]
    last = [death for death in deaths if roles.is_replica(death.role) and death.incarnation >= restarts]
    failed = {Cause.SHARD_SPENT} if spent else set()
    lost = [death for death in shards if not death.lasts]
    if any(not death.saved for death in lost):
        failed.add(Cause.SHARD_UNSAVED)
    if any(death.ending for death in lost):
        failed |= {Cause.SHARD_CLOSING, Cause.SHARD_DESERTED}
    if lost and len(last) == replicas:
        failed.add(Cause.SHARD_DESERTED)
    if any(death.started and not death.ending and death.covered is False for death in spent):
        return failed
    if interrupted:
        return failed | {Cause.INTERRUPTED} | ({Cause.REPLICAS_DIED} if len(last) == replicas else set())
    if len(last) < replicas:
        return failed | DONE
    return failed | {Cause.REPLICAS_DIED} | (DONE if any(death.ending for death in last) else set())


class Endings:
    """Checker of a run's end: it notes deaths, and compares the end with those that the deaths allow."""

    def __init__(self, run: Observed) -> None:
        self.deaths: list[Death] = []
        self._run = run
        self._asked_after: int | None = None
        """Number of records at the interruption."""
        self._told: dict[str, tuple[int, int]] = {}
        """Incarnations of each shard and of a standby with the same state, as the shard has reported."""
        self._lasting: set[str] = set()
        """Shards whose state survives their processes, as far as the coordinator has heard."""
        self._heard: dict[str, tuple[int, int]] = {}
        """Entries of `_told` that the coordinator has heard."""
        simulation: Any = run.simulation
        self._kill_one, simulation.kill = simulation.kill, self._kill
        self._stopped, simulation.stopped = simulation.stopped, self._asked
        run.watch(self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        """Note that a shard reports a complete standby."""
        if isinstance(message, mirroring.Mirrored):
            self._told[sender] = self._incarnation_of(sender), message.incarnation

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """Note that the coordinator hears so, or that the state of a shard survives its process."""
        if isinstance(message, mirroring.Mirrored):
            self._heard[sender] = self._told[sender]
        elif isinstance(message, initialising.Restored) and message.lasts:
            self._lasting.add(sender)

    def _asked(self) -> str | None:
        reason: str | None = self._stopped()
        if reason is not None and self._asked_after is None:
            self._asked_after = len(self._run.records)
        return reason

    @property
    def interrupted(self) -> bool:
        """Return whether the job was interrupted before it was ending, or before all went back to a checkpoint."""
        if self._asked_after is None:
            return False
        seen = self._run.records
        ending = max(
            (at for at, record in enumerate(seen[: self._asked_after]) if isinstance(record, records.Ending)),
            default=None,
        )
        return ending is None or any(isinstance(record, records.Rewound) for record in seen[ending:])

    def _incarnation_of(self, role: str) -> int:
        return self._run.simulation.network.endpoints[role].incarnation

    def _dead(self, role: str) -> bool:
        return self._run.simulation.network.endpoints[role].closed

    def _kill(self, role: str) -> None:
        if not self._dead(role):
            self._note(role)
        self._kill_one(role)

    def _note(self, role: str) -> None:
        covered: bool | None = False
        if (
            roles.kind(role) is roles.Kind.SHARD
            and role in self._told
            and not self._dead(standby := roles.standby_of(role))
        ):
            lives = self._incarnation_of(role), self._incarnation_of(standby)
            covered = True if self._heard.get(role) == lives else None if self._told[role] == lives else False
        elif roles.kind(role) is roles.Kind.STANDBY:
            self._bereave(roles.shard_of(role))
        self.deaths.append(self._death(role, self._incarnation_of(role), covered))

    def _bereave(self, shard: str) -> None:
        """Count a standby's death as its shard's death too, if the shard is dead and the standby was to succeed it."""
        if self._dead(shard):
            incarnation = self._incarnation_of(shard)
            self.deaths = [
                death._replace(covered=None) if death[:2] == (shard, incarnation) and death.covered else death
                for death in self.deaths
            ]
            self.deaths.append(self._death(shard, incarnation + 1, covered=False))

    def _death(self, role: str, incarnation: int, covered: bool | None) -> Death:
        started, ending = (bool(self._run.recorded(kind)) for kind in (records.Started, records.Ending))
        saved = any(not record.error for record in self._run.recorded(records.Checkpointed))
        return Death(role, incarnation, started, saved, ending, covered, role in self._lasting)

    def hold(self) -> Cause:
        """Check the end of the run against its faults, and return its cause."""
        [finished] = self._run.recorded(records.Finished)
        settings = self._run.simulation.settings
        allowed = causes(settings.replicas, settings.restarts, self.deaths, self.interrupted)
        assert finished.cause in allowed, (
            f"it ended because {finished.cause}; allowed: {sorted(allowed)}; died: {self.deaths}, interrupted: "
            f"{self.interrupted}"
        )
        assert finished.outcome is finished.cause.outcome
        return finished.cause


def ways(run: Observed, cause: Cause) -> Counter[str]:
    """Name the ways in which a job has ended. A sweep counts them, which shows ways that no seed takes."""
    counts = Counter([cause.name])
    if cause.outcome is Outcome.DONE:
        count = Counter(type(record) for record in run.records)
        died = {roles.kind(role) for role in run.simulation.killed}
        again = any(roles.kind(record.role) is roles.Kind.SHARD for record in run.recorded(records.Vacant))
        counts["done, and nobody died"] = not died
        counts["done after a replica died"] = roles.Kind.REPLICA in died
        counts["done after the coordinator died"] = roles.Kind.COORDINATOR in died
        counts["done after a shard came again"] = again and not count[records.Rewound]
        counts["done after all went back"] = count[records.Rewound] > 0
        counts["done after a standby succeeded"] = count[records.Succeeded] > 0
        counts["done with pushes forgotten"] = count[records.Forgotten] > 0
    return +counts
