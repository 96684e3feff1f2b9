"""A step of flat parameters that leaves some tensors in them out: those without a gradient, which plain torch skips.

A flat parameter is stepped as a whole, and what was left out is put back. torch counts the steps of a parameter
(`step`, by which Adam corrects its moments), and a flat one has one count. So where a tensor has missed steps, the
state holds how many (`missed`, of each element), and the tensor is stepped by itself from then on, by its own count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distbelief.server.optimizers import stepper

MISSED, COUNT = "missed", "step"
"""Names in an optimizer's state: how many steps each element has missed, and torch's count of steps."""

WHOLE_STEPS = ("nadam", "lars", "lamb")
"""Optimizers that can leave nothing out: they step by norms of layers, or by more than a count of steps."""


class StepPart(NamedTuple):
    """A tensor, or what a shard has of it, in a flat parameter."""

    parameter: Tensor
    elements: slice


class _Apart(NamedTuple):
    """A part that is not stepped with the rest: its values and state from before the step."""

    part: StepPart
    left_out: bool
    missed: int
    values: Tensor
    state: dict[str, Tensor]


def step_without(
    optimizer: torch.optim.Optimizer, step: Callable[[], object], parts: Sequence[StepPart], missing: Collection[int]
) -> None:
    """Step all parts but those of these numbers.

    Args:
        optimizer: of the flat parameters, whose gradients are set.
        step: makes its step.
        parts: of all its parameters.
        missing: the numbers of those to leave out.

    >>> flat = torch.zeros(4); flat.grad = torch.ones(4); sgd = torch.optim.SGD([flat], lr=1.0, weight_decay=0.5)
    >>> step_without(sgd, sgd.step, [StepPart(flat, slice(0, 2)), StepPart(flat, slice(2, 4))], {1}); flat
    tensor([-1., -1.,  0.,  0.])
    """
    # Step everything, put back what is apart, then step by its own count whatever has only missed earlier steps. So a
    # job that leaves nothing out pays nothing, and the rest has the bits of a plain step. If all of a flat parameter is
    # left out, torch skips it: its count stands still, and nothing has missed a step.
    for parameter in {id(part.parameter): part.parameter for part in parts}.values():
        if all(number in missing for number, part in enumerate(parts) if part.parameter is parameter):
            parameter.grad = None
    apart = [
        _Apart(part, number in missing, missed, part.parameter[part.elements].clone(), _state(optimizer, part, True))
        for number, part in enumerate(parts)
        if part.parameter.grad is not None
        if (missed := _missed(optimizer, part)) or number in missing
    ]
    step()
    for before in apart:
        parameter, elements = before.part
        parameter[elements].copy_(before.values)
        for key, value in _state(optimizer, before.part).items():
            value.copy_(before.state[key]) if key in before.state else value.zero_()  # new: this step has made it
        state = optimizer.state[parameter]
        if before.left_out and COUNT in state:
            state.setdefault(MISSED, torch.zeros_like(parameter, dtype=torch.int32))[elements] += 1
    _step_apart(optimizer, [before for before in apart if not before.left_out])


def _missed(optimizer: torch.optim.Optimizer, part: StepPart) -> int:
    missed = optimizer.state.get(part.parameter, {}).get(MISSED)
    return 0 if missed is None else int(missed[part.elements.start])


def _state(optimizer: torch.optim.Optimizer, part: StepPart, copy: bool = False) -> dict[str, Tensor]:
    """Return an optimizer's state of the elements of a part: views, or a copy."""
    views = {
        key: value[part.elements]
        for key, value in optimizer.state.get(part.parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == part.parameter.shape and key != MISSED
    }
    return {key: value.clone() for key, value in views.items()} if copy else views


def _step_apart(optimizer: torch.optim.Optimizer, late: Sequence[_Apart]) -> None:
    """Step parts that have missed steps, each by its own count: those of one group and count at once."""
    sets: dict[tuple[int, int], list[StepPart]] = {}
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for before in late:
        sets.setdefault((groups[id(before.part.parameter)], before.missed), []).append(before.part)
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    for (number, missed), parts in sets.items():
        views = [parameter[elements] for parameter, elements in parts]
        alone = kind([{**optimizer.param_groups[number], "params": views}])
        for part, view in zip(parts, views, strict=True):
            assert part.parameter.grad is not None
            view.grad = part.parameter.grad[part.elements]
            count = optimizer.state[part.parameter][COUNT]  # the step that the rest has made is in it
            alone.state[view] = {**_state(optimizer, part), COUNT: count - 1 - missed}
        stepper(alone)()
