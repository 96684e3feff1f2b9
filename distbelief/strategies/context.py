"""Context of replicas and evaluators: all that a place, a process or the simulation, gives their builders."""

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
"""Opens so many bytes of the memory that the replicas of a job share (1-D uint8); all see the same bytes."""


@dataclass(frozen=True)
class Stage:
    """Surroundings of one life of a role: its clock, its device, and the memory that it shares."""

    memory: Memory | None = None
    """Memory that the replicas share, where the strategy needs it."""
    crossings: Memory | None = None
    """Memory that the partitions of split replicas share, where they are on one host."""
    timed: Callable[[Compute], Compute] = lambda compute: compute
    """Wraps a step so that it takes its time in this place."""
    work: Callable[[float, bool, Callable[[bool], None]], bool | None] = lambda *_: True
    """Spends the time of a partition's share of a step, as a worker's `work`."""
    now: Callable[[], float] = time.perf_counter
    """The time, in seconds."""
    device: torch.device | None = None
    """Device on which a replica computes; None for that of its model."""
    reach: Callable[[PlayedRole, FlatModule | None], PlayedRole] = lambda part, _: part
    """Connects a replica to the shards, given its model where that may compute on their memory."""
    listen: Callable[[], str] = str
    """Opens a port to other processes; returns its address."""
    count: Callable[[Traffic], None] = lambda _: None
    """Counts the bytes of another carrier along with those of the endpoints."""


@dataclass(frozen=True, kw_only=True)
class ProcessStage(Stage):
    """Surroundings of a role in its own process."""

    transport: str
    encrypted: bool
    advertise: str
    """Host name at which other hosts reach this one."""
    descriptor: Callable[[], int]
    """Opens the file of the memory shared by replicas that compute the same part of the model."""
    open_endpoint: Callable[[], tuple[NetworkEndpoint, str]]
    """Opens another endpoint of the role at a free port; returns it and its address."""
    at_end: Callable[[Callable[[], None]], object]
    """Registers a function to call at the end of the role, if its process goes on."""


@dataclass
class StepTiming:
    """Timing of a simulated replica's step."""

    first: float = 1.0
    """Share of a step after which a minibatch is answered, although the step goes on."""
    more: float = 0.0
    """Seconds of work in each step beyond the compute model's."""


@dataclass(frozen=True, kw_only=True)
class VirtualStage(Stage):
    """Surroundings of a simulated replica."""

    clock: VirtualClock
    endpoint: VirtualEndpoint
    """Endpoint of this life of the replica: its thread, its network, and the cost of work."""
    addition: float
    """Seconds for each byte of a vector that is added to another."""
    timing: StepTiming


@dataclass(frozen=True)
class Context:
    """All from which a replica or the evaluator is built."""

    role: str
    incarnation: int
    settings: Settings
    task: Task
    samples: int
    """Samples in the training set."""
    vectors: Vectors
    """Flat vectors of the model with its initial parameters; for a phantom, only their lengths."""
    computes: Callable[[float], Compute]
    """Builds what computes a minibatch's gradient, clipped to a global norm (0 for none), from the task's model and
    data or in a script's loop. In a phantom only time passes.
    """
    stage: Stage = Stage()
    """Surroundings: a `ProcessStage`, or a `VirtualStage` in simulation."""
    measured: bool = False
    part: Part | None = None
    """Part of a split replica's computation; `vectors` are then of this part of the model."""
    whole: Callable[[], nn.Module] = cannot("make the whole model")
    """Builds the whole model, where the replica is split."""
    loop: LoopRequest | None = None
    """Request of a script's loop, whose step may be several backward passes; None where a task is trained."""

    @property
    def flat(self) -> FlatModule | None:
        """The model; None for a phantom."""
        return self.vectors if isinstance(self.vectors, FlatModule) else None

    @property
    def module(self) -> FlatModule:
        """The model, in a replica that computes."""
        assert isinstance(self.vectors, FlatModule)
        return self.vectors

    @property
    def split(self) -> SplitCompute | None:
        """The computation together with the other partitions; None where the replica is not split."""
        if self.part is None:
            return None
        siblings = Siblings(self.role, self.incarnation, self.settings.partitions, self.stage.listen())
        return SplitCompute(siblings, self.part, self._crossings(self.part))

    def _crossings(self, part: Part) -> Crossings | None:
        """Return the memory for what crosses between this replica's partitions: its range of what all share."""
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
    """Parts of a step of a strategy that runs in one process."""

    compute: Callable[[Batch], Computed]
    """Returns the gradient of a minibatch."""
    update: Callable[[], None]
    """Updates the parameters with that gradient."""
    samples: int
    """Samples in the training set."""
    trained: int
    """Bytes of the parameters."""


class Loop(Protocol):
    """A job that one process runs."""

    def run(self) -> None:
        """Train to the end."""


@dataclass(frozen=True)
class LoopContext:
    """All from which a loop that runs the whole job is built."""

    task: Task
    model: nn.Module
    """On its device, with its initial parameters."""
    settings: Settings
    note: Callable[[Record], None]
    """Takes every record."""
    stopped: Callable[[], str | None]
    """Returns why the loop is to end, after each step; None while it is to go on."""
    run: str = ""
    """Folder of the run; "" keeps nothing."""
    start: StartingPoint = ANEW
    now: Callable[[], float] | None = None
    """Clock of the checkpoints; None for the wall clock."""
    timed: Callable[[LoopSteps], LoopSteps] = field(default=lambda steps: steps)
    """Wraps the steps so that they take their time in this place."""
