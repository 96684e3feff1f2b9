"""Endings that a job's faults allow, decided from outside, by what has died when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from distbelief.core import records, roles
from distbelief.core.conversations import initialising, mirroring
from distbelief.core.messages import Message
from distbelief.core.outcomes import Cause, Outcome
from distbelief.testing.simulations import Observed

DONE = frozenset({Cause.EPOCHS_DONE, Cause.CONVERGED, Cause.NO_DESCENT})
"""The causes for which a job ends that nothing has kept from what it was to do."""


class Death(NamedTuple):
    """The death of one life of a role, and how the job stood then."""

    role: str
    incarnation: int
    started: bool
    saved: bool
    """True where there was a checkpoint."""
    ending: bool
    """True where the replicas had been asked to leave."""
    covered: bool | None = False
    """True where the coordinator knew that a standby held all of this shard; None where that was on its way."""
    lasts: bool = False
    """True where the coordinator knew that what this shard holds outlives its process."""


def causes(replicas: int, restarts: int, deaths: Sequence[Death], interrupted: bool) -> Collection[Cause]:
    """The causes for which a job on shards may end.

    Args:
        replicas: of the job.
        restarts: times that each role is started anew.
        deaths: of its roles.
        interrupted: whether it was asked to end before it was ending.

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
    """Stands beside a run, notes who dies when, and holds its end against what that allows."""

    def __init__(self, run: Observed) -> None:
        self.deaths: list[Death] = []
        self._run = run
        self._asked_after: int | None = None
        """Number of records when somebody asked the job to end."""
        self._told: dict[str, tuple[int, int]] = {}
        """Lives of each shard, and of its standby, that hold the same, as it has told the coordinator."""
        self._lasting: set[str] = set()
        """Shards of which the coordinator has heard that what they hold outlives their processes."""
        self._heard: dict[str, tuple[int, int]] = {}
        """The part of that which the coordinator has heard."""
        simulation: Any = run.simulation
        self._kill_one, simulation.kill = simulation.kill, self._kill
        self._stopped, simulation.stopped = simulation.stopped, self._asked
        run.watch(self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        """A shard says that its standby holds everything."""
        if isinstance(message, mirroring.Mirrored):
            self._told[sender] = self._incarnation_of(sender), message.incarnation

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """The coordinator hears that it does, or that nothing is lost with a shard's process."""
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
        """Return whether the job was asked to end before it was ending, or while it was and all went back since."""
        if self._asked_after is None:
            return False
        seen = self._run.records
        ending = max(
            (at for at, record in enumerate(seen[: self._asked_after]) if isinstance(record, records.Ending)),
            default=None,
        )
        return ending is None or any(isinstance(record, records.Rewound) for record in seen[ending:])

    def _has(self, kind: type[records.Record]) -> bool:
        return any(isinstance(record, kind) for record in self._run.records)

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
        """A shard's standby dies: with it the shard, where that is dead and the standby was to be it."""
        if self._dead(shard):
            incarnation = self._incarnation_of(shard)
            self.deaths = [
                death._replace(covered=None) if death[:2] == (shard, incarnation) and death.covered else death
                for death in self.deaths
            ]
            self.deaths.append(self._death(shard, incarnation + 1, covered=False))

    def _death(self, role: str, incarnation: int, covered: bool | None) -> Death:
        saved = any(isinstance(record, records.Checkpointed) and not record.error for record in self._run.records)
        lasts = role in self._lasting
        return Death(role, incarnation, self._has(records.Started), saved, self._has(records.Ending), covered, lasts)

    def hold(self) -> Cause:
        """Hold the end of the run against what its faults allow; returns why it has ended."""
        [finished] = [record for record in self._run.records if isinstance(record, records.Finished)]
        settings = self._run.simulation.settings
        allowed = causes(settings.replicas, settings.restarts, self.deaths, self.interrupted)
        assert finished.cause in allowed, (
            f"it ended since {finished.cause}; allowed: {sorted(allowed)}; died: {self.deaths}, interrupted: "
            f"{self.interrupted}"
        )
        assert finished.outcome is finished.cause.outcome
        return finished.cause


def ways(run: Observed, cause: Cause) -> Counter[str]:
    """Name how a job has come to its end: a sweep counts these, so that a way that none goes any more is seen."""
    counts = Counter([cause.name])
    if cause.outcome is Outcome.DONE:
        count = Counter(type(record) for record in run.records)
        died = {roles.kind(role) for role in run.simulation.killed}
        again = [
            record
            for record in run.records
            if isinstance(record, records.Vacant) and roles.kind(record.role) is roles.Kind.SHARD
        ]
        counts["done, and nobody died"] = not died
        counts["done after a replica died"] = roles.Kind.REPLICA in died
        counts["done after the coordinator died"] = roles.Kind.COORDINATOR in died
        counts["done after a shard came again"] = bool(again) and not count[records.Rewound]
        counts["done after all went back"] = count[records.Rewound] > 0
        counts["done after a standby succeeded"] = count[records.Succeeded] > 0
        counts["done with pushes forgotten"] = count[records.Forgotten] > 0
    return +counts
