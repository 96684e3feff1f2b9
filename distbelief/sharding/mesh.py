"""The mesh: how many processes compute gradients, as replicas times the partitions that each is split over."""

from __future__ import annotations

import msgspec

from distbelief.errors import UsageError

MOST = 1 << 16
"""Most replicas of a job, be it simulated, most shards, and most processes that compute gradients."""


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """So many replicas, each split over so many partitions.

    >>> Mesh(2, 3).size, Mesh(2, 3).cells[3]
    (6, (1, 0))
    """

    replicas: int
    partitions: int = 1

    def check(self) -> None:
        """Refuse a mesh that no job can have.

        Raises:
            UsageError: naming the option, its value and what it may be.
        """
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
        """Processes that compute gradients."""
        return self.replicas * self.partitions

    def number(self, replica: int, partition: int = 0) -> int:
        """Return the number of a process among all, by which it takes one of a machine's devices in turn.

        >>> Mesh(2, 3).number(1, 2)
        5
        """
        return replica * self.partitions + partition

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """Return the replica and the partition of each process."""
        return tuple((replica, partition) for replica in range(self.replicas) for partition in range(self.partitions))
