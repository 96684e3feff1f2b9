"""Shards of a job, as its coordinator knows them: which are present, and which hold their ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distbelief.coordination.registry import Registry
from distbelief.core import roles
from distbelief.core.conversations.agreement import Ruler
from distbelief.core.conversations.attendance import Departed
from distbelief.core.conversations.initialising import SHARD, Restore, ShardStanding
from distbelief.core.effects import Effect, Send, Wake, WriteRecord
from distbelief.core.events import AnyTimer, DoubtOver
from distbelief.core.messages import Address
from distbelief.core.records import Succeeded, Vacant
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError

DOUBT_SECONDS = 1.0
"""Limit for the news of a shard's death to come, after a replica has lost its link to the shard."""


# An incarnation of a shard is granted before it is present. So late news of an older one is not mistaken for news of
# the granted one.
class Shards:
    """Standings of a job's shards.

    >>> shards = Shards(1, Registry(restarts=3))
    >>> shards.here("shard 0", Address("unix:@a", 0)), shards.missing, shards.unready, shards.ready
    (True, [], ['shard 0'], False)
    >>> shards.gone("shard 0", 0), shards.missing, shards.grant("shard 0", 1), shards.gone("shard 0", 0)
    (True, ['shard 0'], WriteRecord(record=Vacant(role='shard 0', incarnation=1)), False)
    """

    def __init__(self, shards: int, registry: Registry) -> None:
        self._registry = registry
        self.roles = [roles.shard(i) for i in range(shards)]
        self._standing: dict[str, ShardStanding] = dict.fromkeys(self.roles, ShardStanding.AWAY)
        self._succeeded: dict[str, int] = {}
        """Incarnation of each shard that its standby took over."""
        self._doubted: set[tuple[str, int]] = set()
        self._lasting: set[str] = set()
        self._departing: dict[str, int] = {}

    @property
    def counts_gone(self) -> bool:
        """Return whether a coming round may still hold the gradient of a replica that is gone."""
        return bool(self._departing)

    def departed(self, who: str, incarnation: int) -> None:
        """Note that the ruling shard has heard of a replica's end."""
        if self._departing.get(roles.lead_of(who), incarnation) <= incarnation:
            self._departing.pop(roles.lead_of(who), None)

    def here(self, role: str, place: Address) -> bool:
        """Note that an incarnation of a shard is present; return whether it is the granted one."""
        self._check(role)
        if place.incarnation < self._registry.granted(role):
            return False
        self._registry.addresses[role] = place
        self._move(role, ShardStanding.HERE)
        return True

    def gone(self, role: str, incarnation: int) -> bool:
        """Note that an incarnation of a shard is over; return whether it was the granted one."""
        self._doubted = {doubted for doubted in self._doubted if doubted[0] != role}
        if incarnation < self._registry.granted(role):
            return False
        self._move(role, ShardStanding.AWAY)
        return True

    def doubt(self, lost: Iterable[tuple[str, int]]) -> list[Effect]:
        """Doubt incarnations of shards to which a replica has lost its link.

        They are doubted until news of their death would have come.
        """
        # A replica may lose its link to a shard before the coordinator hears of the shard's death. If welcomed at once,
        # it would be sent to the dead shard's address. So for a moment no replica is welcomed.
        doubted = {
            (role, incarnation)
            for role, incarnation in lost
            if role in self._standing and self._registry.incarnation_at(role) == incarnation
        } - self._doubted
        ready = {(role, number) for role, number in doubted if self._standing[role] is ShardStanding.READY}
        self._doubted |= ready
        return [Wake(DOUBT_SECONDS, DoubtOver(role, number)) for role, number in sorted(ready)]

    def woke(self, timer: AnyTimer) -> None:
        """Stop doubting a shard: no news of its death has come, so only the link broke."""
        self._doubted = {doubted for doubted in self._doubted if DoubtOver(*doubted) != timer}

    def grant(self, role: str, incarnation: int) -> WriteRecord:
        """Have an incarnation of a shard begin, in place of any earlier one."""
        self._registry.grant(role, incarnation)
        self._move(role, ShardStanding.AWAY)
        return WriteRecord(Vacant(role, incarnation))

    def inherit(self, role: str, incarnation: int, standby: str) -> WriteRecord:
        """Make a shard's standby its next incarnation."""
        self._registry.grant(role, incarnation)
        self._succeeded[role] = incarnation
        self._move(role, ShardStanding.AWAY)
        return WriteRecord(Succeeded(role, incarnation, standby))

    def fall(self) -> list[WriteRecord]:
        """Have all shards begin a new incarnation together."""
        incarnation = max(map(self._registry.granted, self.roles)) + 1
        return [self.grant(role, incarnation) for role in self.roles]

    def _move(self, role: str, standing: ShardStanding) -> None:
        self._standing[role] = SHARD.move(self._standing[role], standing)

    def validate(self) -> None:
        """Assert that no former incarnation is present, and that only ready shards are doubted."""
        for role, standing in self._standing.items():
            there = standing is not ShardStanding.AWAY
            present, granted = self._registry.incarnation_at(role), self._registry.granted(role)
            assert not there or present >= granted, f"{role} is present as {present}, and granted as {granted}"
        for role, _ in self._doubted:
            assert self._standing[role] is ShardStanding.READY, f"{role} is doubted, and is {self._standing[role]}"

    def _check(self, role: str) -> None:
        if role not in self._standing:
            raise RemoteProtocolError(f"{role} is none of this job's {len(self.roles)} shards")

    def restore(
        self, plan: Plan, checkpoint: str, members: tuple[tuple[str, int], ...], together: bool
    ) -> list[Effect]:
        """Tell the present shards their ranges, and the checkpoint to load.

        With `together`, all shards load it at once, and replicas begin again. Else `members` are the replicas that
        continue unchanged at a shard that replaces another.
        """
        sends: list[Send] = []
        # If all begin together, none is told before all are present, so that all load the same checkpoint. A standby
        # that took over holds its shard's state: it loads nothing and waits for no other shard.
        ruler = self.place(plan.ruler) if together else Address("", 0)
        for role in self.roles:
            succeeded = self._succeeded.get(role) == self._registry.incarnation_at(role)
            if self._standing[role] is not ShardStanding.HERE or (together and self.missing and not succeeded):
                continue
            self._move(role, ShardStanding.TOLD)
            linked = [(_linked(who, plan, role), incarnation) for who, incarnation in members]
            source, continuing = "" if succeeded else checkpoint, () if together and not succeeded else tuple(linked)
            sends.append(Send(role, Restore(plan, source, continuing, ruler)))
        new = {send.to for send in sends}
        if plan.settings.policy.rounds and roles.shard(plan.ruler) in new:
            sends += [
                Send(role, Ruler(ruler))
                for role in self.roles
                if self._standing[role] in (ShardStanding.TOLD, ShardStanding.READY) and role not in new
            ]
        return [*sends]

    def tell_gone(self, plan: Plan, gone: Mapping[str, int]) -> list[Effect]:
        """Tell shards which incarnations of replicas are gone, so that no shard waits for them."""
        if not plan.settings.policy.attended:
            return []
        # In rounds only the ruling shard needs this: the others wait for the replicas that its ruling names, and notice
        # deaths by their links. A standby that took over had no link to the dead replica, so with standbys all shards
        # are told.
        rounds = plan.settings.policy.rounds
        shards = [roles.shard(plan.ruler)] if rounds and not plan.settings.standby else self.roles
        self._departing |= {role: gone[role] for role in gone if rounds and roles.is_replica(role)}
        return [
            Send(shard, Departed(_linked(role, plan, shard), gone[role]))
            for role in sorted(gone)
            if roles.is_replica(role)
            for shard in shards
        ]

    def holds(self, role: str, lasts: bool = False) -> bool:
        """Note that a shard holds its range, in memory that `lasts` or not; return whether it was asked to."""
        self._check(role)
        if self._standing[role] is not ShardStanding.TOLD:
            return False
        self._move(role, ShardStanding.READY)
        if lasts:
            self._lasting.add(role)
        return True

    @property
    def missing(self) -> list[str]:
        """Return the shards that are not present."""
        return [role for role in self.roles if self._standing[role] is ShardStanding.AWAY]

    @property
    def unready(self) -> list[str]:
        """Return the shards that do not hold their ranges yet."""
        return [role for role in self.roles if self._standing[role] is not ShardStanding.READY]

    def lasts(self, role: str) -> bool:
        """Return whether a shard's parameters outlive its process."""
        return role in self._lasting

    @property
    def kept(self) -> bool:
        """Return whether each unready shard can recover all applied pushes, from its standby or from lasting memory."""
        return all(
            self.lasts(role) or self._succeeded.get(role) == self._registry.granted(role) for role in self.unready
        )

    def waits(self) -> list[str]:
        """Return a phrase for each shard that the job waits for."""
        return [
            f"{role} is {'away' if self._standing[role] is ShardStanding.AWAY else 'loading'}" for role in self.unready
        ]

    @property
    def ready(self) -> bool:
        """Return whether all shards hold their ranges."""
        return not self.unready

    def place(self, index: int) -> Address:
        """Return the present or last address of a shard; an empty one if it never had one."""
        return self._registry.addresses.get(self.roles[index], Address("", 0))

    @property
    def sure(self) -> bool:
        """Return whether all shards hold their ranges, and none is doubted."""
        return self.ready and not self._doubted

    @property
    def places(self) -> tuple[Address, ...]:
        """Return the shards' addresses in order; all must be present."""
        return tuple(self._registry.addresses[role] for role in self.roles)


def _linked(replica: str, plan: Plan, shard: str) -> str:
    """Return a replica's partition with a link to a shard: the one that holds that part of the vector."""
    return roles.at_partition(replica, plan.layout.partition_of(plan.assignments[roles.index_of(shard)].moving))
