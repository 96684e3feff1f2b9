"""Who plays the roles of a job. Each room has its own; here is what all are made of.

Coordinators, shards and standbys are the same on a virtual cluster; replicas of allreduce, hogwild and locking are
played there by `places.simulated.assembled` and `places.simulated.hogwild`, the plain loop by `places.simulated.alone`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.evaluating import EvaluatorStanding
from distbelief.core.conversations.initialising import ShardStanding
from distbelief.core.conversations.mirroring import StandbyStanding
from distbelief.core.conversations.phases import Phase
from distbelief.core.effects import Machine
from distbelief.core.lives import Lives
from distbelief.core.messages import Place
from distbelief.core.outcomes import Cause
from distbelief.core.portions import START, Dealer, Portion, Position
from distbelief.core.settings import Plan, Settings
from distbelief.replica.downpour import Downpour
from distbelief.replica.vectors import Vectors
from distbelief.runtime.player import Worker
from distbelief.server.dealing import Dealing
from distbelief.server.ending import ClosingStep, Why
from distbelief.server.evaluations import Evaluations
from distbelief.server.muster import Muster
from distbelief.server.reception import Reception
from distbelief.server.saving import Saving
from distbelief.server.shard import Shard
from distbelief.server.slice import Slice, TorchSlice
from distbelief.server.standby import Standby
from distbelief.server.standbys import Standbys
from distbelief.strategies.process import Context, Part, ProcessSpec
from distbelief.strategies.served import served_reader
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule

COORDINATOR_STATE = (
    Evaluations, Saving, Muster, Reception, Standbys, Lives, Dealing, Dealer, Place, Portion, Position, Plan, Settings,
    Cause, Why, Phase, ClosingStep, ShardStanding, StandbyStanding, EvaluatorStanding, CheckpointStage,
)  # fmt: skip
"""What `server.coordinator.Coordinator` holds, beside itself."""


class JobCoordinator(Machine, Protocol):
    """The coordinator of a job."""

    @property
    def plan(self) -> Plan | None:
        """Who holds what, once the first replica has told its layout."""
        ...

    def waits(self) -> str:
        """What it waits for, in one sentence."""
        ...

    def standing(self) -> dict[str, Any]:
        """Its counts."""
        ...


class MakeCoordinator(Protocol):
    """Makes the coordinator of a job."""

    def __call__(
        self,
        settings: Settings,
        evaluator: bool,
        checkpoint: str = "",
        position: Position = START,
        samples: int = 0,
        number: int = 1,
        /,
    ) -> JobCoordinator:
        """The arguments are those of `server.coordinator.Coordinator`."""
        ...


@dataclass(frozen=True)
class Servers:
    """Who holds the parameters of a job with a server, and the replicas that it serves."""

    shard: Callable[[int, Callable[[Plan, int], Any], int], Shard]
    """Makes a shard of its number, what makes its slice, and its incarnation."""
    standby: Callable[[int, Callable[[Plan, int], Any], int], Standby]
    """Makes the standby of a shard."""
    torch_slice: Callable[[Plan, int, torch.Tensor | None, torch.Tensor | None], TorchSlice]
    """Makes a shard's slice in memory: new, or that of a moving and a frozen range (each 1-D uint8)."""
    phantom_slice: Callable[[Plan, int], Slice]
    """Makes a shard's slice that holds nothing."""
    replica: Callable[[str, Vectors, int, int], Downpour]
    """Makes a replica's story from its role, its vectors, the samples of its data and its incarnation."""


def check_nothing(settings: Settings, model: nn.Module) -> None:
    """Any model will do."""


@dataclass(frozen=True)
class Players:
    """Who plays the roles of a job of one strategy."""

    coordinator: MakeCoordinator
    state: tuple[type, ...]
    """The classes that what the coordinator holds is made of; none where it holds a story, and has to be told all of it
    again.
    """
    part: Callable[[Context], Part]
    """What a process plays for a replica."""
    reader: Callable[[ProcessSpec, FlatModule, Task], Worker] = served_reader
    """Who measures for the evaluator, in its process."""
    servers: Servers | None = None
    """None where there are no shards."""
    check_model: Callable[[Settings, nn.Module], None] = check_nothing
    """Refuses, with a `UsageError`, a model that the strategy cannot train."""

    @property
    def memory(self) -> Mapping[str, type]:
        """The classes of the coordinator's state, by name, as a journal wants them."""
        return {kind.__name__: kind for kind in self.state}

    @property
    def served(self) -> Servers:
        """Who holds the parameters, where there are shards."""
        assert self.servers is not None
        return self.servers
