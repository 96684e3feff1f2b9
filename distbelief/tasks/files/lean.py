"""Inference from fewer bits: products of int8, or weights that are made of their ids at each use."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from distbelief.codecs.file import ModelFile
from distbelief.codecs.stored import Stored
from distbelief.errors import UsageError, unknown

INFERENCES = ("float32", "int8", "ids")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LEVELS = 127
PAIRED_BITS = 4
"""Ids of at most so many bits lie two in a byte."""


def lean(model: nn.Module, inference: str, file: ModelFile | None = None) -> nn.Module:
    """The model with layers that compute from fewer bits.

    Args:
        model: with its values; its layers are replaced in it.
        inference: float32 (nothing is replaced), int8 or ids.
        file: that it was filled from, for ids.

    Raises:
        UsageError: an unknown word, or nothing there is that could be replaced.

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
    """Bytes of a model's parameters and buffers, whichever of them its state has."""
    return sum({id(tensor): tensor.nbytes for tensor in chain(model.parameters(), model.buffers())}.values())


def _replace_products(model: nn.Module) -> None:
    replaced = 0
    for module in list(model.modules()):
        # attention and what else torch composes may read the weights of its layers itself
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
    """Weights as int8, with a scale for each output."""

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
        """Whole numbers times the weights, as they would be with their scales, (rows, outputs)."""
        count = len(rows)
        missing = -count % 32 if rows.is_cuda else 0
        rows = functional.pad(rows, (0, -self._inputs % 8, 0, missing)).to(torch.int8)
        out = torch._int_mm(rows.contiguous(), self.weight)[:count, : self._outputs].float()
        out = out * scales * self.scale
        return out if self.bias is None else out + self.bias


class Int8Linear(_Int8):
    """A linear layer by a product of int8: each row of the inputs has a scale of its own, its largest value's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight, layer.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (..., features), float32."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        whole, scales = _whole(rows)
        return self.product(whole, scales).view(*inputs.shape[:-1], self._outputs)


class Int8Conv2d(_Int8):
    """A 2-D convolution by a product of int8: each sample has a scale of its own."""

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
        """Inputs (n, channels, height, width), float32."""
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
    """Rows as whole numbers up to 127, in float32, and what one is worth in each row, (rows, 1)."""
    scales = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / LEVELS
    return (rows / scales).round_(), scales


def _replace_weights(model: nn.Module, file: ModelFile | None) -> None:
    shared = {name: tensor for name, tensor in (file.tensors if file else {}).items() if tensor.ids is not None}
    if not shared:
        raise UsageError(
            "--inference ids: is of a compressed file whose weights share values; make one with distbelief compress "
            "--bits 4"
        )
    for name, stored in shared.items():
        module, _, attribute = name.rpartition(".")
        layer = model.get_submodule(module)
        device = layer.get_parameter(attribute).device
        parametrize.register_parametrization(layer, attribute, FromIds(stored).to(device))
    model.requires_grad_(False)


class FromIds(nn.Module):
    """The parametrization of a weight that is made of its ids whenever it is used; two ids of at most 4 bits lie in a
    byte, and both values are looked up at once.

    >>> some = Stored((2, 2), torch.tensor([0.5, 2.0]), np.array([0, 3]), np.array([1, 0], dtype=np.uint16), 1)
    >>> layer = parametrize.register_parametrization(nn.Linear(2, 2), "weight", FromIds(some))
    >>> layer.weight, held_bytes(layer.parametrizations)
    (tensor([[2.0000, 0.0000],
            [0.0000, 0.5000]], grad_fn=<ViewBackward0>), 2057)
    """

    ids: Tensor
    positions: Tensor | None

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        assert stored.ids is not None
        self._shape, self._size, self._kept = stored.shape, stored.size, stored.kept
        ids = torch.from_numpy(stored.ids.astype(np.int32))
        if stored.bits <= PAIRED_BITS:
            both = functional.pad(ids, (0, len(ids) % 2)).view(-1, 2)
            ids = (both[:, 0] << PAIRED_BITS | both[:, 1]).to(torch.uint8)
            values = functional.pad(stored.values, (0, (1 << PAIRED_BITS) - len(stored.values)))
            pairs = torch.arange(1 << 2 * PAIRED_BITS)
            self._table = torch.stack((values[pairs >> PAIRED_BITS], values[pairs % (1 << PAIRED_BITS)]), 1)
        else:
            ids = ids.to(torch.uint8 if stored.bits <= 8 else torch.int16)
            self._table = stored.values[:, None].clone()
        places = None if stored.positions is None else torch.from_numpy(stored.positions.astype(np.int32))
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("positions", places, persistent=False)

    def forward(self, table: Tensor) -> Tensor:
        """The weight."""
        kept = table.index_select(0, self.ids.int()).flatten()[: self._kept]
        if self.positions is not None:
            kept = kept.new_zeros(self._size).index_copy(0, self.positions.long(), kept)
        return kept.view(self._shape)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the table that takes the place of the weight."""
        return self._table.to(weight)
