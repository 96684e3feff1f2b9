"""Players of a job's roles: the form of a strategy's table of players, and the workers of served replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from distbelief.coordination.allotments import Allotment, Allotments
from distbelief.coordination.cadence import Target
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
from distbelief.core.portions import AllotmentPlace, Dealer, Portion, Position, RoundDealer, StartingPoint
from distbelief.core.records import Cause
from distbelief.core.settings import Plan, Settings
from distbelief.replica.served_replica import ServedReplica, ServerView, Training
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.server import optimizers
from distbelief.server.layerwise import Group
from distbelief.server.shard import Shard
from distbelief.server.slice import Slice, TorchSlice, copy_bytes
from distbelief.server.standby import Standby
from distbelief.sharding.layout import Entry, Layout
from distbelief.strategies.context import Context, Memory
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import measure
from distbelief.transport.base import Arena


def served(context: Context, begin_training: Callable[[ServedReplica, ServerView], Training]) -> PlayedRole:
    """Return a replica that computes gradients on parameters of the shards.

    The worker of a partition does not clip: the norm of the whole gradient is known only to its story.
    """
    role, vectors, samples, incarnation = context.role, context.vectors, context.samples, context.incarnation
    story = ServedReplica(begin_training, role, vectors, samples, incarnation, context.split, context.loop)
    clip_norm = context.settings.clip_norm if context.part is None else 0.0
    return PlayedRole(story, Worker(_attach(context), context.computes(clip_norm)))


def served_reader(context: Context) -> Worker:
    """Return the evaluator's worker, which measures the parameters that the shards answer with."""
    flat = context.module

    def attach(_: Plan, arena: Arena) -> None:
        flat.bind(arena.gradients, arena.parameters)
        # On a CPU, free the memory that the model was built in before the parameters land. A device takes the frozen
        # parameters with its first swap, which can only be after they have landed.
        if flat.device.type == "cpu":
            flat.swap(0)

    return Worker(attach, measure=lambda: measure(context.task, flat.module))


def _attach(context: Context) -> Callable[[Plan, Arena], None]:
    """Return how the module's parameters are bound: where answers land, or to the shards' own memory."""
    if context.flat is None:
        return Worker().attach
    flat, memory = context.flat, context.stage.memory
    if memory is None:
        return partial(_land, flat)

    def attach(plan: Plan, arena: Arena) -> None:
        there = memory(plan.layout.total)[flat.held.start : flat.held.stop]
        if flat.owned or (flat.only_reads and all(section.kind == "parameter" for section in plan.layout.sections)):
            flat.bind(arena.gradients, [there], remedy="" if flat.owned else "--transport tcp")
        else:
            flat.bind(arena.gradients, arena.parameters, _copying(arena.parameters, there, plan.layout.moving))

    return attach


def _land(flat: FlatModule, plan: Plan, arena: Arena) -> None:
    """Bind a replica's vectors, with the optimizer of its local steps, if any: a script has made it already."""
    local = plan.settings.local
    if local is not None and flat.local is None:
        entries = zip(flat.trained_entries, flat.trained, strict=True)
        flat.local = optimizers.build(local, groups_of_entries(plan.layout, entries))
    flat.bind(arena.gradients, arena.parameters)


def groups_of_entries(layout: Layout, entries: Iterable[tuple[Entry, torch.Tensor]]) -> list[Group]:
    """Return the optimizer's parameter groups of some parameters, in torch's form."""
    members: dict[int, list[torch.Tensor]] = {}
    for entry, parameter in entries:
        members.setdefault(entry.tensor.group, []).append(parameter)
    return [{**layout.stepped(group), "params": parameters} for group, parameters in members.items()]


def _copying(parameters: Sequence[torch.Tensor], there: torch.Tensor, moving: int) -> Callable[[int], int]:
    """Return a function that copies the shards' memory for a model that writes to it; the frozen part only once."""
    begun: set[int] = set()

    def copied(landing: int) -> int:
        size = moving if landing in begun else there.numel()
        begun.add(landing)
        copy_bytes(parameters[landing][:size], there[:size])
        return landing

    return copied


COORDINATOR_STATE = (
    *(Coordinator, Evaluations, Target, Saving, Registry, Shards, Membership, Standbys),
    *(Dealing, RoundsDealt, Dealer, RoundDealer, Allotments, Allotment, Address, Portion, Position, AllotmentPlace),
    *(Plan, Settings, Cause, Closing, Phase, ClosingStep, ShardStanding, StandbyStanding, CheckpointStage),
)
"""Classes of the state of a `Coordinator` that deals portions, for its journal."""


@dataclass(frozen=True)
class Servers:
    """Builders of the servers that hold the parameters."""

    shard: Callable[[int, Callable[[Plan, int], Any], int], Shard]
    """Builds a shard from its number, the builder of its slice, and its incarnation."""
    standby: Callable[[int, Callable[[Plan, int], Any], int], Standby]
    """Builds the standby of a shard."""
    torch_slice: Callable[[Plan, int, torch.Tensor | None, torch.Tensor | None], TorchSlice]
    """Builds a shard's slice in new memory, or in the memory of a moving and a frozen range (each 1-D uint8)."""
    phantom_slice: Callable[[Plan, int], Slice]
    """Builds a slice that holds nothing."""
    unlocked_slice: Callable[[Plan, Memory, bool], Slice] | None = None
    """Builds the slice of the only shard in memory that replicas update without a lock; True asks for a phantom."""


@dataclass(frozen=True)
class Players:
    """Builders of all roles of one strategy's jobs."""

    coordinator: Callable[[Settings, bool, StartingPoint], Coordinator]
    """Builds the coordinator from settings, whether there is an evaluator, and where the job goes on."""
    state: tuple[type, ...]
    """Classes of the coordinator's state. Empty where its state is a generator, which only its events can rebuild."""
    replica: Callable[[Context], PlayedRole]
    """Builds a replica in a process, in a script's loop, and in a simulation, where it may compute nothing."""
    reader: Callable[[Context], Worker] = served_reader
    """Builds the evaluator's worker, in a process and in a simulation."""
    servers: Servers | None = None
    """Builders of shards; None where there are no shards."""
    check_model: Callable[[Settings, nn.Module], None] = lambda *_: None
    """Refuses, with a `UsageError`, a model that the strategy cannot train."""
    rows: bool = False
    """True if sparse gradients stay sparse; else embeddings make dense ones."""

    @property
    def memory(self) -> Mapping[str, type]:
        """The classes of the coordinator's state by name, for its journal."""
        return {kind.__name__: kind for kind in self.state}
