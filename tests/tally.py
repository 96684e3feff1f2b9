"""A task whose parameters say which minibatches are in them, whoever computed one."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import torch
from torch import Tensor, nn

from distbelief.core.optimizer import Optimizer
from distbelief.tasks.order import key
from distbelief.tasks.task import Metric, Task, as_data

RATE = 0.5
"""The learning rate under which `times` reads a tally."""
ADAGRAD = Optimizer("adagrad", RATE)
"""The optimizer under which `times` reads a tally: whatever the weight of a gradient, the first moves its parameter by
the rate, the next by less.
"""
NAME = "tally"
"""The name of the parameter that is a tally."""


class Tallied(nn.Module):
    """A model, and beside it a number for each minibatch of each epoch, which has a gradient (1) where that minibatch
    is computed.

    A minibatch is known by its chance, which is keyed by the seed, the epoch and its number.

    Args:
        model: whose outputs are given, with what the tally adds to the loss.
        samples: of an epoch.
        batch_size: of the job, as are the epochs and the seed.
        epochs: that are trained.
        seed: that the chance of a minibatch is keyed by.
    """

    def __init__(self, model: nn.Module, samples: int, batch_size: int, epochs: int, seed: int) -> None:
        super().__init__()
        self.model = model
        self.sizes = torch.tensor([min(batch_size, samples - start) for start in range(0, samples, batch_size)]).expand(
            epochs, -1
        )
        """Samples in each minibatch."""
        self.tally = nn.Parameter(torch.zeros(self.sizes.shape, dtype=next(model.parameters()).dtype))
        self._places = {key(seed, *place): place for place in itertools.product(*map(range, self.sizes.shape))}

    def forward(self, inputs: Tensor) -> tuple[object, Tensor]:
        """What the model makes of the inputs, and the number of this minibatch; of an evaluation, 0."""
        place = self._places[torch.initial_seed()] if self.training else None
        return self.model(inputs), self.tally.new_zeros(()) if place is None else self.tally[place]


def tallied(task: Task, batch_size: int, epochs: int = 1, seed: int = 0) -> Task:
    """The same task with a tally in its model."""
    samples = len(as_data(task.train()))
    return dataclasses.replace(
        task,
        model=lambda: Tallied(task.model(), samples, batch_size, epochs, seed),
        loss=lambda output, target: task.loss(output[0], target) + output[1],
        metric={name: partial(_first, metric) for name, metric in task.metrics.items()} or None,
    )


def _first(metric: Metric, output: tuple[object, object], target: object) -> Tensor | float:
    return metric(output[0], target)


def times(tally: Tensor) -> Tensor:
    """How often each minibatch of each epoch is in a tally that was stepped by `ADAGRAD`: 0, 1, or 2 and more."""
    moved = -tally.detach() / RATE
    if bool((moved < 0).any()) or bool(((moved > 1e-6) & (moved < 1 - 1e-3)).any()):
        raise AssertionError(f"a tally moved by {moved.tolist()} rates, which no number of Adagrad's steps would")
    return (moved > 1e-6).long() + (moved > 1 + 1e-3).long()
