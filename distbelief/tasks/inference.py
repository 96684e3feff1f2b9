"""Models of compressed files as plain modules, and inference in few bits: products of int8, or weights from ids."""

from __future__ import annotations

import math
import os
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from distbelief.codecs.file import ModelFile, read
from distbelief.codecs.stored import Stored
from distbelief.core.values import admit, shown
from distbelief.errors import UsageError, unknown
from distbelief.references import TASKS
from distbelief.tasks.constrained import Constrained, fill
from distbelief.tasks.task import Task, resolve

INFERENCES = ("float32", "int8", "ids")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LEVELS = 127
PAIRED_BITS = 4
"""Most bits of ids that share a byte in pairs."""


def lean(model: nn.Module, inference: str, file: ModelFile | None = None) -> nn.Module:
    """Replace layers of a model by ones that compute in few bits, and return the model.

    `inference` is float32 (nothing is replaced), int8, or ids, which needs the `file` of the values. Another name, or a
    model without a layer that can be replaced, raises a `UsageError`.

    >>> model = nn.Sequential(nn.Linear(4, 2, bias=False))
    >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]]))
    >>> lean(model, "int8")(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    tensor([[1.0000, 0.5000]])
    """
    if inference not in INFERENCES:
        raise unknown("inference", inference, INFERENCES)
    if inference == "int8":
        _replace_products(model)
    if inference == "ids":
        _replace_weights(model, file)
    return model


def held_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's parameters and buffers."""
    return sum({id(tensor): tensor.nbytes for tensor in chain(model.parameters(), model.buffers())}.values())


def _replace_products(model: nn.Module) -> None:
    replaced = 0
    for module in list(model.modules()):
        # modules that torch composes, such as attention, may read the weights of their layers directly
        if type(module).__module__.startswith(nn.modules.__name__) and not isinstance(module, CONTAINERS):
            continue
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
            elif type(child) is nn.Conv2d and child.groups == 1 and child.padding_mode == "zeros":
                setattr(module, name, Int8Conv2d(child))
            else:
                continue
            replaced += 1
    if not replaced:
        raise UsageError("--inference int8: the model has no linear layer or 2-D convolution of its own; leave it off")


class _Int8(nn.Module):
    """A layer with weights of int8 and a scale for each output."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        flat = weight.detach().flatten(1)
        scale = flat.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LEVELS
        whole = (flat / scale[:, None]).round_().to(torch.int8)
        self._inputs, self._outputs = flat.shape[1], flat.shape[0]
        # multiples of 8, which products of int8 on GPUs need
        whole = functional.pad(whole, (0, -self._inputs % 8, 0, -self._outputs % 8))
        self.register_buffer("weight", whole.T.contiguous())
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def product(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Multiply rows of whole numbers by the weights, and apply all scales: (rows, outputs)."""
        count = len(rows)
        missing = -count % 32 if rows.is_cuda else 0
        rows = functional.pad(rows, (0, -self._inputs % 8, 0, missing)).to(torch.int8)
        out = torch._int_mm(rows.contiguous(), self.weight)[:count, : self._outputs].float()
        out = out * scales * self.scale
        return out if self.bias is None else out + self.bias


