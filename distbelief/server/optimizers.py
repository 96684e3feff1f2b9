"""The server's optimizers: `torch.optim` by name, fused where torch has it for the device, and two that torch lacks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from distbelief.codecs.fixed_point import round_each
from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Settings, fixed_point_bits
from distbelief.errors import UsageError, unknown
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
}
"""For each name the class, and the options that the name stands for."""

_FUSED_ON_CUDA = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_FUSED_ON_CPU = (*_FUSED_ON_CUDA, torch.optim.Adagrad)
_FUSED_DTYPES = (torch.float32, torch.float64)
"""Dtypes that fused optimizers step rightly.

In lower precisions torch 2.13's fused SGD steps wrongly on a CPU from 16 elements on, and spoils momentum: measured.
"""


def build(settings: Optimizer, groups: list[Group], rows: bool = False) -> torch.optim.Optimizer:
    """Build the optimizer of some parameter groups, given as torch takes them; with `rows` gradients are sparse.

    Raises:
        UsageError: an unknown optimizer, an option it does not have, or a value it refuses.

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
    """Return an optimizer's step without what torch wraps around it: profiling, torch._dynamo, and hooks of its own.

    Where parameters require a gradient it is to be called under `torch.no_grad()`.

    >>> parameter = torch.zeros(1); parameter.grad = torch.ones(1)
    >>> stepper(build(Optimizer("sgd", 0.5), [{"params": [parameter]}]))(); parameter
    tensor([-0.5000])
    """
    return partial(inspect.unwrap(type(optimizer).step), optimizer)


def post_hooks(settings: Settings) -> list[Callable[[Iterable[torch.Tensor]], None]]:
    """Give the functions that change parameters after each step of a job's optimizer.

    >>> len(post_hooks(Settings())), len(post_hooks(Settings(fixed_point="dynamic:10,12")))
    (0, 1)
    """
    bits = fixed_point_bits(settings.fixed_point)
    return [partial(round_each, bits=bits.updates)] if bits else []


def _spare_dynamo() -> None:
    """Keep torch from importing torch._dynamo as it makes an optimizer."""
    # that takes 1.2 s and 70 MB in every process that steps parameters, and serves compiled models only
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is not None and "torch._dynamo" not in sys.modules:
        function.__dynamo_disable = function  # where torch keeps what it would make of it


def check(settings: Optimizer) -> None:
    """Refuse an optimizer that cannot be built.

    Raises:
        UsageError: as `build`.
    """
    defaults(settings)


def defaults(settings: Optimizer) -> dict[str, object]:
    """Return the options of a parameter group that sets none of its own.

    Raises:
        UsageError: as `build`.

    >>> defaults(Optimizer("momentum", 0.02))["momentum"]
    0.9
    """
    options = build(settings, [{"params": [torch.nn.Parameter(torch.zeros(1))]}]).defaults
    return {option: value for option, value in options.items() if option not in _HOW}


def numbers_of(settings: Optimizer) -> dict[str, int]:
    """Return the options of a parameter group that are numbers, and how many each has.

    >>> numbers_of(Optimizer("adam", 0.1))["betas"]
    2
    """
    return {
        option: len(value) if isinstance(value, tuple) else 1
        for option, value in defaults(settings).items()
        if isinstance(value, tuple | int | float) and not isinstance(value, bool)
    }


_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed."""
