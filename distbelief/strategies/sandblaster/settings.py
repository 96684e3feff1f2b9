"""Options of batch methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from distbelief.core.consistency import ANSWER, Action, Policy, Verdict
from distbelief.core.settings import Settings, StrategyOptions, among, at_least
from distbelief.errors import UsageError

METHODS = (LBFGS, CONJUGATE, STEEPEST) = ("lbfgs", "cg", "gradient")
LINE_SEARCHES = ("wolfe", "none")

PARTS = ("g",)
"""Name of the sum of a batch's gradients, if it is the whole training set."""
OVERLAPPING = ("g.head", "g.middle", "g.tail")
"""Names of the sums of a batch that shares its head with the batch before and its tail with the next."""
HISTORY_LIMIT = 100
"""Largest number of curvature pairs."""


class EvaluationPolicy(Policy):
    """Policy by which parameters are fetched for an evaluation that has begun; `floor` is its number."""

    def fetch(self, who: str, tick: int) -> Verdict:
        return ANSWER if tick <= self.floor else Verdict(Action.HOLD, f"evaluation {tick} has not begun")


@dataclass(frozen=True)
class Descent(StrategyOptions):
    """Options of a batch method, and of how a batch is divided."""

    one_moment: ClassVar[bool] = True
    unit: ClassVar[str] = "iteration"
    slots: ClassVar[int] = 2
    """Number of a replica's gradient vectors: one is computed while the other is sent."""
    spelled: ClassVar[Mapping[str, str]] = {
        "epochs": "iterations",
        "batch_size": "portion_size",
        "batch": "batch_size",
    }

    iterations: int = 100
    """Iterations to do; --evaluate-every and --checkpoint-every count them."""
    batch_size: int = 0
    """Samples in a batch; 0 takes all. Consecutive batches overlap; what they share shows the curvature."""
    overlap: float = 0.25
    """With --batch-size, the fraction of a batch that is shared with the next."""
    portion_size: int = 500
    """Samples in a portion, whose gradient is computed at once."""
    send_every: int = 4
    """Portions whose gradients are summed into one work unit, which is dealt and sent as a whole."""
    backup_portions: int = 1
    """Other replicas that get the same work unit near the end of a batch; the first result counts."""
    method: str = "lbfgs"
    """lbfgs, cg (nonlinear conjugate gradient) or gradient (steepest descent)."""
    history: int = 10
    """With --method lbfgs, the number of curvature pairs; each is two vectors on the shards."""
    line_search: str = "wolfe"
    """wolfe (strong conditions, cubic interpolation), or none (each step is --step)."""
    step: float = 1.0
    """The first step that a search tries along an L-BFGS direction; without a search, every step."""
    weight_decay: float = 0.0
    """Half of it times the squared norm of the parameters is added to the loss."""
    tolerance: float = 1e-7
    """The job ends when no component of the gradient is larger than this."""
    deterministic: bool = False
    """Sum work units in order, so that the result has the same bits in every schedule."""

    def policy(self, settings: Settings, rules: bool) -> Policy:
        return EvaluationPolicy()

    def check(self, settings: Settings) -> None:
        among("method", self.method, METHODS)
        among("line search", self.line_search, LINE_SEARCHES)
        at_least(self, 1, ("history", "send_every"), {})
        at_least(self, 0, ("backup_portions", "batch_size", "weight_decay", "tolerance"), {})
        if self.history > HISTORY_LIMIT:
            raise UsageError(
                f"--history {self.history}: must be at most {HISTORY_LIMIT}: each pair is two vectors on the shards"
            )
        if not 0 < self.step < float("inf"):
            raise UsageError(f"--step {self.step}: must be more than 0")
        if not 0 < self.overlap <= 0.5:
            raise UsageError(
                f"--overlap {self.overlap}: is the fraction of a batch that is shared with the next, more than 0 and "
                "at most 0.5"
            )
        if self.overlap != type(self).overlap and not self.batch_size:
            raise UsageError(
                f"--overlap {self.overlap}: each batch is the whole training set: set --batch-size, or leave it off"
            )
        if self.history != type(self).history and self.method != LBFGS:
            raise UsageError(
                f"--history {self.history}: is for --method lbfgs, and --method {self.method} has no curvature pairs: "
                "leave it off"
            )

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the vectors into which a batch's gradient is summed."""
        return OVERLAPPING if self.batch_size else PARTS
