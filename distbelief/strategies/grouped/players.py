"""Players of strategies whose replicas form groups."""

from __future__ import annotations

from distbelief.coordination.coordinator import Coordinator
from distbelief.core.conversations.membership import PartPlace
from distbelief.core.portions import StartingPoint
from distbelief.core.protocol import GROUPED
from distbelief.core.settings import Settings
from distbelief.strategies.grouped.group_holders import GroupHolders
from distbelief.strategies.grouped.round_batches import RoundBatches
from distbelief.strategies.grouped.round_work import RoundWork
from distbelief.strategies.grouped.worker import replica
from distbelief.strategies.players import COORDINATOR_STATE, Players


def coordinator(settings: Settings, measures: bool, start: StartingPoint) -> Coordinator:
    """Return a coordinator whose replicas hold the parameters, and which deals rounds to all of them."""
    holders = GroupHolders()
    job = Coordinator(settings, measures, start, holders, RoundWork(holders), GROUPED)
    job.evaluations.tried = True  # the first replica has checked this before it joins
    return job


PLAYERS = Players(coordinator, (*COORDINATOR_STATE, GroupHolders, RoundWork, RoundBatches, PartPlace), replica)
