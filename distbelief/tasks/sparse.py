"""Parameters with their own rules: those without weight decay, and those with sparse gradients."""

from __future__ import annotations

import torch
from torch import nn

from distbelief.core.optimizer import Optimizer, ParameterGroup
from distbelief.core.settings import Settings
from distbelief.errors import TrainingError, UsageError
from distbelief.sharding.layout import Layout

SPARSE = ("sgd", "adagrad")
"""Optimizers whose rule in torch touches only the rows of a sparse gradient."""
DENSE = ("momentum", "weight_decay", "nesterov", "maximize")
"""Options with which these optimizers touch other rows too."""


def check_dense(gradient: torch.Tensor | None) -> None:
    """Refuse a sparse gradient of a module that was not declared sparse."""
    if gradient is not None and gradient.is_sparse:
        raise TrainingError(
            "a gradient is sparse, and its module does not declare it (sparse=True of an embedding): make it dense"
        )


def check_rows(layout: Layout, settings: Settings) -> None:
    """Refuse options that sparse gradients do not allow."""
    optimizer = settings.optimizer
    for entry in layout.trained_entries:
        if not layout.is_sparse(entry):
            continue
        extra = next((option for option in DENSE if optimizer.options.get(option)), "")
        if optimizer.name not in SPARSE or extra:
            what = f"option {extra}" if optimizer.name in SPARSE else f"--optimizer {optimizer.name}"
            raise UsageError(
                f"{what}: the gradients of {entry.tensor.name!r} are sparse, and no such rule of torch leaves "
                f"other rows alone; use plain {' or '.join(SPARSE)}, or make the embedding with sparse=False"
            )
        if settings.clip_norm:
            raise UsageError(
                f"--clip-norm {settings.clip_norm}: torch clips no sparse gradients, and {entry.tensor.name!r} has "
                "them; leave it off"
            )


NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules whose parameters do not decay; the first includes instance norms."""


def groups_of(module: nn.Module, optimizer: Optimizer) -> list[ParameterGroup] | None:
    """Return the parameter groups of a module for `torch.optim`, or None if all parameters decay.

    Biases and normalisations are a group without weight decay (Goyal et al. 2017, section 5.3).

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
