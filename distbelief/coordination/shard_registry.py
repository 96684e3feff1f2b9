"""The shard registry of a job: which shards are there, where they listen, and which hold what they are to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


# A life of a shard is granted before it is there (`_lives`). So what an older life says or suffers, which may be heard
# of late, is told from the doings of the life that is to be.
class ShardRegistry:
    """The shards of one job.

    Args:
        shards: how many.

    >>> shards = ShardRegistry(1)
    >>> shards.here("shard 0", Address("unix:@a", 0)), shards.missing, shards.unready, shards.ready
    (True, [], ['shard 0'], False)
    >>> shards.gone("shard 0", 0), shards.missing, shards.grant("shard 0", 1), shards.gone("shard 0", 0)
    (True, ['shard 0'], WriteRecord(record=Vacant(role='shard 0', incarnation=1)), False)
    """

    def __init__(self, shards: int) -> None:
        self.roles = [roles.shard(i) for i in range(shards)]
        self._standing: dict[str, ShardStanding] = dict.fromkeys(self.roles, ShardStanding.AWAY)
        self._places: dict[str, Address] = {}
        self._lives = dict.fromkeys(self.roles, 0)  # the life of each that is to be
        self._succeeded: dict[str, int] = {}  # lives that are those of a standby
        self._doubted: set[tuple[str, int]] = set()
        self._lasting: set[str] = set()
        self._departing: dict[str, int] = {}

    @property
    def counts_gone(self) -> bool:
        """True while a round to come may hold the gradient of a replica that is gone."""
        return bool(self._departing)

    def departed(self, who: str, incarnation: int) -> None:
        """Note that the shard that rules has heard of the end of a replica's life."""
        if self._departing.get(roles.lead_of(who), incarnation) <= incarnation:
            self._departing.pop(roles.lead_of(who), None)

    def here(self, role: str, place: Address) -> bool:
        """A shard is there, in some life; whether that is the one that is to be.

        Raises:
            RemoteProtocolError: there is to be no such shard.
        """
        self._check(role)
        if place.incarnation < self._lives[role]:
            return False
        self._places[role] = place
        self._move(role, ShardStanding.HERE)
        return True

    def gone(self, role: str, incarnation: int) -> bool:
        """Note that a life of a shard is over, with no say any more; return whether it was the one that is to be."""
        self._doubted = {life for life in self._doubted if life[0] != role}
        if incarnation < self._lives[role]:
            return False
        self._move(role, ShardStanding.AWAY)
        return True

    def doubt(self, lost: Iterable[tuple[str, int]]) -> list[Effect]:
        """Note that these lives of shards were lost by somebody: whether they died will be heard in a moment."""
        # A replica may lose its link to a shard before the coordinator hears of the shard's death. If it were welcomed
        # again at once, it would be sent to the address of the dead. So for a moment nobody is welcomed.
        doubted = {
            (role, incarnation)
            for role, incarnation in lost
            if role in self._places and self._places[role].incarnation == incarnation
        } - self._doubted
        self._doubted |= {life for life in doubted if self._standing[life[0]] is ShardStanding.READY}
        return [Wake(DOUBT_SECONDS, DoubtOver(*life)) for life in sorted(doubted & self._doubted)]

    def woke(self, timer: AnyTimer) -> None:
        """It has been waited for long enough: the shard lives, and it was the link that broke."""
        self._doubted = {life for life in self._doubted if DoubtOver(*life) != timer}

    def grant(self, role: str, incarnation: int) -> WriteRecord:
        """Have a shard begin a life, in the place of any before."""
        self._lives[role] = incarnation
        self._move(role, ShardStanding.AWAY)
        return WriteRecord(Vacant(role, incarnation))

    def inherit(self, role: str, incarnation: int, standby: str) -> WriteRecord:
        """Have a shard's standby be its next life."""
        self._lives[role], self._succeeded[role] = incarnation, incarnation
        self._move(role, ShardStanding.AWAY)
        return WriteRecord(Succeeded(role, incarnation, standby))

    def fall(self) -> list[WriteRecord]:
        """Have all shards begin one life together."""
        incarnation = max(self._lives.values()) + 1
        return [self.grant(role, incarnation) for role in self.roles]

    def _move(self, role: str, standing: ShardStanding) -> None:
        self._standing[role] = SHARD.move(self._standing[role], standing)

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
            place = self._places.get(role)
            succeeded = place is not None and self._succeeded.get(role) == place.incarnation
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

    def tell_gone(self, plan: Plan, lives: Mapping[str, int]) -> list[Effect]:
        """Have no shard wait for replicas that may have gone before it had heard of them."""
        if not plan.settings.policy.attended:
            return []
        # in rounds the others wait for whom the ruling names, and hear of deaths themselves: but not a standby that has
        # succeeded, to which the dead had no link yet
        rounds = plan.settings.policy.rounds
        shards = [roles.shard(plan.ruler)] if rounds and not plan.settings.standby else self.roles
        self._departing |= {role: lives[role] for role in lives if rounds and roles.is_replica(role)}
        return [
            Send(shard, Departed(_linked(role, plan, shard), lives[role]))
            for role in sorted(lives)
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
        return all(self.lasts(role) or self._succeeded.get(role) == self._lives[role] for role in self.unready)

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
        return self._places.get(self.roles[index], Address("", 0))

    @property
    def sure(self) -> bool:
        """True where all shards hold their ranges, and nobody has reason to doubt that they are there."""
        return self.ready and not self._doubted

    @property
    def places(self) -> tuple[Address, ...]:
        """Addresses of the shards, in their order; all must be there."""
        return tuple(self._places[role] for role in self.roles)


def _linked(replica: str, plan: Plan, shard: str) -> str:
    """Return the partition of a replica that has a link to a shard: the one that holds that part of the vector."""
    return roles.at_partition(replica, plan.layout.partition_of(plan.assignments[roles.index_of(shard)].moving))
