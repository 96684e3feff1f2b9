"""Runs under observation, with `Rules` beside those in which nobody waits for anybody."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from distbelief.core import records, roles
from distbelief.core.messages import Message
from distbelief.core.settings import Holder
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.record.summary import Summary
from distbelief.testing import simulations
from distbelief.testing.accounting import Accounting
from watching.rules import Rules

Look = Callable[[str, str, Any], object]
"""What looks at a message: who sends it, to whom, and what."""


class Watcher:
    """A checker that looks at messages as they are sent, or as they are delivered: at what it overrides."""

    def sent(self, sender: str, to: str, message: Message) -> None: ...

    def delivered(self, sender: str, to: str, message: Message) -> None: ...


def unseen(*_: object) -> None: ...


class Observed(simulations.Observed):
    """A run with rules; `Accounting` knows the other consistencies too."""

    def __init__(self, job: Job, cluster: Simulated | None = None, limit: int = simulations.MESSAGE_LIMIT) -> None:
        cluster = cluster or Simulated()
        super().__init__(job, cluster, limit)
        self.rules = Rules(self._alive)
        settings = self.simulation.settings
        # where a shard goes back, `Accounting` knows what that undoes; with a standby what is said comes after the act
        fallen = any(roles.kind(crash.role) is roles.Kind.SHARD for crash in cluster.crashes)
        self._ruled = not (
            settings.policy.attended
            or settings.strategy.one_moment
            or settings.standby
            or settings.partitions > 1
            or settings.strategy.held_by is not Holder.SHARDS
            or settings.strategy.name == "hogwild"  # which pushes nothing
            or fallen
        )
        if self._ruled:
            self.watch(self.rules)

    def _alive(self, role: str, incarnation: int) -> bool:
        endpoint = self.simulation.network.endpoints[role]
        return endpoint.incarnation == incarnation and not endpoint.closed

    def run(self) -> Observed:
        """Run to the end, and hold the rules of the end."""
        super().run()
        if self._ruled:
            self.rules.finish(self.outcome, self.simulation.killed)
        return self

    def look(self, sent: Look = unseen, delivered: Look = unseen) -> None:
        """Have functions look at each message."""
        self.watch(SimpleNamespace(sent=sent, delivered=delivered))  # type: ignore[arg-type]  # a checker

    def told(self, *kinds: type[records.Record]) -> list[Any]:
        """The records of some kinds, in their order."""
        return [record for record in self.records if isinstance(record, kinds)]

    def trained(self) -> int:
        """The samples that replicas have reported."""
        return sum(record.samples for record in self.told(records.Stepped))

    def summary(self) -> dict[str, Any]:
        """What the result of a run with these records says."""
        made = Summary({})
        for record in self.records:
            made.take(0.0, record)
        return made.result()

    def accounted(self) -> Accounting:
        """Run to the end under accounts, and hold these."""
        accounting = Accounting(self)
        self.simulation.run()
        accounting.finish(self.outcome, self.simulation.killed)
        return accounting


def mapping_of(simulation: Simulation) -> torch.Tensor:
    """The parameters and buffers that replicas share, as they are: 1-D uint8."""
    held = [shard.held.moving() for shard in simulation.shards]
    return held[0] if len(held) == 1 else torch.cat(held)  # type: ignore[arg-type,return-value]  # no phantoms
