"""Players of the roles of a job, wherever it runs. Each room has its own; here is their common form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distbelief.coordination.allotments import Allotment, Allotments
from distbelief.coordination.cadence import SnapshotTimer, Target
from distbelief.coordination.closing import Closing, ClosingStep
from distbelief.coordination.coordinator import Coordinator
from distbelief.coordination.dealing import Dealing, RoundsDealt
from distbelief.coordination.evaluations import Evaluations
from distbelief.coordination.membership import Membership
from distbelief.coordination.registry import Registry
from distbelief.coordination.saving import Saving
from distbelief.coordination.shards import Shards
from distbelief.coordination.standbys import Standbys
from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.initialising import ShardStanding
from distbelief.core.conversations.mirroring import StandbyStanding
from distbelief.core.conversations.phases import Phase
from distbelief.core.messages import Address
from distbelief.core.outcomes import Cause
from distbelief.core.portions import AllotmentPlace, Dealer, Portion, Position, RoundDealer, StartingPoint
from distbelief.core.settings import Plan, Settings
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.server.shard import Shard
from distbelief.server.slice import Slice, TorchSlice
from distbelief.server.standby import Standby
from distbelief.strategies.context import Context, Memory
from distbelief.strategies.served import served_reader

COORDINATOR_STATE = (
    Coordinator, Evaluations, Target, Saving, SnapshotTimer, Registry, Shards, Membership,
    Standbys, Dealing, RoundsDealt, Dealer, RoundDealer, Allotments, Allotment,
    Address, Portion, Position, AllotmentPlace, Plan, Settings, Cause, Closing, Phase, ClosingStep, ShardStanding,
    StandbyStanding, CheckpointStage,
)  # fmt: skip
"""Classes of a portion-dealing `Coordinator`'s state, for its journal."""


@dataclass(frozen=True)
class Servers:
    """Players of the servers: holders of the parameters."""

    shard: Callable[[int, Callable[[Plan, int], Any], int], Shard]
    """Makes a shard of its number, what makes its slice, and its incarnation."""
    standby: Callable[[int, Callable[[Plan, int], Any], int], Standby]
    """Makes the standby of a shard."""
    torch_slice: Callable[[Plan, int, torch.Tensor | None, torch.Tensor | None], TorchSlice]
    """Makes a shard's slice in memory: new, or that of a moving and a frozen range (each 1-D uint8)."""
    phantom_slice: Callable[[Plan, int], Slice]
    """Makes a shard's slice that holds nothing."""
    unlocked_slice: Callable[[Plan, Memory, bool], Slice] | None = None
    """Makes the slice of the only shard in memory that replicas update without a lock, or a phantom of that."""


@dataclass(frozen=True)
class Players:
    """Players of all roles of a job of one strategy."""

    coordinator: Callable[[Settings, bool, StartingPoint], Coordinator]
    """Makes the coordinator of a job of these settings, with an evaluator or without, from where it goes on."""
    state: tuple[type, ...]
    """The classes that what the coordinator holds is made of; none where it holds a story, and has to be told all of it
    again.
    """
    replica: Callable[[Context], PlayedRole]
    """Builds a replica's part, as a process, in a user's own loop, and in a simulation, where it may be a phantom."""
    reader: Callable[[Context], Worker] = served_reader
    """Builds the evaluator's worker, as a process and in a simulation."""
    servers: Servers | None = None
    """None where there are no shards."""
    check_model: Callable[[Settings, nn.Module], None] = lambda *_: None
    """Refuses, with a `UsageError`, a model that the strategy cannot train."""
    rows: bool = False
    """True if sparse gradients stay so; else embeddings are told to make dense ones."""

    @property
    def memory(self) -> Mapping[str, type]:
        """The classes of the coordinator's state, by name, as a journal wants them."""
        return {kind.__name__: kind for kind in self.state}
