"""The settings of a job that trains in large batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from distbelief.core.consistency import ANSWER, Action, Policy, Verdict
from distbelief.core.settings import Settings, StrategySettings
from distbelief.errors import UsageError, unknown

METHODS = ("lbfgs", "cg", "gradient")
LINE_SEARCHES = ("wolfe", "none")

PARTS = ("g",)
"""The vector that a whole batch's gradient is summed into."""
OVERLAPPING = ("g.head", "g.middle", "g.tail")
"""Those of a batch that shares its head with the batch before and its tail with the next."""


class EvaluationPolicy(Policy):
    """Parameters are fetched for an evaluation, once it has begun; `floor` is its number."""

    def fetch(self, who: str, tick: int) -> Verdict:
        """Hold the fetch for an evaluation that is still to come."""
        return ANSWER if tick <= self.floor else Verdict(Action.HOLD, f"evaluation {tick} has not begun")


class Descent(StrategySettings, frozen=True, kw_only=True):
    """Settings of Sandblaster's descent, and of how a batch is shared out; `strategies/sandblaster/options.py`
    describes each field.
    """

    deals_to_any: ClassVar[str] = "sums a batch over whoever computes its portions: use downpour or synchronous"
    one_moment: ClassVar[bool] = True
    slots: ClassVar[int] = 2
    unit: ClassVar[str] = "iteration"
    spelled: ClassVar[Mapping[str, str]] = {"epochs": "iterations", "batch_size": "portion_size"}

    method: str = "lbfgs"
    batch: int = 0
    overlap: float = 0.25
    history: int = 10
    line_search: str = "wolfe"
    step: float = 1.0
    weight_decay: float = 0.0
    tolerance: float = 1e-7
    send_every: int = 4
    backup_portions: int = 1
    deterministic: bool = False

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Parameters are fetched for an evaluation."""
        return EvaluationPolicy()

    def check(self, settings: Settings) -> None:
        """Refuse what no job can have.

        Raises:
            UsageError: naming the option, its value and what it may be.
        """
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        if self.line_search not in LINE_SEARCHES:
            raise unknown("line search", self.line_search, LINE_SEARCHES)
        for name, least in {
            "history": 1,
            "send_every": 1,
            "backup_portions": 0,
            "batch": 0,
            "weight_decay": 0,
            "tolerance": 0,
        }.items():
            value = getattr(self, name)
            if not least <= value < (1 << 63 if isinstance(value, int) else float("inf")):
                shown = {"batch": "batch-size"}.get(name, name.replace("_", "-"))
                raise UsageError(f"--{shown} {value}: must be {least} or more, and fit into 64 bits")
        if self.history > HISTORY_LIMIT:
            raise UsageError(
                f"--history {self.history}: must be at most {HISTORY_LIMIT}; every pair is two vectors on the shards"
            )
        if not 0 < self.step < float("inf"):
            raise UsageError(f"--step {self.step}: must be more than 0")
        if not 0 < self.overlap <= 0.5:
            raise UsageError(
                f"--overlap {self.overlap}: is the fraction of a batch that the next one shares, more than 0 and at "
                "most 0.5"
            )
        if self.overlap != Descent().overlap and not self.batch:
            raise UsageError(
                f"--overlap {self.overlap}: is of consecutive batches, and each is the whole training set here: set "
                "--batch-size, or leave it off"
            )
        if self.history != Descent().history and self.method != "lbfgs":
            raise UsageError(
                f"--history {self.history}: counts the curvature pairs of lbfgs, and --method {self.method} has none: "
                "leave it off"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The vectors that the gradient of a batch is summed into."""
        return OVERLAPPING if self.batch else PARTS


HISTORY_LIMIT = 100
"""Most curvature pairs."""
