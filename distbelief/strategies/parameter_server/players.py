"""Players of parameter servers."""

from __future__ import annotations

from distbelief.coordination.coordinator import Coordinator
from distbelief.coordination.portion_work import PortionWork
from distbelief.coordination.shard_holders import ShardHolders
from distbelief.core.portions import StartingPoint
from distbelief.core.settings import Settings
from distbelief.replica.downpour import DownpourReplica
from distbelief.runtime.player import PlayedRole
from distbelief.server.shard import Shard
from distbelief.server.slice import PhantomSlice, slice_of
from distbelief.server.standby import Standby
from distbelief.strategies.context import Context
from distbelief.strategies.players import COORDINATOR_STATE, Players, Servers
from distbelief.strategies.served import served


def coordinator(settings: Settings, evaluator: bool, start: StartingPoint) -> Coordinator:
    """Return a coordinator whose shards hold the parameters, and which deals portions."""
    return Coordinator(settings, evaluator, start, ShardHolders(), PortionWork())


def replica(context: Context) -> PlayedRole:
    """Return a replica that pushes and fetches."""
    role, vectors, samples, incarnation = context.role, context.vectors, context.samples, context.incarnation
    return served(context, DownpourReplica(role, vectors, samples, incarnation, context.split, context.loop))


PLAYERS = Players(
    coordinator,
    COORDINATOR_STATE,
    replica,
    servers=Servers(Shard, Standby, slice_of, PhantomSlice),
)
