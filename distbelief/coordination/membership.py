"""The membership of a job: who takes part, who waits to be welcomed, and who is to begin anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from distbelief.coordination.registry import Registry
from distbelief.core import roles
from distbelief.core.effects import Effect


# A replica is in `_new` from its join to its welcome, then in `members` until it leaves or dies. Of the members, those
# in `_astray` wait to be welcomed again. Those in `_behind` have not begun anew since all went back to a checkpoint:
# what they say is of work that is forgotten.
class Membership:
    """The replicas and the evaluator, as the coordinator knows them.

    Args:
        registry: of the job's roles.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.members: set[str] = set()
        """The replicas that were welcomed, and have not left or died."""
        self.served: set[str] = set()
        """Those of them that hold what the shards do, since all went back."""
        self.done: set[str] = set()
        """Those of them that have nothing more to do, and stay for what is asked of them at the end."""
        self._new: deque[str] = deque()
        self._astray: set[str] = set()  # they have lost a shard, and say nothing until they are told where it is
        self._generation = 0
        self._behind: set[str] = set()
        """Members that are to begin anew, and have not said that they have."""

    def wait(self, role: str) -> None:
        """One has joined, and waits to be welcomed."""
        self._new.append(role)

    def stray(self, role: str) -> None:
        """One who was welcomed waits to be welcomed again."""
        self._astray.add(role)

    def go_back(self) -> None:
        """All members are to begin anew: what they say until they have is of the past."""
        self._generation += 1
        self._behind |= self.members
        self.served.clear()

    def begun(self, role: str, generation: int) -> list[Effect]:
        """A member has begun anew, in some generation of the job."""
        if generation == self._generation:
            self._behind.discard(role)
        return []

    def known(self) -> tuple[tuple[str, int], ...]:
        """Return the members, each with its incarnation."""
        return tuple((role, self._registry.present(role)) for role in sorted(self.members))

    def generation(self, role: str) -> int:
        """The generation that a role is to begin; 0 for one that goes on, or has never taken part."""
        return self._generation if role in self._behind else 0

    def heeds(self, role: str) -> bool:
        """Return whether a member's messages are of this generation."""
        return role not in self._behind

    def initialiser(self) -> str | None:
        """Choose the replica that sends the first parameters: one that had begun to, else the first that waits."""
        if self._astray:
            self._astray.remove(astray := min(self._astray))
            return astray
        first = next((role for role in self._new if roles.is_replica(role) and not self.members), None)
        if first:
            self._new.remove(first)
        return first

    def callers(self) -> list[str]:
        """All who wait; they are to be welcomed now."""
        waiting = [*sorted(self._astray), *self._new]
        self._astray.clear()
        self._new.clear()
        return waiting

    def admit(self, role: str) -> bool:
        """A replica is welcomed; whether it was no member before."""
        new = role not in self.members
        self.members.add(role)
        self.served.add(role)
        return new

    def part(self, role: str, incarnation: int, died: bool) -> bool:
        """A role is gone; whether that is news. Members are the caller's to discard."""
        if not self._registry.end(role, incarnation, died):
            return False
        if role in self._new:
            self._new.remove(role)
        self._astray.discard(role)
        self._behind.discard(role)
        self.served.discard(role)
        self.done.discard(role)
        return True

    def validate(self) -> None:
        """Assert that each is in one standing, and in none once its last life is over."""
        replicas = {role for role in self._new if roles.is_replica(role)}
        assert not replicas & self.members, f"{replicas & self.members} wait to join, and take part"
        for some in (self.served, self.done, self._behind):
            assert some <= self.members, f"{some - self.members} are no members"
        for role in self.members:
            assert self._registry.present(role) > self._registry.last_gone(role), f"{role} is a member, and is gone"

    def deserted(self, expected: Collection[str]) -> bool:
        """Return whether nobody takes part, and none of the job's own replicas will come (again)."""
        return not self.members and not any(map(roles.is_replica, self._new)) and {*expected} <= self._registry.over

    @property
    def busy(self) -> set[str]:
        """Members that are not done."""
        return self.members - self.done

    @property
    def everybody(self) -> list[str]:
        """Members, and those who wait to be."""
        return [*sorted(self.members), *self._new]
