"""What a process gives to whoever plays a replica in it, and what it gets: a story, who computes for it, and where its
checkpoints are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from distbelief.core.effects import Batch, Computed, Story
from distbelief.core.settings import Settings
from distbelief.runtime.player import Store, Worker
from distbelief.runtime.pump import Pump
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule

Compute = Callable[[Batch], Computed]


class ProcessSpec(Protocol):
    """What a process of a job is told, as far as who plays a replica asks."""

    @property
    def settings(self) -> Settings:
        """Of the job."""
        ...

    @property
    def evaluator(self) -> bool:
        """Whether the model is measured."""
        ...

    @property
    def supervisor(self) -> int:
        """Process id of the supervisor."""
        ...

    @property
    def memory(self) -> int:
        """The supervisor's descriptor of the memory that is shared; -1 for none."""
        ...

    @property
    def run(self) -> str:
        """The run folder; "" for none."""
        ...

    @property
    def transport(self) -> str:
        """The carrier of the links."""
        ...

    @property
    def advertise(self) -> str:
        """The host that others reach this one at."""
        ...

    @property
    def device(self) -> str:
        """Where replicas compute."""
        ...


class Player(Protocol):
    """A story, and what a status shows of it."""

    def story(self) -> Story:
        """Its effects, one by one."""
        ...

    def waits(self) -> str:
        """What it waits for, in one sentence; empty where for nothing."""
        ...

    def standing(self) -> dict[str, Any]:
        """Its counts."""
        ...


@dataclass(frozen=True)
class Context:
    """What a process gives to whoever plays a replica in it."""

    spec: ProcessSpec
    role: str
    incarnation: int
    task: Task
    flat: FlatModule
    """Its model, with its initial parameters."""
    padded: Callable[[Compute], Compute]
    """Makes what computes as slow as the place's compute model has it."""
    listen: Callable[[], str]
    """Has others reach this process; returns its address."""
    pump: Pump | None
    """Carries the links during a step, where that needs a thread."""


class Part(NamedTuple):
    """What a process plays."""

    player: Player
    worker: Worker
    store: Store | None = None


def open_memory(spec: ProcessSpec) -> int:
    """A descriptor of the supervisor's memory."""
    return os.open(f"/proc/{spec.supervisor}/fd/{spec.memory}", os.O_RDWR)
