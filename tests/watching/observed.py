"""Runs under observation, with `Rules` beside those in which nobody waits for anybody."""

from __future__ import annotations

import torch

from distbelief.core import roles
from distbelief.core.settings import Holder
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.testing import simulations
from watching.rules import Rules


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


def mapping_of(simulation: Simulation) -> torch.Tensor:
    """The parameters and buffers that replicas share, as they are: 1-D uint8."""
    held = [shard.held.moving() for shard in simulation.shards]
    return held[0] if len(held) == 1 else torch.cat(held)  # type: ignore[arg-type,return-value]  # no phantoms
