"""Context that a place gives to whoever plays a replica or the evaluator: a process, or the simulation, which may
compute nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.messages import Traffic
from distbelief.core.portions import ANEW, StartingPoint
from distbelief.core.records import Record
from distbelief.core.settings import Settings
from distbelief.fabric.crossings import Crossings, segment_bytes
from distbelief.fabric.order import in_order
from distbelief.replica.served_replica import LoopRequest
from distbelief.replica.siblings import Siblings
from distbelief.replica.split_compute import Part, SplitCompute
from distbelief.replica.vectors import Vectors
from distbelief.runtime.clock import VirtualClock
from distbelief.runtime.player import Compute, PlayedRole, cannot
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.transport.base import NetworkEndpoint
from distbelief.transport.virtual import VirtualEndpoint

Memory = Callable[[int], torch.Tensor]
"""The memory that the replicas of a job share, 1-D uint8, so many bytes of it; all have the same bytes."""


@dataclass(frozen=True)
class Stage:
    """Stage of one life of a role: its time, and the memory that it shares with others."""

    memory: Memory | None = None
    """Memory that the replicas share, where the strategy needs it."""
    crossings: Memory | None = None
    """Memory that the partitions of split replicas share, where they are on one host."""
    timed: Callable[[Compute], Compute] = lambda compute: compute
    """Has a step take the time that it has here."""
    work: Callable[[float, bool, Callable[[bool], None]], bool | None] = lambda *_: True
    """Has a partition's share of a step take its time, as a worker's."""
    now: Callable[[], float] = time.perf_counter
    """The time, in seconds."""
    device: torch.device | None = None
    """Where a replica computes; where its model is, if None."""
    reach: Callable[[PlayedRole, FlatModule | None], PlayedRole] = lambda part, _: part
    """Has a replica's part reach the shards; with its model, where that may compute on their memory."""
    listen: Callable[[], str] = str
    """Has others reach this process; returns its address."""
    count: Callable[[Traffic], None] = lambda _: None
    """Has the bytes of one more carrier told of, with those of its endpoints."""


@dataclass(frozen=True, kw_only=True)
class ProcessStage(Stage):
    """Stage of a process."""

    transport: str
    """The carrier of its links."""
    encrypted: bool
    """True if these are encrypted."""
    advertise: str
    """The host that others reach this one at."""
    descriptor: Callable[[], int]
    """Opens the file of the memory that it shares with those who compute the same part of the model."""
    open_endpoint: Callable[[], tuple[NetworkEndpoint, str]]
    """Opens another endpoint of its role, at a port that is free; returns it, and its address."""


@dataclass
class StepTiming:
    """Timing of a simulated replica's step."""

    first: float = 1.0
    """The share of a step after which a minibatch is answered: the rest of it is not waited for."""
    more: float = 0.0
    """Seconds of work that each step brings beside what the compute model says."""


@dataclass(frozen=True, kw_only=True)
class VirtualStage(Stage):
    """Stage of a simulated replica."""

    clock: VirtualClock
    endpoint: VirtualEndpoint
    """Endpoint of this life of the replica: its thread, its network, and the cost of work."""
    addition: float
    """Seconds for each byte of a vector that is added to another."""
    timing: StepTiming


@dataclass(frozen=True)
class Context:
    """Context of whoever plays a replica, or the evaluator, in a place."""

    role: str
    incarnation: int
    settings: Settings
    task: Task
    samples: int
    """Samples of the training set."""
    vectors: Vectors
    """Flat vectors of the model, with its initial parameters; of a phantom, which computes nothing, their lengths."""
    computes: Callable[[float], Compute]
    """Builds what computes the gradient of a minibatch, clipped to a global norm (0 for none). It uses the task's data
    and model, or a user's own loop; for a phantom only time passes.
    """
    stage: Stage = Stage()
    """Where it is played: a `ProcessStage`, or a `VirtualStage` in simulation."""
    measured: bool = False
    """True if the model is measured."""
    part: Part | None = None
    """PlayedRole of a split replica, computed together with the other partitions: the model is what it holds of it."""
    whole: Callable[[], nn.Module] = cannot("make the whole model")
    """Makes the model of which it holds a part, where its replica is split."""
    loop: LoopRequest | None = None
    """Request of a user's own loop, of which a step may be several backward passes; None where a task is trained."""

    @property
    def flat(self) -> FlatModule | None:
        """The model; None for a phantom."""
        return self.vectors if isinstance(self.vectors, FlatModule) else None

    @property
    def module(self) -> FlatModule:
        """The model, of whoever computes."""
        assert isinstance(self.vectors, FlatModule)
        return self.vectors

    @property
    def split(self) -> SplitCompute | None:
        """Return how it computes together with the other partitions, where the replica is split."""
        if self.part is None:
            return None
        siblings = Siblings(self.role, self.incarnation, self.settings.partitions, self.stage.listen())
        return SplitCompute(siblings, self.part, self._crossings(self.part))

    def _crossings(self, part: Part) -> Crossings | None:
        """Return the memory in which partitions find what crosses, each replica in a part of what they share."""
        if self.stage.crossings is None or not in_order():
            return None
        partitions = self.settings.partitions
        length = segment_bytes(partitions, part.slots)
        start = roles.index_of(self.role) * length
        memory = self.stage.crossings(self.settings.replicas * length)[start : start + length]
        if part.copies is not None:
            part.copies.pin(memory)
        crossings = Crossings(memory, roles.partition_of(self.role), partitions, part.slots, part.copies)
        self.stage.count(crossings.traffic)
        return crossings


class LoopSteps(NamedTuple):
    """Parts of a step in a loop that one process plays."""

    compute: Callable[[Batch], Computed]
    """The gradient of a minibatch."""
    update: Callable[[], None]
    """The step with it."""
    samples: int
    """Samples of the training set."""
    trained: int
    """Bytes of the parameters."""


class Loop(Protocol):
    """The whole of a job that one process plays."""

    def run(self) -> None:
        """Train to the end."""


@dataclass(frozen=True)
class LoopContext:
    """Context of a loop that plays everything."""

    task: Task
    model: nn.Module
    """On its device, with its initial parameters."""
    settings: Settings
    note: Callable[[Record], None]
    """Is handed every record."""
    stopped: Callable[[], str | None]
    """Says, after each step, why the loop is to end; None while it is not."""
    run: str = ""
    """The run folder; "" keeps nothing."""
    start: StartingPoint = ANEW
    """From where it goes on."""
    now: Callable[[], float] | None = None
    """Says when it is time for a checkpoint; the wall's clock where None."""
    timed: Callable[[LoopSteps], LoopSteps] = field(default=lambda steps: steps)
    """Makes its steps take the time that they have here."""
