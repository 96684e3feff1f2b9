"""The shards of a job, as the coordinator knows them: which are there, and which hold what they are to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distbelief.coordination.registry import Registry
from distbelief.core import roles
from distbelief.core.conversations.agreement import Ruler
from distbelief.core.conversations.attendance import Departed
from distbelief.core.conversations.initialising import SHARD, Restore, ShardStanding
from distbelief.core.effects import Effect, Send, Wake, WriteRecord
from distbelief.core.messages import Address
from distbelief.core.records import Succeeded, Vacant
from distbelief.core.settings import Plan
from distbelief.core.timers import AnyTimer, DoubtOver
from distbelief.errors import RemoteProtocolError

DOUBT_SECONDS = 1.0
"""Limit for the news of a shard's death, after somebody has lost its link to it."""


# An incarnation of a shard is granted before it is there. So what an older one says or suffers, which may be heard of
# late, is told from the doings of the one that is to be.
class Shards:
    """The shards of one job.

    Args:
        shards: how many.
        registry: of the job's roles.

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
        """Incarnation of each shard that was its standby."""
        self._doubted: set[tuple[str, int]] = set()
        self._lasting: set[str] = set()
        self._departing: dict[str, int] = {}

    @property
    def counts_gone(self) -> bool:
        """True while a round to come may hold the gradient of a replica that is gone."""
        return bool(self._departing)

    def departed(self, who: str, incarnation: int) -> None:
        """Note that the shard that rules has heard of a replica's end."""
        if self._departing.get(roles.lead_of(who), incarnation) <= incarnation:
            self._departing.pop(roles.lead_of(who), None)

    def here(self, role: str, place: Address) -> bool:
        """A shard is there, in some incarnation; whether that is the one that is to be.

        Raises:
            RemoteProtocolError: there is to be no such shard.
        """
        self._check(role)
        if place.incarnation < self._registry.granted(role):
            return False
        self._registry.addresses[role] = place
        self._move(role, ShardStanding.HERE)
        return True

    def gone(self, role: str, incarnation: int) -> bool:
        """Note that an incarnation of a shard is over; return whether it was the one that is to be."""
        self._doubted = {doubted for doubted in self._doubted if doubted[0] != role}
        if incarnation < self._registry.granted(role):
            return False
        self._move(role, ShardStanding.AWAY)
        return True

    def doubt(self, lost: Iterable[tuple[str, int]]) -> list[Effect]:
        """Note that these incarnations of shards were lost by somebody: whether they died will be heard in a moment."""
        # A replica may lose its link to a shard before the coordinator hears of the shard's death. If it were welcomed
        # again at once, it would be sent to the address of the dead. So for a moment nobody is welcomed.
        doubted = {
            (role, incarnation)
            for role, incarnation in lost
            if role in self._standing and self._registry.incarnation_at(role) == incarnation
        } - self._doubted
        self._doubted |= {one for one in doubted if self._standing[one[0]] is ShardStanding.READY}
        return [Wake(DOUBT_SECONDS, DoubtOver(*one)) for one in sorted(doubted & self._doubted)]

    def woke(self, timer: AnyTimer) -> None:
        """It has been waited for long enough: the shard lives, and it was the link that broke."""
        self._doubted = {doubted for doubted in self._doubted if DoubtOver(*doubted) != timer}

    def grant(self, role: str, incarnation: int) -> WriteRecord:
        """Have an incarnation of a shard begin, in the place of any before."""
        self._registry.grant(role, incarnation)
        self._move(role, ShardStanding.AWAY)
        return WriteRecord(Vacant(role, incarnation))

    def inherit(self, role: str, incarnation: int, standby: str) -> WriteRecord:
        """Have a shard's standby be its next incarnation."""
        self._registry.grant(role, incarnation)
        self._succeeded[role] = incarnation
        self._move(role, ShardStanding.AWAY)
        return WriteRecord(Succeeded(role, incarnation, standby))

    def fall(self) -> list[WriteRecord]:
        """Have all shards begin one incarnation together."""
        incarnation = max(map(self._registry.granted, self.roles)) + 1
        return [self.grant(role, incarnation) for role in self.roles]

    def _move(self, role: str, standing: ShardStanding) -> None:
        self._standing[role] = SHARD.move(self._standing[role], standing)

    def validate(self) -> None:
        """Assert that no former incarnation is there, and that only who holds its range is doubted."""
        for role, standing in self._standing.items():
            there = standing is not ShardStanding.AWAY
            present, granted = self._registry.incarnation_at(role), self._registry.granted(role)
            assert not there or present >= granted, f"{role} is there as {present}, and is to be {granted}"
        for role, _ in self._doubted:
            assert self._standing[role] is ShardStanding.READY, f"{role} is doubted, and is {self._standing[role]}"

    def _check(self, role: str) -> None:
        if role not in self._standing:
            raise RemoteProtocolError(f"{role} is none of this job's {len(self.roles)} shards")

    def restore(
        self, plan: Plan, checkpoint: str, members: tuple[tuple[str, int], ...], together: bool
    ) -> list[Effect]:
        """Tell those who are there their ranges, and what they go on from.

        Args:
            plan: of the job.
            checkpoint: that those load who have nothing.
            members: replicas that go on as they were at a shard that takes the place of another.
            together: whether all load it at once, and replicas begin anew: but standbys that have succeeded hold what
                the shards before them held.
        """
        sends: list[Send] = []
        # Where they begin together none is told before all are there, so that all go on from the same checkpoint. A
        # standby that has succeeded holds what its shard held: it loads nothing, and waits for none.
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
        """Have no shard wait for replicas, each with its last incarnation, that it may not have heard of."""
        if not plan.settings.policy.attended:
            return []
        # in rounds the others wait for whom the ruling names, and hear of deaths themselves: but not a standby that has
        # succeeded, to which the dead had no link yet
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
        """A shard says that it holds its range, in memory that `lasts`; whether it had been told to.

        Raises:
            RemoteProtocolError: there is to be no such shard.
        """
        self._check(role)
        if self._standing[role] is not ShardStanding.TOLD:
            return False
        self._move(role, ShardStanding.READY)
        if lasts:
            self._lasting.add(role)
        return True

    @property
    def missing(self) -> list[str]:
        """Those who are not there."""
        return [role for role in self.roles if self._standing[role] is ShardStanding.AWAY]

    @property
    def unready(self) -> list[str]:
        """Those who do not hold what they are to hold yet."""
        return [role for role in self.roles if self._standing[role] is not ShardStanding.READY]

    def lasts(self, role: str) -> bool:
        """Return whether a shard's parameters outlive its process."""
        return role in self._lasting

    @property
    def kept(self) -> bool:
        """True where all applied is kept for shards that lack it: by standbys, or memory outliving processes."""
        return all(
            self.lasts(role) or self._succeeded.get(role) == self._registry.granted(role) for role in self.unready
        )

    def waits(self) -> list[str]:
        """For whom the job waits, in words."""
        return [
            f"{role} is {'away' if self._standing[role] is ShardStanding.AWAY else 'loading'}" for role in self.unready
        ]

    @property
    def ready(self) -> bool:
        """True where all shards hold their ranges."""
        return not self.unready

    def place(self, index: int) -> Address:
        """Return the present or last address of a shard; an empty one where it never was there."""
        return self._registry.addresses.get(self.roles[index], Address("", 0))

    @property
    def sure(self) -> bool:
        """True where all shards hold their ranges, and nobody has reason to doubt that they are there."""
        return self.ready and not self._doubted

    @property
    def places(self) -> tuple[Address, ...]:
        """Addresses of the shards, in their order; all must be there."""
        return tuple(self._registry.addresses[role] for role in self.roles)


def _linked(replica: str, plan: Plan, shard: str) -> str:
    """Return the partition of a replica that has a link to a shard: the one that holds that part of the vector."""
    return roles.at_partition(replica, plan.layout.partition_of(plan.assignments[roles.index_of(shard)].moving))
