"""Membership of a job: which replicas take part, which wait to be welcomed, and which must begin again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from distbelief.coordination.registry import Registry
from distbelief.core import roles
from distbelief.core.effects import Effect


# A replica is in `_new` from its join to its welcome, then in `members` until it leaves or dies. Members in `_astray`
# wait to be welcomed again. Members in `_behind` have not begun again since all went back to a checkpoint: they still
# report discarded work.
class Membership:
    """Replicas and evaluator of a job, as its coordinator knows them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.members: set[str] = set()
        """Replicas that were welcomed, and have not left or died."""
        self.served: set[str] = set()
        """Members that were sent the shards' parameters since all last went back to a checkpoint."""
        self.done: set[str] = set()
        """Members that are finished, and stay for the last steps."""
        self._new: deque[str] = deque()
        self._astray: set[str] = set()  # have lost a shard, and send it nothing until they learn its new address
        self._generation = 0
        self._behind: set[str] = set()
        """Members that must begin again, and have not reported it."""

    def wait(self, role: str) -> None:
        """Note that a role has joined, and waits for its welcome."""
        self._new.append(role)

    def stray(self, role: str) -> None:
        """Note that a member waits to be welcomed again."""
        self._astray.add(role)

    def go_back(self) -> None:
        """Have all members begin again, and ignore their messages until they have."""
        self._generation += 1
        self._behind |= self.members
        self.served.clear()

    def begun(self, role: str, generation: int) -> list[Effect]:
        """Note that a member has begun again, in some generation."""
        if generation == self._generation:
            self._behind.discard(role)
        return []

    def known(self) -> tuple[tuple[str, int], ...]:
        """Return the members, each with its incarnation."""
        return tuple((role, self._registry.present(role)) for role in sorted(self.members))

    def generation(self, role: str) -> int:
        """Return the generation that a role must begin; 0 if it continues or has never taken part."""
        return self._generation if role in self._behind else 0

    def heeds(self, role: str) -> bool:
        """Return whether a member is of the present generation, so that its messages count."""
        return role not in self._behind

    def initialiser(self) -> str | None:
        """Choose the replica that sends the first parameters: one asked earlier, else the first that waits."""
        if self._astray:
            self._astray.remove(astray := min(self._astray))
            return astray
        first = next((role for role in self._new if roles.is_replica(role) and not self.members), None)
        if first:
            self._new.remove(first)
        return first

    def callers(self) -> list[str]:
        """Return all roles that wait for a welcome, and clear the list."""
        waiting = [*sorted(self._astray), *self._new]
        self._astray.clear()
        self._new.clear()
        return waiting

    def admit(self, role: str) -> bool:
        """Make a replica a member; return whether it is new."""
        new = role not in self.members
        self.members.add(role)
        self.served.add(role)
        return new

    def part(self, role: str, incarnation: int, died: bool) -> bool:
        """Note that a role is gone; return whether that was unknown. The caller discards it from `members`."""
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
        """Assert that each replica has one standing, and none once it is gone."""
        replicas = {role for role in self._new if roles.is_replica(role)}
        assert not replicas & self.members, f"{replicas & self.members} wait to join, and take part"
        for some in (self.served, self.done, self._behind):
            assert some <= self.members, f"{some - self.members} are no members"
        for role in self.members:
            assert self._registry.present(role) > self._registry.last_gone(role), f"{role} is a member, and is gone"

    def deserted(self, expected: Collection[str]) -> bool:
        """Return whether no replica takes part or waits, and all expected ones are gone for good."""
        return not self.members and not any(map(roles.is_replica, self._new)) and {*expected} <= self._registry.over

    @property
    def busy(self) -> set[str]:
        """Members that are not done."""
        return self.members - self.done

    @property
    def everybody(self) -> list[str]:
        """Return members and roles that wait to join."""
        return [*sorted(self.members), *self._new]
