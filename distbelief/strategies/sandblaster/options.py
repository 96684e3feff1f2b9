"""Sandblaster: batch methods on the same shards, L-BFGS above all (Dean et al. 2012, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from distbelief.core import roles
from distbelief.core.descent import Descent
from distbelief.core.values import Checked


@dataclass(frozen=True)
class Sandblaster(Checked):
    """Replicas compute the gradient of large batches in small portions, and the shards step along what L-BFGS makes of it.

    >>> Sandblaster(history=5).implied["descent"].history
    5
    """

    name: ClassVar[str] = "sandblaster"
    consistency: ClassVar[str] = "sandblaster"
    served: ClassVar[bool] = True
    """Whether there are replicas, and shards that serve them."""
    without: ClassVar[tuple[str, ...]] = (
        "epochs", "batch_size", "drop_last", "lr_schedule", "lr_steps", "lr_gamma", "lr_power", "warmup", "warmup_epochs", "clip_norm",
    )  # fmt: skip
    """What of a job means nothing here."""

    replicas: int = 2
    """Copies of the model, each in its own process."""
    shards: int = 2
    """Server processes that share the parameters, and the vectors of the method."""
    iterations: int = 100
    """Iterations after which it ends; --evaluate-every and --checkpoint-every count them."""
    batch_size: int = 0
    """Samples in a batch; 0 is all of them. Consecutive batches overlap, and what they share tells the curvature."""
    overlap: float = 0.25
    """With --batch-size, the fraction of a batch that the next one shares."""
    portion_size: int = 500
    """Samples whose gradient is computed at a time."""
    send_every: int = 4
    """Portions whose gradients are summed into one bundle, which is dealt, sent and counted as one."""
    backup_portions: int = 1
    """How many more replicas are dealt what one has not done near the end of a batch; the first result counts."""
    method: str = "lbfgs"
    """lbfgs, cg (nonlinear conjugate gradient) or gradient (steepest descent)."""
    history: int = 10
    """With --method lbfgs, the curvature pairs that it remembers; each is two vectors on the shards."""
    line_search: str = "wolfe"
    """wolfe (strong conditions, cubic interpolation), backtracking, or none: every step is --step."""
    step: float = 1.0
    """The first step that a search tries, along an L-BFGS direction, or the only one."""
    damping: bool = False
    """Mend a curvature pair that tells too little curvature (Powell), rather than leave it out."""
    weight_decay: float = 0.0
    """Adds half of it times the squared norm of the parameters to the loss."""
    tolerance: float = 1e-7
    """The job is done when no component of the gradient is larger."""
    deterministic: bool = False
    """Sum bundles in the order of their numbers: the same bits, however they are scheduled."""
    restarts: int = field(default=3, kw_only=True)
    """Times that each replica, shard or standby, or the coordinator, that died is started anew."""

    standby: int = field(default=0, kw_only=True)
    """1: every shard has a standby process that holds all its vectors, and takes its place when it dies; nobody goes back, once it was sent them."""

    @property
    def implied(self) -> dict[str, Any]:
        """The settings that these options make, beside those of their own names: an epoch is an iteration, a minibatch a portion."""
        own = {name: getattr(self, name) for name in Descent.__struct_fields__ if name != "batch"}
        return {"epochs": self.iterations, "batch_size": self.portion_size, "descent": Descent(**own, batch=self.batch_size)}

    def cast(self) -> tuple[str, ...]:
        """The roles of a job, beside the evaluator."""
        standbys = map(roles.standby, range(self.shards if self.standby else 0))
        return (*map(roles.replica, range(self.replicas)), roles.COORDINATOR, *map(roles.shard, range(self.shards)), *standbys)
