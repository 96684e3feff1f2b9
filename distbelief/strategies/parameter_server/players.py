"""Who plays the roles of a job on a parameter server."""

from __future__ import annotations

from distbelief.coordination.coordinator import Coordinator
from distbelief.replica.downpour import DownpourReplica
from distbelief.runtime.player import Part
from distbelief.server.shard import Shard
from distbelief.server.slice import PhantomSlice, TorchSlice
from distbelief.server.standby import Standby
from distbelief.strategies.context import Context
from distbelief.strategies.players import COORDINATOR_STATE, Players, Servers
from distbelief.strategies.served import served


def replica(context: Context) -> Part:
    """What a replica plays."""
    role, vectors, samples, incarnation = context.role, context.vectors, context.samples, context.incarnation
    return served(context, DownpourReplica(role, vectors, samples, context.batch_size, context.scripted, incarnation))


PLAYERS = Players(
    Coordinator,
    (Coordinator, *COORDINATOR_STATE),
    replica,
    servers=Servers(Shard, Standby, TorchSlice, PhantomSlice),
)
