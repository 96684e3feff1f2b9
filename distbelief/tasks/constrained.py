"""The task `TASK@FILE`: a task whose model begins as a compressed file has it, and stays pruned and shared.

Pruned and shared weights are torch parametrizations, of which strategies need not know: the parameters of a layer are
its kept values or its codebook, whose gradient is the sum over its members (Han et al. 2016, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from distbelief.codecs.file import ModelFile, read
from distbelief.codecs.stored import Stored
from distbelief.errors import LayoutError, UsageError

MARK = "@"
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Modules whose weights can be pruned and shared."""


class Constrained(nn.Module):
    """The parametrization of a weight that a file has pruned or shared.

    >>> some = Stored((2, 2), torch.tensor([0.5, 2.0]), np.array([0, 3]), np.array([1, 0], dtype=np.uint16), 1)
    >>> layer = nn.Linear(2, 2)
    >>> _ = parametrize.register_parametrization(layer, "weight", Constrained(some))
    >>> layer.weight.sum().backward()
    >>> layer.parametrizations.weight.original, layer.parametrizations.weight.original.grad
    (Parameter containing: tensor([0.5000, 2.0000], requires_grad=True), tensor([1., 1.]))
    """

    positions: torch.Tensor | None
    ids: torch.Tensor | None

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self._shape, self._size, self._values = stored.shape, stored.size, stored.values
        places = None if stored.positions is None else torch.from_numpy(stored.positions)
        ids = None if stored.ids is None else torch.from_numpy(stored.ids.astype(np.int64))
        # not in the state dict: positions come from the file, and never change
        self.register_buffer("positions", places, persistent=False)
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weight, made of its kept values or of its codebook."""
        kept = self.looked_up(values)
        if self.positions is not None:
            kept = kept.new_zeros(self._size).index_copy(0, self.positions.long(), kept)
        return kept.view(self._shape)

    def looked_up(self, values: torch.Tensor) -> torch.Tensor:
        """Return the kept values."""
        return values if self.ids is None else values.index_select(0, self.ids)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the values that the file has for the weight."""
        return self._values.to(weight)


def layers(model: nn.Module) -> list[str]:
    """List the weights that can be pruned and shared, in the order of the model, without tied ones."""
    named = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    tied = {id(p) for p in model.parameters() if sum(p is other for other in named) > 1}
    return [
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, LAYERS) and id(module.weight) not in tied and not parametrize.is_parametrized(module)
    ]


def fill(model: nn.Module, file: ModelFile) -> nn.Module:
    """Fill a model with the values of a file, and return the model.

    A file that does not fit the model raises a `LayoutError`, which names the first difference.
    """
    state, tensors = file.state(), model.state_dict()
    for name, tensor in tensors.items():
        if name not in state:
            raise LayoutError(f"{file.name} has no tensor {name!r}, which the model has; name the model of the file")
        theirs, ours = ((list(side.shape), str(side.dtype).removeprefix("torch.")) for side in (state[name], tensor))
        if theirs != ours:
            raise LayoutError(
                f"{name!r} is {theirs[0]} {theirs[1]} in {file.name}, the model's is {ours[0]} {ours[1]}; name the "
                "model of the file"
            )
    if more := [name for name in state if name not in tensors]:
        raise LayoutError(f"{file.name} has a tensor {more[0]!r}, which the model lacks; name the model of the file")
    model.load_state_dict(state)
    return model


def constrain(model: nn.Module, file: ModelFile) -> nn.Module:
    """Fill a model as `fill` does, so that pruned weights stay zero and shared ones stay shared."""
    able = layers(fill(model, file))
    for name, stored in file.tensors.items():
        if not stored.constrained:
            continue
        if name not in able:
            raise LayoutError(f"{file.name} has pruned or shared {name!r}, which is not a weight of a supported layer")
        module, _, attribute = name.rpartition(".")
        parametrize.register_parametrization(model.get_submodule(module), attribute, Constrained(stored))
    return model


def trained_name(name: str, stored: Stored) -> str:
    """Return the name of a file's tensor in the state dict of a model that `constrain` made."""
    module, _, attribute = name.rpartition(".")
    return ".".join(filter(None, [module, "parametrizations", attribute, "original"])) if stored.constrained else name


def constrained(model: Callable[[], nn.Module], task: str, path: str) -> Callable[[], nn.Module]:
    """Return a function that builds the model of a task as a file has it, or raise a `UsageError`."""
    if not Path(path).is_file():
        raise UsageError(f"task {task}{MARK}{path}: there is no file {path}; write one with distbelief compress")
    return lambda: constrain(model(), read(Path(path)))
