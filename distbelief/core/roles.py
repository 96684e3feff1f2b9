"""Roles: the names of those who take part in a job, as they stand in addresses, titles and messages."""

from __future__ import annotations

COORDINATOR = "coordinator"
EVALUATOR = "evaluator"
SINGLE = "single"  # who plays everything, where there is no server
CARRIER = "carrier"  # the transport beside a role: answers `Lent` to the machine that yielded `Lend`
STORE = "store"  # the disk beside a role: answers `Saved` to the machine that yielded `Save`
CLOCK = "clock"  # the driver's: answers `Woke` to the machine that yielded `Wake`
SUPERVISOR = "supervisor"  # whoever runs the job: says `Stop` to the coordinator


def kind(role: str) -> str:
    """What a role is, without its number.

    >>> kind("shard 3")
    'shard'
    """
    return role.partition(" ")[0]


def replica(index: int) -> str:
    """The role of replica `index`.

    >>> replica(2)
    'replica 2'
    """
    return f"replica {index}"


def shard(index: int) -> str:
    """The role of shard `index`.

    >>> shard(0)
    'shard 0'
    """
    return f"shard {index}"


def standby(index: int) -> str:
    """The role that takes the place of shard `index`.

    >>> standby(0)
    'standby 0'
    """
    return f"standby {index}"


def standby_of(shard: str) -> str:
    """The role that takes a shard's place.

    >>> standby_of("shard 3")
    'standby 3'
    """
    return standby(index_of(shard))


def index_of(role: str) -> int:
    """The number in a role's name; -1 for a role that there is only one of.

    >>> index_of("replica 12"), index_of("coordinator")
    (12, -1)
    """
    _, _, number = role.partition(" ")
    return int(number) if number.isdigit() else -1


def is_replica(role: str) -> bool:
    """Whether a role computes gradients."""
    return role.startswith("replica ")
