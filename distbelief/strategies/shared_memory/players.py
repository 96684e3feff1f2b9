"""Who plays the roles of a job in one memory, and which models it can train."""

from __future__ import annotations

from torch import nn

from distbelief.core.settings import Settings
from distbelief.strategies.players import COORDINATOR_STATE, Players
from distbelief.strategies.shared_memory.coordinator import MappingCoordinator
from distbelief.strategies.shared_memory.mapped import check
from distbelief.strategies.shared_memory.worker import reader, replica
from distbelief.tasks.flat import layout_of


def check_model(settings: Settings, model: nn.Module) -> None:
    """Refuse a model that cannot be stepped in place.

    Raises:
        UsageError: naming the part of it, and the remedy.
    """
    check(layout_of(model), settings)


PLAYERS = Players(
    MappingCoordinator,
    (MappingCoordinator, *COORDINATOR_STATE),
    replica,
    reader,
    check_model=check_model,
    rows=True,
)
