"""Lead of each replica over the others, at the start of every step."""

from __future__ import annotations

from dataclasses import replace

from distbelief.core import roles
from distbelief.core.conversations import attendance, membership, pushing
from distbelief.core.effects import Batch, Computed
from distbelief.core.messages import Message
from distbelief.runtime.player import Answer, Player
from distbelief.testing.simulations import Observed, attach


class Lead:
    """Holds, at each step, how far its replica is ahead of each other: in pushes made, and in pushes applied."""

    def __init__(self, run: Observed, bound: float) -> None:
        self.bound, self.most, self.steps = bound, -(10**9), 0
        self.ticks: dict[str, int] = {}
        self.begun: dict[str, int] = {}
        self.lives: dict[str, int] = {}
        self.applied: dict[tuple[str, str], int] = {}
        self._network, self._run = run.simulation.network, run
        attach(self._network, self)
        for role, player in run.simulation.driver._players.items():
            if roles.is_replica(role):
                self._watch(role, player)

    def _watch(self, role: str, player: Player) -> None:
        compute, thread = player.worker.compute, self._network.endpoints[role].thread

        def watched(batch: Batch, answer: Answer) -> Computed | None:
            thread.do(0.0, self.started, role)  # once it has said what comes before
            return compute(batch, answer)

        player.worker = replace(player.worker, compute=watched)

    def sent(self, sender: str, to: str, message: Message) -> None:
        """A living role has sent a message."""
        if isinstance(message, membership.Join):
            self.ticks.pop(sender, None)
            self.applied = {key: tick for key, tick in self.applied.items() if key[0] != sender}
        elif isinstance(message, attendance.Attend) and message.tick >= 0:
            self.ticks[sender] = self.begun[sender] = message.tick
            self.lives[sender] = self._network.endpoints[sender].incarnation
        elif isinstance(message, attendance.SitOut):
            self.ticks.pop(sender, None)
        elif isinstance(message, pushing.Push) and sender in self.ticks:
            self.ticks[sender] = message.tick + 1

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """A message is about to be handled by a living role."""
        if isinstance(message, pushing.Push):
            self.applied[sender, to] = message.tick + 1

    def started(self, who: str) -> None:
        """A step begins; what a replica does in the instant of its death is nobody's."""
        if self._network.endpoints[who].closed:
            return
        plan = self._run.simulation.coordinator.plan
        shards = [roles.shard(i) for i, own in enumerate(plan.assignments) if own.moving.size]
        self.steps += 1
        for other, tick in self.ticks.items():
            endpoint = self._network.endpoints[other]  # perhaps that of its next life, which has not joined yet
            if other != who and not endpoint.closed and endpoint.incarnation == self.lives[other]:
                applied = min(max(self.begun[other], self.applied.get((other, shard), 0)) for shard in shards)
                self.most = max(self.most, self.ticks[who] - applied)
                assert self.ticks[who] - min(tick, applied) <= self.bound, (
                    f"{who} begins tick {self.ticks[who]}, {other} is at {tick}, {applied} applied"
                )
