"""The muster of the shards: which are there, where they listen, and which hold what they are to hold."""

from __future__ import annotations

from typing import Literal

from distbelief.core import roles
from distbelief.core.messages import Place
from distbelief.errors import RemoteProtocolError

Standing = Literal["away", "here", "told", "ready"]
"""Not there; there; told its range; holding it."""


class Muster:
    """The shards of one job.

    Args:
        shards: how many.

    >>> muster = Muster(1)
    >>> muster.here("shard 0", Place("unix:@a", 0)); muster.tell(), muster.holds("shard 0"), muster.ready
    (['shard 0'], True, True)
    >>> muster.gone("shard 0"); muster.missing
    ['shard 0']
    """

    def __init__(self, shards: int) -> None:
        self.roles = [roles.shard(i) for i in range(shards)]
        self._standing: dict[str, Standing] = dict.fromkeys(self.roles, "away")
        self._places: dict[str, Place] = {}

    def here(self, role: str, place: Place) -> None:
        """A shard is there, or its next life is.

        Raises:
            RemoteProtocolError: there is to be no such shard.
        """
        self._check(role)
        self._standing[role], self._places[role] = "here", place

    def gone(self, role: str) -> None:
        """A shard is gone: what it says from now on is not its to say any more, until it comes again."""
        self._standing[role] = "away"

    def fall(self, incarnation: int) -> bool:
        """All shards up to this incarnation go together; some may have come again already. Whether any was not known to be gone."""
        falling = [role for role in self.roles if role not in self._places or self._places[role].incarnation <= incarnation]
        news = any(self._standing[role] != "away" for role in falling)
        self._standing |= dict.fromkeys(falling, "away")
        return news

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
