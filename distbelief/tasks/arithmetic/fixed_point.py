"""Gradients by products in dynamic fixed point: what is multiplied, forward and backward, is rounded to a few bits
first; sums, and all that is done to single values, stay in float32 (Courbariaux, Bengio and David 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from distbelief.codecs.fixed_point import DynamicScale
from distbelief.errors import TrainingError

aten = torch.ops.aten
OPERANDS: Mapping[object, Sequence[int]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.dot.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.addmv.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
}
"""What multiplies tensors, and which of its arguments are multiplied."""
HIDDEN = ("scaled_dot_product", "rnn_layer", "_cudnn_rnn", "_thnn_fused", "_trilinear", "_sparse", "embedding_bag")
"""Parts of the names of what multiplies inside, where nothing can be rounded."""


class FixedPoint:
    """Computes losses and gradients of a model by products in dynamic fixed point.

    Each operand of each product of a step has a scale of its own, known by where in the step it is computed: the
    inputs, the weights and the gradients of each layer.

    Args:
        bits: of what is multiplied.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 0.3]]))
    >>> FixedPoint(3).backward(lambda: layer(torch.tensor([[1.0, 1.0]])).sum()), layer.weight.grad
    (tensor(1.5000, grad_fn=<SumBackward0>), tensor([[1., 1.]]))
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._scales: dict[tuple[int, int], DynamicScale] = {}

    @property
    def overflows(self) -> int:
        """Values that were beyond the range and cut, so far."""
        return sum(scale.overflows for scale in self._scales.values())

    @property
    def counted(self) -> int:
        """Values that were rounded, so far."""
        return sum(scale.values for scale in self._scales.values())

    def backward(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """The loss, its gradient left in the parameters' `.grad`.

        Args:
            loss_of: computes the loss of one minibatch.

        Raises:
            TrainingError: a value to multiply is not finite, or the model multiplies where nothing can be rounded.
        """
        with _Rounding(self._round):
            loss = loss_of()
            loss.backward()
        if not self._scales:
            raise TrainingError(
                "--fixed-point rounds what layers multiply, and this model multiplies no matrices and convolves "
                "nothing: leave it off"
            )
        return loss

    def _round(self, product: int, operand: int, values: Tensor) -> Tensor:
        key = product, operand
        if (scale := self._scales.get(key)) is None:
            scale = self._scales[key] = DynamicScale(self._bits)
        return scale.round(values)


class _Rounding(TorchDispatchMode):
    """Has what is multiplied rounded, wherever a model or the gradient of one does it.

    Args:
        rounded: given the number of the product, which operand it is, and its values.
    """

    def __init__(self, rounded: Callable[[int, int, Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has given it no types
        self._rounded, self._products = rounded, 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Round the operands of a product; whatever else is computed as it is."""
        if (where := OPERANDS.get(func)) is not None:
            number, self._products = self._products, self._products + 1
            given = list(args)
            for at in where:
                if given[at].is_floating_point():
                    given[at] = self._rounded(number, at, given[at])
            args = tuple(given)
        elif any(part in func.name() for part in HIDDEN):
            raise TrainingError(
                f"--fixed-point rounds what layers multiply, and {func.name()} multiplies inside, where nothing can be "
                "rounded: train in another precision"
            )
        return func(*args, **(kwargs or {}))
