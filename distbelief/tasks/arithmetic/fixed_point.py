"""Gradients by products in dynamic fixed point: what is multiplied, forward and backward, is rounded to a few bits
first; sums, and all that is done to single values, stay in float32 (Courbariaux, Bengio and David 2014).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
"""Operations that multiply tensors, and the arguments that each multiplies."""
HIDDEN = ("scaled_dot_product", "rnn_layer", "_cudnn_rnn", "_thnn_fused", "_trilinear", "_sparse", "embedding_bag")
"""Parts of the names of operations that multiply inside, where nothing can be rounded."""


class FixedPoint(TorchDispatchMode):
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
        super().__init__()  # type: ignore[no-untyped-call]  # torch has given it no types
        self._products = 0
        self._scales = defaultdict[tuple[int, int], DynamicScale](partial(DynamicScale, bits))
        """Scale of each operand, by the number of its product in a step, and its place there."""

    @property
    def overflows(self) -> int:
        """Number of values so far that were beyond the range and cut."""
        return sum(scale.overflows for scale in self._scales.values())

    @property
    def counted(self) -> int:
        """Number of values that were rounded so far."""
        return sum(scale.values for scale in self._scales.values())

    def backward(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Compute the loss, its gradient left in the parameters' `.grad`.

        Args:
            loss_of: computes the loss of one minibatch.

        Raises:
            TrainingError: a value to multiply is not finite, or the model multiplies where nothing can be rounded.
        """
        self._products = 0
        with self:
            loss = loss_of()
            loss.backward()
        if not self._scales:
            raise TrainingError(
                "--fixed-point rounds what layers multiply, and this model multiplies no matrices and convolves "
                "nothing: leave it off"
            )
        return loss

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Round the operands of a product; leave all other operations as they are."""
        if (places := OPERANDS.get(func)) is not None:
            rounded = list(args)
            for at in places:
                if rounded[at].is_floating_point():
                    rounded[at] = self._scales[self._products, at].round(rounded[at])
            args, self._products = tuple(rounded), self._products + 1
        elif any(part in func.name() for part in HIDDEN):
            raise TrainingError(
                f"--fixed-point rounds what layers multiply, and {func.name()} multiplies inside, where nothing can be "
                "rounded: train in another precision"
            )
        return func(*args, **(kwargs or {}))
