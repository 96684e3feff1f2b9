"""Single: the plain PyTorch loop in one process, the baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.core.settings import Optimizer


@dataclass(frozen=True)
class Single:
    """The plain PyTorch loop in one process: no server, no messages."""

    name: ClassVar[str] = "single"

    optimizer: Optimizer = Optimizer()
    """What the loop steps with."""
