"""The muster of the shards: which are there, where they listen, and which hold what they are to hold."""

from __future__ import annotations

from typing import Literal

from distbelief.core import roles
from distbelief.core.effects import Record
from distbelief.core.messages import Place
from distbelief.core.records import Vacant
from distbelief.errors import RemoteProtocolError

Standing = Literal["away", "here", "told", "ready"]
"""Not there; there; told its range; holding it."""


class Muster:
    """The shards of one job.

    Args:
        shards: how many.

    >>> muster = Muster(1)
    >>> muster.here("shard 0", Place("unix:@a", 0)), muster.tell(), muster.holds("shard 0"), muster.ready
    (True, ['shard 0'], True, True)
    >>> muster.gone("shard 0", 0), muster.missing, muster.grant("shard 0", 1), muster.gone("shard 0", 0)
    (True, ['shard 0'], Record(record=Vacant(role='shard 0', incarnation=1)), False)
    """

    def __init__(self, shards: int) -> None:
        self.roles = [roles.shard(i) for i in range(shards)]
        self._standing: dict[str, Standing] = dict.fromkeys(self.roles, "away")
        self._places: dict[str, Place] = {}
        self._lives = dict.fromkeys(self.roles, 0)  # the life of each that is to be

    def here(self, role: str, place: Place) -> bool:
        """A shard is there, in some life; whether that is the one that is to be.

        Raises:
            RemoteProtocolError: there is to be no such shard.
        """
        self._check(role)
        if place.incarnation < self._lives[role]:
            return False
        self._standing[role], self._places[role] = "here", place
        return True

    def gone(self, role: str, incarnation: int) -> bool:
        """A life of a shard is over; whether it was the one that is to be. What it says from now on is not its to say any more."""
        if incarnation < self._lives[role]:
            return False
        self._standing[role] = "away"
        return True

    def grant(self, role: str, incarnation: int) -> Record:
        """Have a shard begin a life, in the place of any before."""
        self._standing[role], self._lives[role] = "away", incarnation
        return Record(Vacant(role, incarnation))

    def fall(self) -> list[Record]:
        """Have all shards begin one life together."""
        life = max(self._lives.values()) + 1
        return [self.grant(role, life) for role in self.roles]

    def _check(self, role: str) -> None:
        if role not in self._standing:
            raise RemoteProtocolError(f"{role} is none of this job's {len(self.roles)} shards")

    def tell(self) -> list[str]:
        """Those who are there and are to be told their ranges, now."""
        told = [role for role in self.roles if self._standing[role] == "here"]
        self._standing |= dict.fromkeys(told, "told")
        return told

    def holds(self, role: str) -> bool:
        """A shard says that it holds its range; whether it had been told to.

        Raises:
            RemoteProtocolError: there is to be no such shard.
        """
        self._check(role)
        if self._standing[role] != "told":
            return False
        self._standing[role] = "ready"
        return True

    @property
    def missing(self) -> list[str]:
        """Those who are not there."""
        return [role for role in self.roles if self._standing[role] == "away"]

    @property
    def unready(self) -> list[str]:
        """Those who do not hold what they are to hold yet."""
        return [role for role in self.roles if self._standing[role] != "ready"]

    @property
    def ready(self) -> bool:
        """Whether all hold what they are to hold."""
        return not self.unready

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each of them is, in their order; all must be there."""
        return tuple(self._places[role] for role in self.roles)
