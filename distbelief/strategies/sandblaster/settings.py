"""Options of a job that trains in large batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from distbelief.core.consistency import ANSWER, Action, Policy, Verdict
from distbelief.core.settings import Settings, StrategyOptions, at_least
from distbelief.errors import UsageError, unknown

METHODS = ("lbfgs", "cg", "gradient")
LINE_SEARCHES = ("wolfe", "none")

PARTS = ("g",)
"""The vector that a whole batch's gradient is summed into."""
OVERLAPPING = ("g.head", "g.middle", "g.tail")
"""Those of a batch that shares its head with the batch before and its tail with the next."""
HISTORY_LIMIT = 100
"""Most curvature pairs."""


class EvaluationPolicy(Policy):
    """Parameters are fetched for an evaluation, once it has begun; `floor` is its number."""

    def fetch(self, who: str, tick: int) -> Verdict:
        """Hold the fetch for an evaluation that is still to come."""
        return ANSWER if tick <= self.floor else Verdict(Action.HOLD, f"evaluation {tick} has not begun")


@dataclass(frozen=True)
class Descent(StrategyOptions):
    """Options of a descent, and of how a batch is shared out."""

    one_moment: ClassVar[bool] = True
    unit: ClassVar[str] = "iteration"
    spelled: ClassVar[Mapping[str, str]] = {
        "epochs": "iterations",
        "batch_size": "portion_size",
        "batch": "batch_size",
    }

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
        at_least(self, 1, ("history", "send_every"), {})
        at_least(self, 0, ("backup_portions", "batch_size", "weight_decay", "tolerance"), {})
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
        if self.overlap != type(self).overlap and not self.batch_size:
            raise UsageError(
                f"--overlap {self.overlap}: is of consecutive batches, and each is the whole training set here: set "
                "--batch-size, or leave it off"
            )
        if self.history != type(self).history and self.method != "lbfgs":
            raise UsageError(
                f"--history {self.history}: counts the curvature pairs of lbfgs, and --method {self.method} has none: "
                "leave it off"
            )

    @property
    def sums(self) -> tuple[str, ...]:
        """The vectors that the gradient of a batch is summed into."""
        return OVERLAPPING if self.batch_size else PARTS
