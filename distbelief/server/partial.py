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
"""Optimizers that step all of a flat parameter: by norms of layers, or by more than a count of steps."""


class StepPart(NamedTuple):
    """A tensor, or what a shard has of it, in a flat parameter."""

    parameter: Tensor
    elements: slice


class _Apart(NamedTuple):
    """Values that are not stepped with the rest, as they are before that."""

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
    for parameter in {id(one.parameter): one.parameter for one in parts}.values():
        if all(number in missing for number, one in enumerate(parts) if one.parameter is parameter):
            parameter.grad = None
    apart = [
        _Apart(one, number in missing, missed, one.parameter[one.elements].clone(), _state(optimizer, one, copy=True))
        for number, one in enumerate(parts)
        if one.parameter.grad is not None
        if (missed := _missed(optimizer, one)) or number in missing
    ]
    step()
    for one in apart:
        parameter, elements = one.part
        parameter[elements].copy_(one.values)
        for key, value in _state(optimizer, one.part).items():
            value.copy_(one.state[key]) if key in one.state else value.zero_()
        held = optimizer.state[parameter]
        if one.left_out and COUNT in held:
            held.setdefault(MISSED, torch.zeros_like(parameter, dtype=torch.int32))[elements] += 1
    _step_apart(optimizer, [one for one in apart if not one.left_out])


def _missed(optimizer: torch.optim.Optimizer, part: StepPart) -> int:
    missed = optimizer.state.get(part.parameter, {}).get(MISSED)
    return 0 if missed is None else int(missed[part.elements.start])


def _state(optimizer: torch.optim.Optimizer, part: StepPart, copy: bool = False) -> dict[str, Tensor]:
    """Return an optimizer's state of each element of a part: views, or a copy."""
    held = {
        key: value[part.elements]
        for key, value in optimizer.state.get(part.parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == part.parameter.shape and key != MISSED
    }
    return {key: value.clone() for key, value in held.items()} if copy else held


def _step_apart(optimizer: torch.optim.Optimizer, some: Sequence[_Apart]) -> None:
    """Step parts that have missed steps, each with its own count of them: those of one group and count at once."""
    sets: dict[tuple[int, int], list[StepPart]] = {}
    of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for one in some:
        sets.setdefault((of[id(one.part.parameter)], one.missed), []).append(one.part)
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    for (number, missed), parts in sets.items():
        parameters = [parameter[elements] for parameter, elements in parts]
        alone = kind([{**optimizer.param_groups[number], "params": parameters}])
        for part, own in zip(parts, parameters, strict=True):
            assert part.parameter.grad is not None
            own.grad = part.parameter.grad[part.elements]
            count = optimizer.state[part.parameter][COUNT]  # the step that the rest has made is in it
            alone.state[own] = {**_state(optimizer, part), COUNT: count - 1 - missed}
        stepper(alone)()
