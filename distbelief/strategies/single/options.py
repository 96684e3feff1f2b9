"""Single: the plain PyTorch loop in one process, the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.core import roles
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.values import Given
from distbelief.strategies.base import Scaled


@dataclass(frozen=True)
class Single(Scaled):
    """The plain PyTorch loop in one process: no server, no messages."""

    name: ClassVar[str] = "single"
    served: ClassVar[bool] = False
    """Whether there are replicas, and shards that serve them."""
    replicas: ClassVar[int] = 1
    shards: ClassVar[int] = 1

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """What the loop steps with."""

    def cast(self) -> tuple[str, ...]:
        """The roles of a job: one, which plays everything."""
        return (roles.SINGLE,)
