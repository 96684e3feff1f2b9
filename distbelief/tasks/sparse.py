"""Gradients that are some rows of a parameter: what is refused of them where parameters are stepped one by one."""

from __future__ import annotations

import torch

from distbelief.core.settings import Settings
from distbelief.errors import TrainingError, UsageError
from distbelief.sharding.layout import Layout

SPARSE = ("sgd", "adagrad")
"""The optimizers that torch has a rule for which touches only the rows of a sparse gradient."""


def check_dense(gradient: torch.Tensor | None) -> None:
    """Refuse a gradient of whose sparsity nobody has said.

    Raises:
        TrainingError: it is sparse.
    """
    if gradient is not None and gradient.is_sparse:
        raise TrainingError(
            "a gradient is sparse whose module does not say so (sparse=True of an embedding): make it dense"
        )


def check_rows(layout: Layout, settings: Settings) -> None:
    """Refuse what cannot be done with gradients that are some rows of a parameter.

    Raises:
        UsageError: naming what, and the remedy.
    """
    optimizer = settings.optimizer
    for entry in layout.trained_entries:
        if not layout.is_sparse(entry):
            continue
        extra = next(
            (
                option
                for option in ("momentum", "weight_decay", "nesterov", "maximize")
                if optimizer.options.get(option)
            ),
            "",
        )
        if optimizer.name not in SPARSE or extra:
            what = f"option {extra}" if optimizer.name in SPARSE else f"--optimizer {optimizer.name}"
            raise UsageError(
                f"{what}: the gradients of {entry.tensor.name!r} are some of its rows, and torch has no rule for that "
                "which leaves the others alone;"
                f" use plain {' or '.join(SPARSE)}, or make the embedding with sparse=False"
            )
        if settings.clip_norm:
            raise UsageError(
                f"--clip-norm {settings.clip_norm}: torch clips no sparse gradients, and {entry.tensor.name!r} has "
                "them; leave it off"
            )
