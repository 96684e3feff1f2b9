"""Delayed Nesterov (Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling"), which torch lacks.

Momentum on changes that come one by one, each out of date, repeats old directions. So each change moves the parameters
at once, by its share, and the momentum takes the mean of a whole period of them, one from each replica.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT


class DelayedNesterov(torch.optim.Optimizer):
    """SGD with a Nesterov momentum that is updated once in a period of `period` steps.

    Args:
        lr: the rate.
        momentum: of a period.
        share: share of the momentum in each step but the last of a period (the paper's c): 0, or 1 / period for even
            steps.

    A parameter group's `period` may change at any step, to the number of replicas that take part.

    >>> theta = torch.ones(1, dtype=torch.float64); optimizer = DelayedNesterov([theta]); positions = []
    >>> for change in (0.1, 0.2, 0.3, 0.4):
    ...     theta.grad = torch.full_like(theta, change); optimizer.param_groups[0]["period"] = 2; optimizer.step()
    ...     positions.append(round(float(theta), 6))
    >>> positions
    [0.965, 0.8005, 0.6955, 0.24995]
    """

    def __init__(self, params: ParamsT, lr: float = 0.7, momentum: float = 0.9, share: float = 0.0) -> None:
        for name, value, most in (("lr", lr, float("inf")), ("momentum", momentum, 1.0), ("share", share, 1.0)):
            if not 0 <= value <= most or value == float("inf"):
                raise ValueError(f"{name} must be from 0 to {most:g}, and finite")
        super().__init__(params, {"lr": lr, "momentum": momentum, "share": share, "period": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's optimizers also take a closure
        """Make one step with each parameter's gradient, the change of one replica."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group["lr"], group["momentum"], group["share"], group["period"])

    def _step(self, p: torch.Tensor, lr: float, momentum: float, share: float, period: int) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state.update(momentum=torch.zeros_like(p), changes=torch.zeros_like(p), arrived=torch.tensor(0.0))
        state["changes"] += p.grad
        state["arrived"] += 1
        p.add_(p.grad, alpha=-lr / period)
        if state["arrived"] < period:
            p.add_(state["momentum"], alpha=-lr * share * momentum)
            return
        # where a replica has left within the period, more changes than its new length have arrived
        state["momentum"].mul_(momentum).add_(state["changes"], alpha=1.0 / float(state["arrived"]))
        p.add_(state["momentum"], alpha=-lr * (1.0 - share * (period - 1)) * momentum)
        state["changes"].zero_()
        state["arrived"].zero_()
