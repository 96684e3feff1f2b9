"""Sandblaster: batch methods, such as L-BFGS, on a parameter server (Dean et al. 2012, section 4.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.strategies.base import Served, Splittable, Virtual
from distbelief.strategies.sandblaster.settings import Descent

if TYPE_CHECKING:
    from distbelief.strategies.players import Players


SEARCHED = "its line search finds each step"


@dataclass(frozen=True)
class Sandblaster(Descent, Splittable, Served):
    """Replicas compute the gradient of large batches in small portions, and the shards step by L-BFGS.

    >>> Sandblaster(2, batch_size=40).sums
    ('g.head', 'g.middle', 'g.tail')
    """

    name: ClassVar[str] = "sandblaster"
    meaningless: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("data", "order"), "a batch is summed over all replicas: use downpour"),
        "script": "it evaluates a batch as often as its line search needs, which no loop can: give it a task",
        "epochs": "it counts --iterations",
        "batch_size": "set the strategy's own, with --portion-size",
        **dict.fromkeys(("lr_schedule", "lr_steps", "lr_gamma", "lr_power", "warmup", "warmup_epochs"), SEARCHED),
        "fixed_point": "its line search needs the gradient of the very loss, and updates are not rounded; use downpour",
        "clip_norm": "its line search bounds each step",
        "drop_last": "a batch is the sum of its portions, of any size",
    }

    @classmethod
    def players(cls) -> Players:
        from distbelief.strategies.sandblaster.players import PLAYERS

        return PLAYERS

    def phantom(self, settings: Settings) -> Settings:
        """Return settings without a search: where nothing is computed there is no loss."""
        return dataclasses.replace(settings, strategy=self.with_options(line_search="none", tolerance=0.0))

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        super().check_virtual(settings, cluster)
        if cluster.phantom and self.tolerance not in (type(self).tolerance, 0):
            raise UsageError(
                f"--tolerance {self.tolerance}: --phantom computes no gradient to compare it with; leave one of them "
                "off"
            )
