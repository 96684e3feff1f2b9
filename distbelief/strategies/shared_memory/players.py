"""Players of the roles of a job in one memory, and the models that it can train."""

from __future__ import annotations

from torch import nn

from distbelief.coordination.coordinator import Coordinator
from distbelief.coordination.portion_work import PortionWork
from distbelief.core.portions import StartingPoint
from distbelief.core.protocol import SHARED
from distbelief.core.settings import Settings
from distbelief.strategies.players import COORDINATOR_STATE, Players
from distbelief.strategies.shared_memory.mapped import check
from distbelief.strategies.shared_memory.memory_holders import MemoryHolders
from distbelief.strategies.shared_memory.worker import reader, replica
from distbelief.tasks.flat import layout_of


def coordinator(settings: Settings, evaluator: bool, start: StartingPoint) -> Coordinator:
    """Return what the coordinator plays: the replicas hold the parameters themselves, and portions are dealt."""
    return Coordinator(settings, evaluator, start, MemoryHolders(), PortionWork(), SHARED)


def check_model(settings: Settings, model: nn.Module) -> None:
    """Refuse a model that cannot be stepped in place.

    Raises:
        UsageError: naming the part of it, and the remedy.
    """
    check(layout_of(model), settings)


PLAYERS = Players(
    coordinator,
    (*COORDINATOR_STATE, MemoryHolders),
    replica,
    reader,
    check_model=check_model,
    rows=True,
)
