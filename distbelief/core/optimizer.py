"""Optimizers by name: what a user asks for, and what is asked of a job that has it. What they do is torch's, or in
`server/layerwise`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from distbelief.core.values import admit, check_fields, shown
from distbelief.errors import UsageError, unknown

ParameterGroup = Mapping[str, Any]
"""Parameters, under `params`, and what is set for them alone, as `torch.optim` takes it."""


class GroupOption(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An option of a parameter group as a script has it: of the rate, its factor; several numbers of a pair."""

    group: int
    name: str
    values: tuple[float, ...]


class Optimizer(msgspec.Struct, frozen=True):
    """An optimizer by name, its learning rate and its other options."""

    name: str = "sgd"
    lr: float = 0.1
    options: dict[str, float | bool | tuple[float, ...]] = {}
    decay_exempt: bool = False
    """True where weight decay leaves biases and normalisations alone."""

    def check(self, norms: bool) -> None:
        """Refuse one that a job cannot have, where `norms` says whether it can have those of whole layers.

        Raises:
            UsageError: naming the option, its value and the remedy.
        """
        if not 0 <= self.lr < float("inf"):
            raise UsageError(f"--lr {self.lr}: must be 0 or more, and finite")
        for name, value in self.options.items():
            if not all(-math.inf < number < math.inf for number in (value if isinstance(value, tuple) else (value,))):
                raise UsageError(f"--optimizer-options {name}={value}: must be finite")
        if self.decay_exempt and not self.options.get("weight_decay", self.name == "adamw"):
            raise UsageError(
                "--decay-exempt leaves biases and normalisations out of the weight decay, and there is none: set "
                "--weight-decay"
            )
        if self.name in LAYERWISE and not norms:
            whole = "needs the norms of whole layers, which shards tell each other in rounds only"
            raise UsageError(f"--optimizer {self.name} {whole}: use strategy synchronous or allreduce, or --shards 1")


LEARNING_RATES = {
    "sgd": 0.1, "momentum": 0.02, "nesterov": 0.02, "adagrad": 0.02, "adadelta": 1.0, "rmsprop": 0.001,
    "adam": 0.001, "adamw": 0.001, "nadam": 0.001, "radam": 0.001, "adamax": 0.002, "lars": 2.0, "lamb": 0.002,
}  # fmt: skip
"""The learning rate of each optimizer where none is given."""

LAYERWISE = ("lars", "lamb")
"""Optimizers that need the norms of whole layers."""


def optim(
    name: str, lr: float | None = None, *, decay_exempt: bool = False, **options: float | bool | tuple[float, ...]
) -> Optimizer:
    """An optimizer by name; other options are those of its class, weight decay may leave biases and normalisations
    alone.

    Raises:
        UsageError: an unknown name, with the nearest known one.

    >>> optim("adagrad", lr=0.05, eps=1e-8)
    Optimizer(name='adagrad', lr=0.05, options={'eps': 1e-08}, decay_exempt=False)
    """
    if admit(name, str, f"optim({shown(name)})") not in LEARNING_RATES:
        raise unknown("optimizer", name, LEARNING_RATES)
    admit(lr, float | None, f"Optimizer(lr={shown(lr)})")
    optimizer = Optimizer(name, LEARNING_RATES[name] if lr is None else lr, options, decay_exempt)
    check_fields(optimizer)
    return optimizer
