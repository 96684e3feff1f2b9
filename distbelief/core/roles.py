"""Roles of a job, and the mesh of its replicas; only this file makes and parses the names of roles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

import msgspec

from distbelief.errors import RemoteProtocolError, UsageError

_FORM = re.compile(r"([a-z]+)(?: (0|[1-9][0-9]{0,17}))?(?:\.(0|[1-9][0-9]{0,17}))?", re.ASCII)
_KNOWN = 1 << 16
"""Most parsed texts that are kept."""

MOST = 1 << 16
"""Most replicas, shards, and processes that compute gradients, of a real or a simulated job."""


class Kind(StrEnum):
    """Kind of a role, by its work."""

    REPLICA = "replica"
    """Computes gradients."""
    SHARD = "shard"
    """Holds a slice of the parameters."""
    STANDBY = "standby"
    """Holds a shard's state, to take its place."""
    COORDINATOR = "coordinator"
    EVALUATOR = "evaluator"
    """Measures the server's model."""
    SINGLE = "single"
    """Plays all roles of a job in one process."""
    SUPERVISOR = "supervisor"
    """Runs the job: sends `Stop` to the coordinator."""
    CARRIER = "carrier"
    """Transport of a role's own process: answers `Lend`."""
    STORE = "store"
    """Disk of a role's own process: answers `Save`, `Commit`, `Discard` and `Load`."""
    CLOCK = "clock"
    """Clock of a role's own process: answers `Wake`."""


_KINDS = {str(kind): kind for kind in Kind}
_NUMBERED = (Kind.REPLICA, Kind.SHARD, Kind.STANDBY)
"""Kinds with several roles, which are numbered; the others have one."""


class Role(msgspec.Struct, frozen=True):
    """Role of a job.

    `index` is its number among the roles of its kind; -1 where there is only one. `partition` is that of a split
    replica; -1 for a whole one.

    >>> str(Role(Kind.REPLICA, 3)), str(Role(Kind.REPLICA, 3, 1)), str(Role(Kind.COORDINATOR))
    ('replica 3', 'replica 3.1', 'coordinator')
    """

    kind: Kind
    index: int = -1
    partition: int = -1

    def __str__(self) -> str:
        number = f" {self.index}" if self.index >= 0 else ""
        return f"{self.kind}{number}.{self.partition}" if self.partition >= 0 else f"{self.kind}{number}"


@lru_cache(_KNOWN)
def parse(text: str) -> Role:
    """Return the role that a text names; refuse a text that names none.

    >>> parse("replica 3.1"), parse("shard 0").kind, parse("coordinator").index
    (Role(kind=<Kind.REPLICA: 'replica'>, index=3, partition=1), <Kind.SHARD: 'shard'>, -1)
    """
    match = _FORM.fullmatch(text)
    of = _KINDS.get(match[1]) if match else None
    if match is None or of is None:
        raise RemoteProtocolError(
            f"{text[:80]!r} is no role: it is one such as 'replica 3', 'replica 3.1', 'shard 0' or 'coordinator'"
        )
    if (match[2] is not None) != (of in _NUMBERED) or (match[3] is not None and of is not Kind.REPLICA):
        raise RemoteProtocolError(
            f"{text[:80]!r} is no role: {', '.join(_NUMBERED)} have a number, a replica may have a partition, no "
            "others do"
        )
    return Role(of, *(-1 if number is None else int(number) for number in match.groups()[1:]))


COORDINATOR = str(Role(Kind.COORDINATOR))
EVALUATOR = str(Role(Kind.EVALUATOR))
SINGLE = str(Role(Kind.SINGLE))
SUPERVISOR = str(Role(Kind.SUPERVISOR))
CARRIER = str(Role(Kind.CARRIER))
STORE = str(Role(Kind.STORE))
CLOCK = str(Role(Kind.CLOCK))


def kind(role: str) -> Kind:
    """Return the kind of a role."""
    return parse(role).kind


def title_of(role: str) -> str:
    """Return the title of the process that plays a role."""
    return f"distbelief: {role}"


def index_of(role: str) -> int:
    """Return the number of a role; -1 where there is one of its kind.

    >>> index_of("replica 12"), index_of("coordinator")
    (12, -1)
    """
    return parse(role).index


@lru_cache(_KNOWN)
def partition_of(role: str) -> int:
    """Return the number of a role's partition; 0 for a whole replica, and for other roles.

    >>> partition_of("replica 3"), partition_of("replica 3.1")
    (0, 1)
    """
    return max(parse(role).partition, 0)


