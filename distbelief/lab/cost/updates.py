"""What an update takes and keeps, with each of the server's optimizers."""

from __future__ import annotations

import time

import msgspec
import torch
from torch.utils._pytree import tree_leaves

from distbelief.core.optimizer import Optimizer
from distbelief.lab.cost.profile import clock_of
from distbelief.places.evaluate import threads
from distbelief.server.optimizers import build, stepper

MEASURED = 1 << 24
"""Most elements that are stepped: beyond the caches, an update takes as many times longer as there are more."""
STEPS, SECONDS = 5, 0.05
"""Least steps of which the lower quartile counts, and for how long there are more."""


class UpdateCost(msgspec.Struct, frozen=True):
    """One optimizer."""

    optimizer: str
    seconds: float
    """Of an update of all parameters."""
    state: int
    """Bytes that it keeps beside them."""


def measure(optimizer: Optimizer, elements: int, device: str = "cpu") -> UpdateCost:
    """Step a flat parameter of float32, as a shard does, with one thread.

    Args:
        optimizer: that steps.
        elements: of the model's parameters.
        device: where they are.

    >>> from distbelief.core.optimizer import optim
    >>> measure(optim("adam"), 1000).state >= 2 * 4 * 1000
    True
    """
    held = min(max(1, elements), MEASURED)
    parameter = torch.zeros(held, device=device)
    parameter.grad = torch.full_like(parameter, 1e-3)
    step, taken = stepper(made := build(optimizer, [{"params": [parameter]}])), list[float]()
    clock, begin = clock_of(device), time.perf_counter()
    with threads(1), torch.no_grad():
        step()
        while len(taken) < STEPS or time.perf_counter() < begin + SECONDS:
            start = clock.mark()
            step()
            taken += clock.between([start, clock.mark()])
    kept = sum(leaf.nbytes for leaf in tree_leaves(list(made.state.values())) if isinstance(leaf, torch.Tensor))
    scale = elements / held
    return UpdateCost(optimizer.name, sorted(taken)[len(taken) // 4] * scale, round(kept * scale))
