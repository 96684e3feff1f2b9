"""Players of the roles of a job without a server."""

from __future__ import annotations

from distbelief.coordination.coordinator import Coordinator
from distbelief.core.conversations.membership import PartPlace
from distbelief.core.portions import StartingPoint
from distbelief.core.protocol import GROUPED
from distbelief.core.settings import Settings
from distbelief.runtime.player import Part
from distbelief.strategies.context import Context, ProcessStage, VirtualStage
from distbelief.strategies.grouped.group_holders import GroupHolders
from distbelief.strategies.grouped.round_batches import RoundBatches
from distbelief.strategies.grouped.round_work import RoundWork
from distbelief.strategies.grouped.simulated import simulated_replica
from distbelief.strategies.grouped.worker import process_replica
from distbelief.strategies.players import COORDINATOR_STATE, Players


def coordinator(settings: Settings, measures: bool, start: StartingPoint) -> Coordinator:
    """Return what the coordinator plays: the replicas hold the parameters, and rounds are dealt to all of them."""
    holders = GroupHolders()
    job = Coordinator(settings, measures, start, holders, RoundWork(holders), GROUPED)
    job.evaluations.tried = True  # by the first replica, before it joins
    return job


def replica(context: Context) -> Part:
    """Return what a replica plays: its gradients are added up by its process's carrier, or, simulated, in messages."""
    if isinstance(context.stage, VirtualStage):
        return simulated_replica(context, context.stage)
    assert isinstance(context.stage, ProcessStage)
    return process_replica(context, context.stage)


PLAYERS = Players(coordinator, (*COORDINATOR_STATE, GroupHolders, RoundWork, RoundBatches, PartPlace), replica)
