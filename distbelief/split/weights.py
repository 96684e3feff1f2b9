"""Weights' gradients of a step, made at once of all its microbatches: a layer goes back without them, and keeps what
they are made of.

This is for fully connected layers and convolutions, on parameters of their own home: there the gradient of a weight is
one product, of what was taken and of the gradient of what was given. Those of all other parameters (of norms,
embeddings and recurrent layers, and of what one home borrows from another) are made with each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from distbelief.errors import UsageError
from distbelief.split.graph import SplitGraph

aten = torch.ops.aten
FUNCTIONS: Mapping[object, int] = {
    functional.linear: 0, functional.conv1d: 1, functional.conv2d: 2, functional.conv3d: 3,
    aten.linear.default: 0, aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3,
}  # fmt: skip
"""The functions that are such a product, and over how many dimensions their weights slide."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that call them."""
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
Weights = tuple[torch.Tensor, torch.Tensor | None]
"""A weight, or what belongs to it, and the same of its bias where it has one."""
GradientRooms = dict[torch.Tensor, torch.Tensor]
"""Gradients of weights from step to step, by weight: a step writes over those of the last, and adds missing ones. So
whoever lends it needs no gradient of a step any more once the next one begins. Where a gradient is large, the kernel
takes longer to give new memory than the product takes.
"""


def check_once(graph: SplitGraph) -> None:
    """Refuse a model that has no layer whose weights' gradients could be made once a step.

    Raises:
        UsageError: with the reason.
    """
    layers = [part for held in graph.holdings.values() for part in held.layer.modules()]
    if not any(isinstance(part, LAYERS) for part in layers) and not any(n.target in FUNCTIONS for n in graph.nodes):
        raise UsageError(
            "--weight-gradients once: that is for fully connected layers and convolutions, and the model has none; "
            "leave it off"
        )


