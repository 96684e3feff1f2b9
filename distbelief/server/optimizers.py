"""The server's optimizers: `torch.optim` by name, fused where that is right, and steps that leave parameters out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distbelief.codecs.fixed_point import round_each
from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Settings, fixed_point_bits
from distbelief.errors import UsageError, unknown
from distbelief.server.delayed import DelayedNesterov
from distbelief.server.layerwise import LAMB, LARS, Group

OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "lars": (LARS, {}),
    "lamb": (LAMB, {}),
    "asgd": (torch.optim.ASGD, {}),
    "average": (torch.optim.SGD, {}),
    "delayed-nesterov": (DelayedNesterov, {}),
}
"""Class of each name, and the options that the name sets."""

_FUSED_ON_CUDA = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_FUSED_ON_CPU = (*_FUSED_ON_CUDA, torch.optim.Adagrad)
_FUSED_DTYPES = (torch.float32, torch.float64)
"""Dtypes for fused optimizers: in others torch 2.13's fused SGD is wrong on a CPU from 16 elements on (measured)."""
_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options of the computation of a step."""
MISSED, COUNT = "missed", "step"
"""Names in an optimizer's state: the steps that each element has missed, and torch's count of steps."""
WHOLE_STEPS = ("nadam", "asgd", "lars", "lamb", "delayed-nesterov")
"""Optimizers that leave no parameter out: they step by norms of layers, or by more state than a count of steps."""


def build(settings: Optimizer, groups: list[Group], rows: bool = False) -> torch.optim.Optimizer:
    """Build the optimizer of parameter groups, in torch's form; with `rows` gradients are sparse.

    Raises:
        UsageError: an unknown optimizer or option, or a value that the optimizer refuses.

    >>> build(Optimizer("adagrad", 0.02), [{"params": [torch.nn.Parameter(torch.zeros(4))]}]).defaults["lr"]
    0.02
    """
    if settings.name not in OPTIMIZERS:
        raise unknown("optimizer", settings.name, OPTIMIZERS)
    kind, preset = OPTIMIZERS[settings.name]
    parameters = inspect.signature(kind).parameters
    known = set(parameters) - {"params", "lr", "fused", "foreach"}
    of_groups = [option for group in groups for option in group if option not in ("params", "lr")]
    for option in (*settings.options, *of_groups):
        if option not in known:
            raise unknown(f"option of optimizer {settings.name}", option, known)
    for option, value in settings.options.items():
        default = parameters[option].default
        numbers = len(default) if isinstance(default, tuple) else 0
        if numbers != (len(value) if isinstance(value, tuple) else 0):
            example = f"{numbers} numbers, such as {','.join(map(str, default))}" if numbers else "one value"
            raise UsageError(f"--optimizer-options {option}={value}: optimizer {settings.name} takes {example}")
    options = {**preset, **settings.options, "lr": settings.lr}
    if rows or (
        kind is torch.optim.SGD
        and not any(part.get(extra) for part in (options, *groups) for extra in ("momentum", "weight_decay"))
    ):
        # one `add_`: the same bits as fused in less time (266 k floats: 30 us against 40; a few floats: 3 against 8)
        options["foreach"] = False
    elif all(
        p.dtype in _FUSED_DTYPES and issubclass(kind, _FUSED_ON_CUDA if p.is_cuda else _FUSED_ON_CPU)
        for group in groups
        for p in group["params"]
    ):
        options["fused"] = True
    _spare_dynamo()
    try:
        return kind(groups, **options)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        shown = ", ".join(f"{key}={value}" for key, value in options.items() if key not in _HOW)
        raise UsageError(f"optimizer {settings.name} refuses {shown}: {error}") from error


def stepper(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return an optimizer's step without torch's wrappers: profiling, torch._dynamo and hooks.

    Parameters that require a gradient need `torch.no_grad()` around it.

    >>> parameter = torch.zeros(1); parameter.grad = torch.ones(1)
    >>> stepper(build(Optimizer("sgd", 0.5), [{"params": [parameter]}]))(); parameter
    tensor([-0.5000])
    """
    return partial(inspect.unwrap(type(optimizer).step), optimizer)


def post_hooks(settings: Settings) -> list[Callable[[Iterable[torch.Tensor]], None]]:
    """Return the functions that change parameters after each step of a job's optimizer.

    >>> len(post_hooks(Settings())), len(post_hooks(Settings(fixed_point="dynamic:10,12")))
    (0, 1)
    """
    bits = fixed_point_bits(settings.fixed_point)
    return [partial(round_each, bits=bits.updates)] if bits else []


