"""Who plays the roles of a job without a server."""

from __future__ import annotations

from distbelief.core.conversations.grouping import Duty, Enter, GroupPhase, Rounds
from distbelief.core.lives import Lives
from distbelief.core.outcomes import Cause
from distbelief.core.portions import Portion, Position
from distbelief.core.settings import Plan, Settings
from distbelief.strategies.allreduce.coordinator import AllreduceCoordinator
from distbelief.strategies.allreduce.grouping import Grouping
from distbelief.strategies.allreduce.round_batches import RoundBatches
from distbelief.strategies.allreduce.worker import part
from distbelief.strategies.players import Players

PLAYERS = Players(
    AllreduceCoordinator,
    (
        AllreduceCoordinator,
        Grouping,
        Lives,
        RoundBatches,
        Enter,
        Rounds,
        Portion,
        Position,
        Plan,
        Settings,
        Cause,
        GroupPhase,
        Duty,
    ),
    part,
)
