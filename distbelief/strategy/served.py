"""What strategies on a parameter server have in common: who plays."""

from __future__ import annotations

from typing import ClassVar

from distbelief.core import roles


class Served:
    """A strategy whose replicas train parameters that shards hold, under a coordinator."""

    served: ClassVar[bool] = True
    """Whether there are replicas, and shards that serve them."""

    name: ClassVar[str]
    replicas: int
    shards: int

    @property
    def consistency(self) -> str:
        """What may be stale (`core/consistency`); every strategy on a server is one answer to that."""
        return self.name

    def cast(self) -> tuple[str, ...]:
        """The roles of a job, beside the evaluator."""
        return (*map(roles.replica, range(self.replicas)), roles.COORDINATOR, *map(roles.shard, range(self.shards)))