@lru_cache(_KNOWN)
def at_partition(role: str, partition: int) -> str:
    """Return another partition of the same replica; the role itself where it is whole.

    >>> at_partition("replica 3.0", 1), at_partition("replica 3", 1), at_partition("shard 0", 1)
    ('replica 3.1', 'replica 3', 'shard 0')
    """
    parsed = parse(role)
    return role if parsed.partition < 0 else str(Role(parsed.kind, parsed.index, partition))


def lead_of(role: str) -> str:
    """Return the role that acts for a whole replica: its first partition, or the replica itself if it is not split.

    >>> lead_of("replica 3.1"), lead_of("replica 3")
    ('replica 3.0', 'replica 3')
    """
    return at_partition(role, 0)


def is_lead(role: str) -> bool:
    """Return whether a role acts for its whole replica."""
    return partition_of(role) == 0


def is_replica(role: str) -> bool:
    """Return whether a role computes gradients."""
    return parse(role).kind is Kind.REPLICA


def replica(index: int) -> str:
    """Return the role of replica `index`."""
    return str(Role(Kind.REPLICA, index))


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """Mesh of replicas, each split over so many partitions.

    >>> Mesh(2, 3).size, Mesh(2, 3).cells[3]
    (6, (1, 0))
    """

    replicas: int
    partitions: int = 1

    def check(self) -> None:
        """Refuse an impossible mesh, with a `UsageError`."""
        for option, count in (("--replicas", self.replicas), ("--partitions", self.partitions)):
            if count < 1:
                raise UsageError(f"{option} {count}: must be 1 or more")
            if count > MOST:
                raise UsageError(f"{option} {count}: must be at most {MOST}")
        if self.size > MOST:
            raise UsageError(
                f"--replicas {self.replicas} of {self.partitions} partitions are {self.size} processes: there may be "
                f"at most {MOST}"
            )

    @property
    def size(self) -> int:
        """Number of processes that compute gradients."""
        return self.replicas * self.partitions

    def number(self, replica: int, partition: int = 0) -> int:
        """Return the number of a process among all, by which it gets one of a machine's devices.

        >>> Mesh(2, 3).number(1, 2)
        5
        """
        return replica * self.partitions + partition

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """Replica and partition of each process."""
        return tuple((replica, partition) for replica in range(self.replicas) for partition in range(self.partitions))


def replicas(mesh: Mesh) -> tuple[str, ...]:
    """Return the roles of a mesh: one for each replica, or for each partition of split replicas.

    >>> replicas(Mesh(2)), replicas(Mesh(1, 2))
    (('replica 0', 'replica 1'), ('replica 0.0', 'replica 0.1'))
    """
    split = mesh.partitions > 1
    return tuple(str(Role(Kind.REPLICA, index, partition if split else -1)) for index, partition in mesh.cells)


def servers(shards: int, standbys: int) -> tuple[str, ...]:
    """List the roles of so many shards, each with a standby or without.

    >>> servers(2, 1)
    ('shard 0', 'shard 1', 'standby 0', 'standby 1')
    """
    return (*map(shard, range(shards)), *map(standby, range(shards if standbys else 0)))


def leads(mesh: Mesh) -> tuple[str, ...]:
    """Return the leading role of each replica of a mesh.

    >>> leads(Mesh(2)), leads(Mesh(2, 3))
    (('replica 0', 'replica 1'), ('replica 0.0', 'replica 1.0'))
    """
    return tuple(role for role in replicas(mesh) if is_lead(role))


def partitions_of(role: str, partitions: int) -> tuple[str, ...]:
    """Return all partitions of a role's replica.

    >>> partitions_of("replica 3.1", 2), partitions_of("replica 3", 1)
    (('replica 3.0', 'replica 3.1'), ('replica 3',))
    """
    return tuple(at_partition(role, partition) for partition in range(partitions))


def shard(index: int) -> str:
    """Return the role of shard `index`."""
    return str(Role(Kind.SHARD, index))


def standby(index: int) -> str:
    """Return the role of the standby of shard `index`."""
    return str(Role(Kind.STANDBY, index))


def standby_of(shard: str) -> str:
    """Return a shard's standby."""
    return standby(index_of(shard))


def shard_of(standby: str) -> str:
    """Return a standby's shard."""
    return shard(index_of(standby))


def named(who: Sequence[str], most: int = 3) -> str:
    """List the first few of some roles, and the number of the others.

    >>> named(["shard 0", "shard 1", "shard 2", "shard 3", "shard 4"])
    'shard 0, shard 1, shard 2 and 2 more'
    """
    return ", ".join(who[:most]) + (f" and {len(who) - most} more" if len(who) > most else "")