class _Linear(NamedTuple):
    """A fully connected layer."""

    def forward(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # of more dimensions torch gives a view, which nobody may write into behind a function of our own
        flat = functional.linear(value.flatten(0, -2), weight, bias)
        made: torch.Tensor = aten._unsafe_view(flat, [*value.shape[:-1], len(weight)])
        return made

    def back(self, gradient: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of what was taken."""
        return gradient @ weight

    def samples(self, value: torch.Tensor) -> torch.Tensor:
        """Return what was taken, or given, with one dimension of samples."""
        return value.flatten(0, -2)

    def weights(self, gradient: torch.Tensor, value: torch.Tensor, of: Weights, rooms: GradientRooms) -> Weights:
        """The gradients of the weight, over that of the last step, and of the bias."""
        weight, bias = of
        room = rooms.get(weight)
        if room is not None and weight.grad is not None and room.data_ptr() == weight.grad.data_ptr():
            room = None  # another product of this step is there
        made = torch.mm(gradient.t(), value, out=room)
        rooms.setdefault(weight, made)
        return made, None if bias is None else gradient.sum(0)


class _Convolution(NamedTuple):
    """A convolution; of each dimension that its weights slide over."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made: torch.Tensor = aten.convolution(value, weight, bias, *self._how)
        return made

    def back(self, gradient: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient of what was taken."""
        made: torch.Tensor
        made, *_ = aten.convolution_backward(gradient, value, weight, None, *self._how, [True, False, False])
        return made

    def samples(self, value: torch.Tensor) -> torch.Tensor:
        """Return what was taken, or given, with one dimension of samples."""
        return value

    def weights(self, gradient: torch.Tensor, value: torch.Tensor, of: Weights, rooms: GradientRooms) -> Weights:
        """The gradients of the weight and of the bias, in new memory: torch writes these nowhere else."""
        weight, bias = of
        mask, sizes = [False, True, bias is not None], None if bias is None else list(bias.shape)
        _, *made = aten.convolution_backward(gradient, value, weight, sizes, *self._how, mask)
        return made[0], made[1] if bias is not None else None

    @property
    def _how(self) -> tuple[object, ...]:
        """The arguments of a convolution that is not transposed."""
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups


Product = _Linear | _Convolution


def _sum(gradient: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    """Return what a parameter has, which may be sparse, and what was made of it."""
    if gradient is None:
        return own
    return gradient.add_(own) if gradient.layout is torch.strided else own.add_(gradient)


@dataclass
class _Factors:
    """Factors of the gradients of a weight and its bias."""

    product: Product
    weight: torch.Tensor
    bias: torch.Tensor | None
    values: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    def add(self, value: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the factors of a further microbatch: the value that was taken, and the gradient of the result."""
        self.values.append(self.product.samples(value.detach()))
        self.gradients.append(self.product.samples(gradient))

    def make(self, rooms: GradientRooms) -> None:
        """Make both gradients, and add them to what the parameters have."""
        gradient, value = _together(self.gradients), _together(self.values)
        of = self.weight, self.bias
        for parameter, own in zip(of, self.product.weights(gradient, value, of, rooms), strict=True):
            if parameter is not None and own is not None:
                parameter.grad = _sum(parameter.grad, own)


class WeightGradients(TorchFunctionMode):
    """Mode in which layers go back without the gradients of their weights.

    Args:
        parameters: those whose gradients may be left out.
        rooms: as said at `GradientRooms`; None for new memory.

    >>> layer, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 2.0]])
    >>> gradients = WeightGradients(layer.parameters())
    >>> for _ in range(2):
    ...     with gradients:
    ...         given = layer(x).sum()
    ...     given.backward()
    >>> layer.weight.grad is None, gradients.make(), layer.weight.grad
    (True, 8, tensor([[2., 4.]]))
    """

    def __init__(self, parameters: Iterable[torch.Tensor], rooms: GradientRooms | None = None) -> None:
        super().__init__()
        self._rooms = {} if rooms is None else rooms
        self._own = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self._kept: dict[tuple[object, ...], _Factors] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Compute as ever, but for what is such a product."""
        kwargs = kwargs or {}
        if func in FUNCTIONS and torch.is_grad_enabled():
            given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
            if (kept := self._kept_of(FUNCTIONS[func], given)) is not None:
                return _WithoutWeights.apply(kept, given["input"], kept.weight, kept.bias)  # type: ignore[no-untyped-call]  # of torch
        return func(*args, **kwargs)

    def _kept_of(self, dimensions: int, given: Mapping[str, Any]) -> _Factors | None:
        """Return where a call is kept; None where its weights' gradients are made with its backward pass."""
        value, weight, bias = given["input"], given["weight"], given.get("bias")
        own = id(weight) in self._own and (bias is None or id(bias) in self._own)
        if not own or torch.is_autocast_enabled(value.device.type):
            return None
        product = _convolution(dimensions, given) if dimensions else _Linear()
        batched = value.dim() == weight.dim() if dimensions else value.dim() >= weight.dim() == 2
        if product is None or not batched or not value.is_floating_point():
            return None
        if bias is not None and bias.shape != weight.shape[:1]:  # it is added to more than one element
            return None
        key = id(weight), id(bias), product, value.shape[1:] if dimensions else ()
        return self._kept.setdefault(key, _Factors(product, weight, bias))

    @torch.no_grad()
    def make(self) -> int:
        """Make all that were left out, and add them to the parameters' `.grad`.

        Returns:
            The bytes of gradients that were kept for that.
        """
        size = 0
        while self._kept:  # one after the other, so that what each is made of goes
            _, kept = self._kept.popitem()
            size += sum(gradient.nbytes for gradient in kept.gradients)
            if kept.gradients:
                kept.make(self._rooms)
        return size


class _WithoutWeights(torch.autograd.Function):
    """A layer whose way back leaves the gradients of its weights to whoever makes them."""

    @staticmethod
    def forward(
        ctx: Any, kept: _Factors, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.kept = kept
        ctx.save_for_backward(value, weight)
        return kept.product.forward(value, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        value, weight = ctx.saved_tensors
        ctx.kept.add(value, gradient)
        own = ctx.kept.product.back(gradient, value, weight) if ctx.needs_input_grad[1] else None
        return None, own, None, None


def _convolution(dimensions: int, given: Mapping[str, Any]) -> _Convolution | None:
    """A convolution by its arguments; None where its padding is a word."""
    if isinstance(given.get("padding"), str):
        return None

    def each(name: str, usual: int) -> tuple[int, ...]:
        value = given.get(name, usual)
        sides = (value,) if isinstance(value, int) else tuple(value)
        return sides * dimensions if len(sides) == 1 else sides

    return _Convolution(each("stride", 1), each("padding", 0), each("dilation", 1), given.get("groups", 1))


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
