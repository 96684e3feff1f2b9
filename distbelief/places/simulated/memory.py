"""Shard on the direct path of a virtual cluster: its machine and slice are in memory, where replicas handle pushes.

The memory outlasts the processes that play the shard for the other roles.
"""

from __future__ import annotations

from distbelief.core.conversations import initialising
from distbelief.core.effects import Effect, Payload
from distbelief.core.events import Event
from distbelief.runtime import direct
from distbelief.server.shard import Shard
from distbelief.transport.virtual import VirtualMemory, VirtualNetwork


class ShardInMemory:
    """Machine that one process of a shard plays.

    `before` is the machine of the previous process. If that held its parameters, this one continues with its shard.
    """

    def __init__(
        self, network: VirtualNetwork, shard: Shard, incarnation: int, before: ShardInMemory | None = None
    ) -> None:
        self._incarnation = incarnation
        self._goes_on = before is not None and not before.shard.waits()
        self.shard: Shard = before.shard if before is not None and self._goes_on else shard
        if not self._goes_on:
            made = VirtualMemory(network, shard.role, direct.DIRECT, direct.ANSWERS, self.shard.may_take, shard.handle)
            network.memories[shard.role] = made
        self._memory = network.memories[shard.role]

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Handle one event, then the replicas' messages that had to wait for it."""
        if self._goes_on and isinstance(event, initialising.Restore):
            effects = self.shard.begin_life(self._incarnation)
        else:
            effects = self.shard.handle(sender, event, payload)
        self._memory.look()
        return effects
