"""What strategies have in common whose every update is of one global batch: the learning rate can be given for a smaller one."""

from __future__ import annotations

from dataclasses import dataclass, field

from distbelief.core.values import Checked


@dataclass(frozen=True)
class Scaled(Checked):
    """A strategy whose learning rate can grow with its global batch (Goyal et al. 2017, section 2.1)."""

    lr_scaling: str = field(default="none", kw_only=True)
    """How --lr, which is for --base-batch, grows with the global batch (replicas x batch size x minibatches of each in a round) where that is k times
    as large: linear (times k), sqrt (times its root), or none."""
    base_batch: int = field(default=0, kw_only=True)
    """The global batch that --lr is for; --lr-scaling linear and sqrt need it."""
