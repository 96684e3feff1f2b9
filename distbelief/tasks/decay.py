"""Weight decay without biases and normalisations (Goyal et al. 2017, section 5.3): they are a parameter group."""

from __future__ import annotations

from torch import nn

from distbelief.core.optimizer import Optimizer, ParameterGroup

NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules none of whose parameters decay; instance norms are among the first."""


def groups_of(module: nn.Module, optimizer: Optimizer) -> list[ParameterGroup] | None:
    """The parameter groups of a module, as `torch.optim` takes them; None where all decay alike.

    >>> module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm([2, 2]))
    >>> [len(group["params"]) for group in groups_of(module, Optimizer(options={"weight_decay": 0.1},
    ...     decay_exempt=True))]
    [1, 3]
    """
    if not optimizer.decay_exempt:
        return None
    normalising = {
        id(p) for part in module.modules() if isinstance(part, NORMALISATIONS) for p in part.parameters(recurse=False)
    }
    decaying: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for parameter in module.parameters():
        (exempt if parameter.ndim < 2 or id(parameter) in normalising else decaying).append(parameter)
    groups: list[ParameterGroup] = [{"params": decaying}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
