"""Players of the roles of a job without a server."""

from __future__ import annotations

from distbelief.coordination.cadence import MinibatchCount, SnapshotTimer, Target
from distbelief.coordination.partitions import PartitionRegistry
from distbelief.core.conversations.grouping import Duty, Enter, GroupPhase, PartPlace, RoundsMade
from distbelief.core.lives import Lives
from distbelief.core.messages import Address
from distbelief.core.outcomes import Cause
from distbelief.core.portions import Portion, Position, StartingPoint
from distbelief.core.settings import Plan, Settings
from distbelief.runtime.player import PlayedRole
from distbelief.strategies.context import Context, ProcessStage, VirtualStage
from distbelief.strategies.grouped.coordinator import AllreduceCoordinator
from distbelief.strategies.grouped.grouping import Grouping
from distbelief.strategies.grouped.round_batches import RoundBatches
from distbelief.strategies.grouped.simulated import simulated_replica
from distbelief.strategies.grouped.worker import process_replica
from distbelief.strategies.players import Players


def replica(context: Context) -> PlayedRole:
    """Return what a replica plays: its gradients are added up by its process's carrier, or, simulated, in messages."""
    if isinstance(context.stage, VirtualStage):
        return simulated_replica(context, context.stage)
    assert isinstance(context.stage, ProcessStage)
    return process_replica(context, context.stage)


PLAYERS = Players(
    AllreduceCoordinator,
    (
        AllreduceCoordinator,
        MinibatchCount,
        SnapshotTimer,
        Target,
        Grouping,
        Lives,
        PartitionRegistry,
        Address,
        PartPlace,
        RoundBatches,
        Enter,
        RoundsMade,
        Portion,
        Position,
        StartingPoint,
        Plan,
        Settings,
        Cause,
        GroupPhase,
        Duty,
    ),
    replica,
)
