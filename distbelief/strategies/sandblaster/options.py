"""Sandblaster: batch methods on the same shards, L-BFGS above all (Dean et al. 2012, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec

from distbelief.core.settings import Settings, StrategySettings
from distbelief.errors import UsageError
from distbelief.strategies.base import Served, Splittable
from distbelief.strategies.sandblaster.settings import Descent

SEARCHED = "its line search finds each step"

if TYPE_CHECKING:
    from distbelief.strategies.players import Players


@dataclass(frozen=True)
class Sandblaster(Splittable, Served):
    """Replicas compute the gradient of large batches in small portions, and the shards step along what L-BFGS makes of
    it.

    >>> Sandblaster(history=5).settings()["history"]
    5
    """

    name: ClassVar[str] = "sandblaster"
    own: ClassVar[type[StrategySettings]] = Descent
    counts: ClassVar[str] = "iterations"
    meaningless: ClassVar[Mapping[str, str]] = {
        "epochs": "it counts --iterations",
        "batch_size": "give the strategy its own, beside --portion-size",
        **dict.fromkeys(("lr_schedule", "lr_steps", "lr_gamma", "lr_power", "warmup", "warmup_epochs"), SEARCHED),
        "fixed_point": "its line search needs a gradient that fits the loss, and no update is rounded; use downpour",
        "clip_norm": "its line search bounds each step",
        "drop_last": "a batch is the sum of its portions, of whatever size",
    }
    phantom_lacks: ClassVar[Mapping[str, str]] = {"tolerance": "that could be so small"}

    iterations: int = 100
    """Iterations after which it ends; --evaluate-every and --checkpoint-every count them."""
    batch_size: int = 0
    """Samples in a batch; 0 is all of them. Consecutive batches overlap, and what they share tells the curvature."""
    overlap: float = 0.25
    """With --batch-size, the fraction of a batch that the next one shares."""
    portion_size: int = 500
    """Samples whose gradient is computed at a time."""
    send_every: int = 4
    """Portions whose gradients are summed into one work unit, which is dealt, sent and counted as one."""
    backup_portions: int = 1
    """Further replicas that are dealt what one has not done near the end of a batch; the first result counts."""
    method: str = "lbfgs"
    """lbfgs, cg (nonlinear conjugate gradient) or gradient (steepest descent)."""
    history: int = 10
    """With --method lbfgs, the curvature pairs that it remembers; each is two vectors on the shards."""
    line_search: str = "wolfe"
    """wolfe (strong conditions, cubic interpolation), or none: every step is --step."""
    step: float = 1.0
    """The first step that a search tries, along an L-BFGS direction, or the only one."""
    weight_decay: float = 0.0
    """Adds half of it times the squared norm of the parameters to the loss."""
    tolerance: float = 1e-7
    """The job is done when no component of the gradient is larger."""
    deterministic: bool = False
    """Sum work units in the order of their numbers: the same bits, however they are scheduled."""

    def settings(self) -> dict[str, object]:
        """An epoch is an iteration, a minibatch a portion."""
        names = {"epochs": self.iterations, "batch_size": self.portion_size, "batch": self.batch_size}
        return super().settings() | names

    @classmethod
    def players(cls) -> Players:
        """Return who plays them."""
        from distbelief.strategies.sandblaster.players import PLAYERS

        return PLAYERS

    def phantom(self, settings: Settings) -> Settings:
        """There is no loss to search for."""
        own = msgspec.structs.replace(settings.own(Descent), line_search="none", tolerance=0.0)
        return msgspec.structs.replace(settings, strategy=own)

    def check_script(self) -> None:
        """Refuse every script.

        Raises:
            UsageError: saying why, and the remedy.
        """
        raise UsageError(
            f"strategy {self.name} evaluates a batch as often as its line search asks, which no loop of a script can: "
            "give it a task,"
            " distbelief train module:function sandblaster"
        )
