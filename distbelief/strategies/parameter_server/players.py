"""Who plays the roles of a job on a parameter server."""

from __future__ import annotations

from functools import partial

from distbelief.replica.downpour import Downpour
from distbelief.replica.vectors import Vectors
from distbelief.server.coordinator import Coordinator
from distbelief.server.shard import Shard
from distbelief.server.slice import PhantomSlice, TorchSlice
from distbelief.server.standby import Standby
from distbelief.strategies.players import COORDINATOR_STATE, Players, Servers
from distbelief.strategies.served import served_part


def _replica(role: str, vectors: Vectors, samples: int, incarnation: int) -> Downpour:
    return Downpour(role, vectors, samples, incarnation=incarnation)


PLAYERS = Players(
    Coordinator,
    (Coordinator, *COORDINATOR_STATE),
    partial(served_part, story=_replica),
    servers=Servers(Shard, Standby, TorchSlice, PhantomSlice, _replica),
)
