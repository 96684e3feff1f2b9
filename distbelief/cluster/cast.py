"""Who plays which role of a job, by its settings: the same in processes and on a virtual cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.evaluating import EvaluatorStanding
from distbelief.core.conversations.grouping import Duty, Enter, GroupPhase, Rounds
from distbelief.core.conversations.initialising import ShardStanding
from distbelief.core.conversations.mirroring import StandbyStanding
from distbelief.core.conversations.phases import Phase
from distbelief.core.effects import Machine
from distbelief.core.lives import Lives
from distbelief.core.messages import Place
from distbelief.core.outcomes import Cause
from distbelief.core.portions import START, Dealer, Portion, Position
from distbelief.core.settings import Plan, Settings
from distbelief.errors import UsageError
from distbelief.replica.downpour import Downpour
from distbelief.replica.vectors import Vectors
from distbelief.server.coordinator import Coordinator
from distbelief.server.dealing import Dealing
from distbelief.server.ending import ClosingStep, Why
from distbelief.server.evaluations import Evaluations
from distbelief.server.muster import Muster
from distbelief.server.reception import Reception
from distbelief.server.saving import Saving
from distbelief.server.shard import Shard
from distbelief.server.slice import PhantomSlice, Slice, TorchSlice
from distbelief.server.standby import Standby
from distbelief.server.standbys import Standbys
from distbelief.strategies.allreduce.coordinator import Conductor
from distbelief.strategies.allreduce.grouping import Grouping
from distbelief.strategies.allreduce.rations import Rations
from distbelief.strategies.sandblaster.coordinator import Sandblaster
from distbelief.strategies.sandblaster.replica import Sandblaster as BundleStory
from distbelief.strategies.sandblaster.shard import DescentShard, DescentStandby
from distbelief.strategies.sandblaster.vectors import PhantomVectorSlice, TorchVectorSlice
from distbelief.strategies.shared_memory.coordinator import Keeping
from distbelief.strategies.shared_memory.mapped import check
from distbelief.tasks.flat import layout_of

_SERVED = (Evaluations, Saving, Muster, Reception, Standbys, Lives, Dealing, Dealer, Place, Portion, Position, Plan, Settings, Cause, Why,
           Phase, ClosingStep, ShardStanding, StandbyStanding, EvaluatorStanding, CheckpointStage)  # fmt: skip
_MEMORY: Mapping[type, tuple[type, ...]] = {
    Coordinator: (Coordinator, *_SERVED),
    Keeping: (Keeping, *_SERVED),
    Conductor: (Conductor, Grouping, Lives, Rations, Enter, Rounds, Portion, Position, Plan, Settings, Cause, GroupPhase, Duty),
}


def coordinator(
    settings: Settings, evaluator: bool, checkpoint: str = "", position: Position = START, samples: int = 0, number: int = 1
) -> Coordinator | Conductor:
    """The coordinator of a job; its arguments are those of `Coordinator`."""
    kind = Conductor if settings.among_themselves else Sandblaster if settings.descent else Keeping if settings.mapped else Coordinator
    return kind(settings, evaluator, checkpoint, position, samples, number)


def memory_of(machine: Machine) -> Mapping[str, type]:
    """The classes that what a coordinator holds is made of; none where it holds a story, and has to be told all of it again."""
    return {kind.__name__: kind for kind in _MEMORY.get(type(machine), ())}


def watched(settings: Settings) -> set[str]:
    """The roles that whoever starts the job starts, and whose deaths he tells of; guests are beside them."""
    servers = [make(i) for make in (roles.shard, roles.standby) for i in range(settings.shards)]
    return {*map(roles.replica, range(settings.replicas)), *servers, roles.EVALUATOR}


def shard(settings: Settings, index: int, make: Callable[[Plan, int], Any], incarnation: int) -> Shard:
    """A shard of a job; `make` makes what `torch_slice` or `phantom_slice` does."""
    return (DescentShard if settings.descent else Shard)(index, make, incarnation)


def standby(settings: Settings, index: int, make: Callable[[Plan, int], Any], incarnation: int) -> Standby:
    """The standby of a shard."""
    return (DescentStandby if settings.descent else Standby)(index, make, incarnation)


def torch_slice(plan: Plan, index: int, moving: torch.Tensor | None = None, frozen: torch.Tensor | None = None) -> TorchSlice:
    """A shard's slice in memory."""
    return (TorchVectorSlice if plan.settings.descent else TorchSlice)(plan, index, moving, frozen)


def phantom_slice(plan: Plan, index: int) -> Slice:
    """A shard's slice that holds nothing."""
    return (PhantomVectorSlice if plan.settings.descent else PhantomSlice)(plan, index)


def replica(settings: Settings, role: str, vectors: Vectors, samples: int, incarnation: int) -> Downpour:
    """A replica's story."""
    return (BundleStory if settings.descent else Downpour)(role, vectors, samples, incarnation=incarnation)


def check_model(settings: Settings, model: nn.Module) -> None:
    """Refuse a model whose loss a job cannot take the gradient of.

    Raises:
        UsageError: naming the part of it, and the remedy.
    """
    if settings.mapped:
        check(layout_of(model), settings)
    if settings.descent is None:
        return
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise UsageError(
                f"{type(part).__name__} {name!r}: with it the loss of a batch is not the sum of its portions' losses, and changes with every"
                " evaluation; strategy sandblaster needs a model without batch norm, such as one with group norm or layer norm"
            )
