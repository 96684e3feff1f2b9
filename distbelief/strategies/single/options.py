"""Single: the plain PyTorch loop in one process, the baseline of every comparison; or one model over several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from distbelief.core import roles
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.settings import Holder, Settings
from distbelief.core.values import Given
from distbelief.errors import UsageError
from distbelief.strategies.base import LocalMachine, Partitioned, Scaled, Virtual

if TYPE_CHECKING:
    from distbelief.strategies.context import Loop, LoopContext
    from distbelief.strategies.players import Players


@dataclass(frozen=True)
class Single(Partitioned, Scaled):
    """The plain PyTorch loop in one process, without servers or messages. With --partitions, one model over several
    processes, each of which steps its part.
    """

    name: ClassVar[str] = "single"
    held_by: ClassVar[Holder] = Holder.REPLICAS
    one_moment: ClassVar[bool] = True
    meaningless: ClassVar[Mapping[str, str]] = {
        "data": "its one replica has all the data: use downpour or synchronous",
        "script": "it has no replicas that could run one: run it with python",
    }

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer of the loop."""

    @property
    def parts(self) -> int:
        """Parts of a checkpoint: one, or one for each partition."""
        return max(1, self.partitions)

    def roles(self, measured: bool) -> tuple[str, ...]:
        """Return a single role, or the partitions of a split model and their coordinator."""
        return (roles.SINGLE,) if self.partitions == 1 else super().roles(measured)

    @classmethod
    def players(cls) -> Players:
        """Return the players of a group, of which a split model is the only replica."""
        from distbelief.strategies.grouped.players import PLAYERS

        return PLAYERS

    @classmethod
    def loop(cls, context: LoopContext) -> Loop:
        from distbelief.strategies.single.loop import SingleLoop

        return SingleLoop(context)

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        if self.partitions > 1:
            super().check_machine(settings, machine)
            return
        if machine.transport != "shared":
            raise UsageError(
                f"--transport {machine.transport}: strategy {self.name} is one process and sends nothing: leave it off"
            )
        if machine.listen:
            raise UsageError(f"--listen {machine.listen}: strategy {self.name} has no replicas that could join")

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        if self.partitions > 1:
            super().check_virtual(settings, cluster)
            return
        if cluster.sends:
            raise UsageError(
                f"--network, --topology and delays mean nothing to strategy {self.name}, which sends nothing: leave "
                "them off"
            )
        if cluster.messages:
            raise UsageError(
                f"--handling message means nothing to strategy {self.name}, which gets no messages: leave it off"
            )
        if cluster.host_replicas is not None:
            raise UsageError(f"--hosts means nothing to strategy {self.name}, which is a single role: leave it off")
        if cluster.faulty:
            raise UsageError(
                f"--faults crash and restart mean nothing to strategy {self.name}, a single process: leave them off"
            )
