"""Standbys of a job, as its coordinator knows them: which are present, and which can take their shard's place."""

from __future__ import annotations

from distbelief.coordination.registry import Registry
from distbelief.coordination.shards import Shards
from distbelief.core import roles
from distbelief.core.conversations import mirroring
from distbelief.core.conversations.mirroring import STANDBY, StandbyStanding
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.messages import Address
from distbelief.core.records import Note, StandbyReady, Vacant
from distbelief.core.settings import Plan, Settings
from distbelief.errors import RemoteProtocolError


# A standby may take its shard's place only in standing MIRRORS. Before that it may lack pushes that the shard has
# acknowledged, and the shard's next incarnation loads a checkpoint instead.
class Standbys:
    """Standings of a job's standbys: one for each shard, or none."""

    def __init__(self, settings: Settings, shards: Shards, registry: Registry) -> None:
        self._shards, self._registry = shards, registry
        self._standing: dict[str, StandbyStanding] = dict.fromkeys(
            map(roles.standby, range(settings.shards * settings.standby)), StandbyStanding.AWAY
        )

    def here(self, role: str, place: Address) -> None:
        """Note that a standby is present; refuse one that the job does not have."""
        if role not in self._standing:
            raise RemoteProtocolError(f"{role} is none of this job's {len(self._standing)} standbys")
        self._registry.addresses[role] = place
        self._move(role, StandbyStanding.HERE)

    @property
    def present(self) -> list[str]:
        """Return the standbys that are present."""
        return [role for role, standing in self._standing.items() if standing is not StandbyStanding.AWAY]

    def pair(self, plan: Plan) -> list[Effect]:
        """Tell each present standby to expect its shard's state, once that shard is ready."""
        sends: list[Effect] = []
        for role, standing in [*self._standing.items()]:
            shard = roles.shard_of(role)
            if standing is StandbyStanding.HERE and shard not in self._shards.unready:
                self._move(role, StandbyStanding.TOLD)
                sends.append(Send(role, mirroring.Stand(plan, self._registry.incarnation_at(shard))))
        return sends

    def stands(self, role: str, incarnation: int) -> list[Effect]:
        """Have a shard send its state to its standby, which is ready to receive it."""
        shard = roles.shard_of(role)
        if (
            self._standing.get(role) is not StandbyStanding.TOLD
            or shard in self._shards.unready
            or incarnation != self._registry.incarnation_at(shard)
        ):
            return []
        self._move(role, StandbyStanding.SENT)
        return [Send(shard, mirroring.BeginMirroring(self._registry.addresses[role]))]

    def mirrored(self, shard: str, incarnation: int) -> list[Effect]:
        """Note that an incarnation of a shard's standby holds all that the shard has acknowledged."""
        role = roles.standby_of(shard)
        if self._standing.get(role) is not StandbyStanding.SENT or self._registry.incarnation_at(role) != incarnation:
            return []
        self._move(role, StandbyStanding.MIRRORS)
        return [WriteRecord(StandbyReady(role))]

    def can_succeed(self, shard: str) -> bool:
        """Return whether a shard's standby could take its place now."""
        return self._standing.get(roles.standby_of(shard)) is StandbyStanding.MIRRORS

    def succeed(self, shard: str) -> list[Effect]:
        """Have a shard's standby take its place, and a new standby replace the old one."""
        role, incarnation = roles.standby_of(shard), self._registry.last_gone(shard) + 1
        self._move(role, StandbyStanding.AWAY)
        return [
            self._shards.inherit(shard, incarnation, role),
            Send(role, mirroring.Succeed(incarnation)),
            *self._vacant(role, self._registry.incarnation_at(role)),
        ]

    def alone(self, *shards: str) -> None:
        """Have the standbys of shards that are gone wait for those shards' next incarnations."""
        for role in map(roles.standby_of, shards):
            if self._standing.get(role, StandbyStanding.AWAY) is not StandbyStanding.AWAY:
                self._move(role, StandbyStanding.HERE)

    def lost(self, role: str, incarnation: int, reason: str) -> list[Effect]:
        """Replace a standby that is gone, or that its shard cannot reach."""
        if role not in self._standing:
            return []
        # the standby ended before it had reported, or its end is already known
        if self._standing[role] is StandbyStanding.AWAY:
            return self._vacant(role, incarnation)
        if 0 <= incarnation < self._registry.incarnation_at(role):
            return []
        self._move(role, StandbyStanding.AWAY)
        alone = Send(roles.shard_of(role), mirroring.Unmirrored(self._registry.incarnation_at(role)))
        return [
            WriteRecord(Note(f"{role} is gone ({reason})")),
            alone,
            *self._vacant(role, self._registry.incarnation_at(role)),
        ]

    def unreachable(self, shard: str, incarnation: int) -> list[Effect]:
        """Replace an incarnation of a standby to which its shard has lost its link."""
        return self.lost(roles.standby_of(shard), incarnation, f"{shard} cannot reach it") or [
            Send(shard, mirroring.Unmirrored(incarnation))
        ]

    def _vacant(self, role: str, incarnation: int) -> list[Effect]:
        """Note the end of a standby, and have its next incarnation begin if `--restarts` allows one."""
        if not self._registry.end(role, incarnation, died=True):
            return []
        if role in self._registry.over:
            note = f"{roles.shard_of(role)} has no standby any longer: {role} has had its last life (--restarts)"
            return [WriteRecord(Note(note))]
        return [WriteRecord(Vacant(role, self._registry.last_gone(role) + 1))]

    def _move(self, role: str, standing: StandbyStanding) -> None:
        self._standing[role] = STANDBY.move(self._standing[role], standing)