class Int8Linear(_Int8):
    """A linear layer by a product of int8; each row of the inputs has its own scale."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight, layer.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the outputs of float32 inputs (..., features)."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        whole, scales = _whole(rows)
        return self.product(whole, scales).view(*inputs.shape[:-1], self._outputs)


class Int8Conv2d(_Int8):
    """A 2-D convolution by a product of int8; each sample has its own scale."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(layer.weight, layer.bias)
        self._kernel, self._stride, self._dilation = layer.kernel_size, layer.stride, layer.dilation
        wide = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        if isinstance(layer.padding, str):
            sides = [(w // 2, w - w // 2) if layer.padding == "same" else (0, 0) for w in wide]
        else:
            sides = [(padding, padding) for padding in layer.padding]
        self._padding = (*sides[1], *sides[0])

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the outputs of float32 inputs (n, channels, height, width)."""
        whole, scales = _whole(inputs.flatten(1))
        padded = functional.pad(whole.view_as(inputs), self._padding)
        shape = [
            (side - d * (k - 1) - 1) // s + 1
            for side, d, k, s in zip(padded.shape[2:], self._dilation, self._kernel, self._stride, strict=True)
        ]
        patches = functional.unfold(padded, self._kernel, self._dilation, 0, self._stride).transpose(1, 2)
        rows = patches.reshape(-1, self._inputs)
        out = self.product(rows, scales.repeat_interleave(math.prod(shape), 0))
        return out.view(len(inputs), math.prod(shape), self._outputs).transpose(1, 2).reshape(len(inputs), -1, *shape)


def _whole(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as whole numbers up to 127, in float32, and what one is worth in each row, (rows, 1)."""
    scales = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / LEVELS
    return (rows / scales).round_(), scales


def _replace_weights(model: nn.Module, file: ModelFile | None) -> None:
    shared = {name: tensor for name, tensor in (file.tensors if file else {}).items() if tensor.ids is not None}
    if not shared:
        raise UsageError(
            "--inference ids: needs a compressed file whose weights share values; make one with distbelief compress "
            "--bits 4"
        )
    for name, stored in shared.items():
        module, _, attribute = name.rpartition(".")
        layer = model.get_submodule(module)
        device = layer.get_parameter(attribute).device
        parametrize.register_parametrization(layer, attribute, FromIds(stored).to(device))
    model.requires_grad_(False)


class FromIds(Constrained):
    """The parametrization of a weight that is looked up by its ids at each use.

    Two ids of at most 4 bits share a byte, and both values are looked up at once.

    >>> some = Stored((2, 2), torch.tensor([0.5, 2.0]), np.array([0, 3]), np.array([1, 0], dtype=np.uint16), 1)
    >>> layer = parametrize.register_parametrization(nn.Linear(2, 2), "weight", FromIds(some))
    >>> layer.weight, held_bytes(layer.parametrizations)
    (tensor([[2.0000, 0.0000],
            [0.0000, 0.5000]], grad_fn=<ViewBackward0>), 2057)
    """

    ids: Tensor

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored)
        assert stored.ids is not None
        self._kept = stored.kept
        ids = torch.from_numpy(stored.ids.astype(np.int32))
        if stored.bits <= PAIRED_BITS:
            both = functional.pad(ids, (0, len(ids) % 2)).view(-1, 2)
            ids = (both[:, 0] << PAIRED_BITS | both[:, 1]).to(torch.uint8)
            values = functional.pad(stored.values, (0, (1 << PAIRED_BITS) - len(stored.values)))
            pairs = torch.arange(1 << 2 * PAIRED_BITS)
            self._values = torch.stack((values[pairs >> PAIRED_BITS], values[pairs % (1 << PAIRED_BITS)]), 1)
        else:
            ids = ids.to(torch.uint8 if stored.bits <= 8 else torch.int16)
            self._values = stored.values[:, None].clone()
        self.ids = ids
        self.positions = None if self.positions is None else self.positions.int()

    def looked_up(self, table: Tensor) -> Tensor:
        """Return the kept values, from a table of single ones or of pairs."""
        return table.index_select(0, self.ids.int()).flatten()[: self._kept]


def load(path: str | os.PathLike[str], model: nn.Module | str | None = None, inference: str = "float32") -> nn.Module:
    """Load the model of a file that `distbelief compress` wrote, as a plain module in evaluation mode.

    Args:
        path: path of the file.
        model: a module to fill, or the name of the task that builds it; by default the built-in task that the file
            names. A file alone never has code imported.
        inference: float32; int8, in which linear layers and convolutions multiply numbers of 8 bits; or ids, in which
            shared weights are looked up at each use.

    Returns:
        The module with dense parameters; with int8 or ids, layers are replaced, for inference only.

    Raises:
        DataError: the file is missing or corrupt.
        LayoutError: the model does not fit the file; the first difference is named.
        UsageError: the file names no built-in task and `model` is None, or the inference is impossible.
    """
    file = read(Path(admit(path, str | os.PathLike, f"load({shown(path)})")))
    admit(model, nn.Module | str | None, f"load(model={shown(model)})")
    whole = model if isinstance(model, nn.Module) else task_of(file, model).model()
    return lean(fill(whole, file).eval(), admit(inference, str, f"load(inference={shown(inference)})"), file)


def task_of(file: ModelFile, task: str | None = None, data_dir: str | None = None) -> Task:
    """Return the named task, or the built-in task that a file names; or raise a `UsageError`."""
    if not task and file.task not in TASKS:
        raise UsageError(
            f"{file.name} is of task {file.task!r}, which is not built in, and no file has code imported: name the "
            f"task yourself, --task {file.task} or load(..., {file.task!r})"
        )
    return resolve(task or file.task, data_dir)