def _spare_dynamo() -> None:
    """Keep torch from importing torch._dynamo when it makes an optimizer."""
    # the import takes 1.2 s and 70 MB in every process that steps parameters, and serves only compiled models
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is not None and "torch._dynamo" not in sys.modules:
        function.__dynamo_disable = function  # torch makes no wrapper where this attribute has one


def check(settings: Optimizer) -> None:
    """Refuse an optimizer that cannot be built, as `build` does."""
    defaults(settings)


def defaults(settings: Optimizer) -> dict[str, object]:
    """Return the options of a parameter group that sets none; raises as `build`.

    >>> defaults(Optimizer("momentum", 0.02))["momentum"]
    0.9
    """
    options = build(settings, [{"params": [torch.nn.Parameter(torch.zeros(1))]}]).defaults
    return {option: value for option, value in options.items() if option not in _HOW}


def numbers_of(settings: Optimizer) -> dict[str, int]:
    """Return the numeric options of a parameter group, with the number of values of each.

    >>> numbers_of(Optimizer("adam", 0.1))["betas"]
    2
    """
    return {
        option: len(value) if isinstance(value, tuple) else 1
        for option, value in defaults(settings).items()
        if isinstance(value, tuple | int | float) and not isinstance(value, bool)
    }


class StepPart(NamedTuple):
    """A tensor, or a shard's part of it, in a flat parameter."""

    parameter: Tensor
    elements: slice


class _Apart(NamedTuple):
    """A part that is not stepped with the rest, with its values and state before the step."""

    part: StepPart
    left_out: bool
    missed: int
    values: Tensor
    state: dict[str, Tensor]


def step_without(
    optimizer: torch.optim.Optimizer, step: Callable[[], object], parts: Sequence[StepPart], missing: Collection[int]
) -> None:
    """Step all parts except the missing ones.

    Args:
        optimizer: of the flat parameters, whose gradients are set.
        step: makes its step.
        parts: of all its parameters.
        missing: numbers of the parts to leave out, as plain torch skips parameters without a gradient.

    >>> flat = torch.zeros(4); flat.grad = torch.ones(4); sgd = torch.optim.SGD([flat], lr=1.0, weight_decay=0.5)
    >>> step_without(sgd, sgd.step, [StepPart(flat, slice(0, 2)), StepPart(flat, slice(2, 4))], {1}); flat
    tensor([-1., -1.,  0.,  0.])
    """
    # A flat parameter has one count of steps (`step`, by which Adam corrects its moments). So a tensor that has missed
    # steps keeps their number (`missed`), and is stepped apart from then on.
    #
    # Step everything, restore the parts that are apart, and step those that missed only earlier steps. So a job that
    # leaves nothing out pays nothing, and the rest has the bits of a plain step. If all of a flat parameter is left
    # out, torch skips it: its count stands still, and no part has missed a step.
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
            value.copy_(before.state[key]) if key in before.state else value.zero_()  # this step has created the state
        state = optimizer.state[parameter]
        if before.left_out and COUNT in state:
            state.setdefault(MISSED, torch.zeros_like(parameter, dtype=torch.int32))[elements] += 1
    _step_apart(optimizer, [before for before in apart if not before.left_out])


def _missed(optimizer: torch.optim.Optimizer, part: StepPart) -> int:
    missed = optimizer.state.get(part.parameter, {}).get(MISSED)
    return 0 if missed is None else int(missed[part.elements.start])


def _state(optimizer: torch.optim.Optimizer, part: StepPart, copy: bool = False) -> dict[str, Tensor]:
    """Return an optimizer's state of a part's elements: views, or a copy."""
    views = {
        key: value[part.elements]
        for key, value in optimizer.state.get(part.parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == part.parameter.shape and key != MISSED
    }
    return {key: value.clone() for key, value in views.items()} if copy else views


def _step_apart(optimizer: torch.optim.Optimizer, late: Sequence[_Apart]) -> None:
    """Step parts that have missed steps, by their own counts: those of one group and count at once."""
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
            count = optimizer.state[part.parameter][COUNT]  # the count includes this step of the other parts
            alone.state[view] = {**_state(optimizer, part), COUNT: count - 1 - missed}
        stepper(alone)()
