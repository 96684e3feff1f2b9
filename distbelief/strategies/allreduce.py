"""Allreduce: without servers, replicas add up gradients and each makes the same update (Goyal 2017, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.settings import Settings
from distbelief.core.values import Given
from distbelief.errors import UsageError
from distbelief.fabric.order import check_order
from distbelief.schedules.allreduce import PLACED, check_algorithm, check_hosts
from distbelief.strategies.base import LocalMachine, Scaled, Splittable, Virtual
from distbelief.strategies.grouped.settings import Reducing

if TYPE_CHECKING:
    from distbelief.strategies.players import Players


@dataclass(frozen=True)
class Allreduce(Reducing, Splittable, Scaled):
    """Rounds without a server: each replica holds the whole model, and all make the same update with the gradient of
    all their minibatches.
    """

    name: ClassVar[str] = "allreduce"
    meaningless: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("data", "order"), "the minibatches of a round are dealt to its whole group: use synchronous"
    )

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer of every replica."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_algorithm(self.algorithm, PLACED)

    @property
    def parts(self) -> int:
        """Parts of a checkpoint: one, since each replica holds everything, or one for each partition."""
        return max(1, self.partitions)

    @classmethod
    def players(cls) -> Players:
        from distbelief.strategies.grouped.players import PLAYERS

        return PLAYERS

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        return carrier == "shared"

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        if machine.listen and not machine.encrypted:
            raise UsageError(
                f"--listen {machine.listen}: guests of {self.name} need encrypted links: leave --insecure off; at an "
                "address of this machine alone, add --tls"
            )
        check_hosts(self.algorithm, self.per_host, auto=machine.encrypted)
        if machine.carrier == "shared":
            check_order("--transport shared: gradients that replicas add up", "use --transport tcp")
            if self.algorithm not in (*PLACED, "direct"):
                raise UsageError(
                    f"--algorithm {self.algorithm}: shared memory needs no algorithm, as nothing is sent: leave it "
                    "off, or use --transport tcp"
                )
        if machine.encrypted and self.algorithm == "native":
            raise UsageError(
                "--algorithm native is torch's process group, which encrypts nothing: choose another, or auto"
            )
        super().check_machine(settings, machine)

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        if self.algorithm == "native":
            raise UsageError(
                "--algorithm native is that of a real network's library, which is not simulated: choose another, or "
                "auto"
            )
        hosts = cluster.host_replicas is not None
        if cluster.local and not (hosts or self.per_host):
            raise UsageError(
                "--network local-latency and local-bandwidth are of links inside a host: set --hosts or --per-host"
            )
        if not (cluster.local or hosts):
            check_hosts(self.algorithm, self.per_host, auto=True)
