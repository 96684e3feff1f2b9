"""Placement of a job's roles on hosts with slots, and of roles whose host is gone. It has no side effects.

A replica takes one slot for each of its partitions, which are kept together; other roles take no slots. Shards are
spread over the hosts that see the run folder, and over their switches. A standby is on another host than its shard, and
at another switch if there is one. The coordinator and the evaluator are where the supervisor is.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec

from distbelief.core import roles
from distbelief.core.roles import Mesh
from distbelief.errors import UsageError
from distbelief.network.graph import spread

HOME = -1
"""Number for the supervisor's machine, which is not one of the hosts."""


class HostSlots(msgspec.Struct, frozen=True):
    """A host to place roles on."""

    name: str
    slots: int
    keeps: bool = True
    """True if it sees the run folder, where shards write their parts of checkpoints."""
    switch: int = 0
    """Number of its switch; 0 for all hosts without a topology."""


class Placement:
    """Host of every role, by its number among `sites`.

    Args:
        servers: the shards and standbys.
        alone: the roles that are where the supervisor is.
        oversubscribe: whether a host may hold more than its slots, if all are full.

    Raises:
        UsageError: there are fewer slots than processes that compute, or no host for shards.

    >>> sites = [HostSlots("a", 2), HostSlots("b", 2)]
    >>> placement = Placement(sites, Mesh(4), ["shard 0", "shard 1", "standby 0", "standby 1"], ["coordinator"])
    >>> for at in (0, 1): print(placement.on(at))
    ['replica 0', 'replica 1', 'shard 0', 'standby 1']
    ['replica 2', 'replica 3', 'shard 1', 'standby 0']
    >>> placement.can_replace(1), placement.lose(1), placement.again("shard 1"), placement.again("replica 2")
    (True, None, 0, None)
    >>> placement.can_replace(0)
    False
    """

    def __init__(
        self,
        sites: Sequence[HostSlots],
        mesh: Mesh,
        servers: Sequence[str],
        alone: Iterable[str],
        oversubscribe: bool = False,
    ) -> None:
        self.sites, self._oversubscribe = tuple(sites), oversubscribe
        self._partitions = mesh.partitions
        self._loads: list[int] = []
        self._lost: set[int] = set()
        self.where: dict[str, int] = dict.fromkeys(alone, HOME)
        self._check(mesh)
        self._place_replicas(mesh)
        self._servers: Counter[int] = Counter()
        keepers = [at for at, site in enumerate(self.sites) if site.keeps]
        self._keepers = [keepers[place] for place in spread([self.sites[at].switch for at in keepers])]
        if servers and not self._keepers:
            raise UsageError(
                "no host sees the run folder, where shards write their parts of checkpoints: name one with --out that "
                "at least one host shares"
            )
        for number, role in enumerate(server for server in servers if roles.kind(server) is roles.Kind.SHARD):
            self._put(role, self._keepers[number % len(self._keepers)])
        for role in servers:
            if role not in self.where:
                self._put(role, self._beside(role))

    def _check(self, mesh: Mesh) -> None:
        slots = sum(site.slots for site in self.sites)
        if mesh.size > slots and not self._oversubscribe:
            each = f" of {mesh.partitions} partitions" if mesh.partitions > 1 else ""
            raise UsageError(
                f"--replicas {mesh.replicas}{each}: {mesh.size} processes compute, and the hosts have {slots} slots "
                f"({', '.join(f'{site.name}:{site.slots}' for site in self.sites[:8])}"
                f"{', ...' if len(self.sites) > 8 else ''}); have fewer, name more hosts or slots, or --oversubscribe"
            )

    def _place_replicas(self, mesh: Mesh) -> None:
        """Place replicas evenly on all hosts; those on one host have consecutive numbers, in the order of the hosts."""
        counts = [0] * len(self.sites)
        self._loads = loads = [0] * len(self.sites)
        heap = [(self._fullness(at, mesh.partitions), at) for at in range(len(self.sites))]
        heapq.heapify(heap)
        whole = 0
        while whole < mesh.replicas and heap:
            fullness, at = heapq.heappop(heap)
            if fullness <= 1:
                counts[at], loads[at], whole = counts[at] + 1, loads[at] + mesh.partitions, whole + 1
                heapq.heappush(heap, (self._fullness(at, mesh.partitions), at))
        cells = iter(roles.replicas(mesh))
        for at, count in enumerate(counts):
            for _ in range(count * mesh.partitions):
                self.where[next(cells)] = at
        for cell in cells:  # partitions of replicas that no host has room for: they fill the free slots
            free = next((at for at, site in enumerate(self.sites) if loads[at] < site.slots), None)
            chosen = min(range(len(self.sites)), key=self._fullness) if free is None else free
            self.where[cell], loads[chosen] = chosen, loads[chosen] + 1

    def _fullness(self, at: int, more: int = 1) -> float:
        """Return the fraction of a host's slots in use, once so many more are taken."""
        return (self._loads[at] + more) / max(self.sites[at].slots, 1e-9)

    def _put(self, role: str, at: int) -> None:
        self.where[role] = at
        self._servers[at] += 1

    def _beside(self, standby: str) -> int:
        """Return the host for a standby: another than its shard's, and at another switch, if there is one."""
        shard = self.where.get(roles.shard_of(standby), HOME)
        number = self._keepers.index(shard) if shard in self._keepers else 0
        turned = [*self._keepers[number + 1 :], *self._keepers[: number + 1]]
        return min(self._alive(turned), key=lambda at: (at == shard, self._is_near(at, shard), self._servers[at]))

    def _is_near(self, at: int, other: int) -> bool:
        """Return whether two hosts have the same switch."""
        return other != HOME and self.sites[at].switch == self.sites[other].switch

    # queries

    def on(self, at: int) -> list[str]:
        """Return the roles of a host."""
        return [role for role, site in self.where.items() if site == at]

    @property
    def beside(self) -> list[str]:
        """Shards whose standby is on the same host, since there is no other: the host's end takes both."""
        standbys = [role for role in self.where if roles.kind(role) is roles.Kind.STANDBY]
        return [shard for role in standbys if self.where.get(shard := roles.shard_of(role)) == self.where[role]]

    def lines(self) -> list[str]:
        """Return the roles of each host as lines for the user, with warnings."""
        rows = [f"here: {', '.join(self.on(HOME))}"]
        for at, site in enumerate(self.sites):
            slots = f"{site.slots} slot{'' if site.slots == 1 else 's'}"
            rows.append(f"host {site.name}, {slots}: {', '.join(self.on(at)) or 'nobody'}")
        why = "and its standby are on one host, since no other sees the run folder: both die with it"
        return [*rows, *(f"{shard} {why}" for shard in self.beside)]

    # changes

    def lose(self, at: int) -> None:
        """Note that a host is gone, with all roles there."""
        self._lost.add(at)

    def can_replace(self, at: int) -> bool:
        """Return whether the shards of a host could start again on another."""
        return any(site != at for site in self._alive(self._keepers))

    def rename(self, role: str, to: str) -> None:
        """Note that the process of a role plays another role now."""
        self.where[to] = self.where.pop(role)

    def again(self, role: str) -> int | None:
        """Return the host for a role's next life: the same, or one with free slots if that is gone; None if none is."""
        at = self.where.get(role)
        if at is not None and at not in self._lost:
            return at
        if roles.is_replica(role):
            chosen = self._room(role)
        elif roles.kind(role) is roles.Kind.STANDBY:
            chosen = self._beside(role) if self._alive(self._keepers) else None
        else:
            keepers = self._alive(self._keepers)
            twin = self.where.get(roles.standby_of(role), HOME)
            chosen = min(
                keepers, key=lambda at: (at == twin, self._is_near(at, twin), self._servers[at], at), default=None
            )
        if chosen is None:
            return None
        if roles.is_replica(role):
            self.where[role] = chosen
            self._loads[chosen] += 1
        else:
            self._put(role, chosen)
        return chosen

    def _alive(self, hosts: Collection[int]) -> list[int]:
        return [at for at in hosts if at not in self._lost]

    def _room(self, role: str) -> int | None:
        """Return a host for a replica, the one of its other partitions if they are placed again already."""
        together = [self.where[sibling] for sibling in roles.partitions_of(role, self._partitions) if sibling != role]
        alive = self._alive(range(len(self.sites)))
        free = [at for at in alive if self._loads[at] < self.sites[at].slots]
        if not free and self._oversubscribe:
            free = alive
        was = self.where.get(role, HOME)
        return min(
            free,
            key=lambda at: (at not in together, not self._is_near(at, was), self._fullness(at), at),
            default=None,
        )
