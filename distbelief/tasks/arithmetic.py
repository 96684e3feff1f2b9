"""Gradients in few bits: bf16 and fp16 by autocast, and dynamic fixed point.

fp16 scales the loss, so that small gradients are not lost. A gradient that overflows is dropped: its minibatch is
computed again with half the scale, which is counted and shown.

In fixed point the operands of products are rounded to a few bits, forward and backward; sums and elementwise operations
stay in float32 (Courbariaux, Bengio and David 2014).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from distbelief.codecs.fixed_point import DynamicScale
from distbelief.core.settings import PRECISIONS, fixed_point_bits
from distbelief.errors import TrainingError

FIRST_SCALE = 2.0**15
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale is doubled."""
LARGEST = 65504.0
"""Largest value of fp16."""


class Autocast:
    """Losses and gradients of a model in float32, bf16 or fp16.

    `precision` is one of these. Overflows are told on stderr.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.fill_(1.0)
    >>> loss = Autocast("bf16", layer).backward(lambda: layer(torch.tensor([[1.0, 1 + 2**-9]])).sum())
    >>> loss, layer.weight.grad
    (tensor(2., dtype=torch.bfloat16, grad_fn=<SumBackward0>), tensor([[1., 1.]]))
    """

    def __init__(self, precision: str, model: nn.Module) -> None:
        self.precision, self._model = precision, model
        self.scale = FIRST_SCALE if precision == "fp16" else 1.0
        self.overflows = 0
        """Number of minibatches that were computed again."""
        self.counted = 0
        """Number of computations of minibatches in fp16."""
        self._steps = 0

    def backward(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Compute the unscaled loss, and leave its gradient in the parameters' `.grad`.

        `loss_of` computes the loss of a minibatch, the same on each call.

        Raises:
            TrainingError: fp16 cannot hold a value at any scale.
        """
        if self.precision == "fp16":
            return self._scaled(loss_of)
        loss = self._cast(loss_of, torch.bfloat16) if self.precision == "bf16" else loss_of()
        loss.backward()
        return loss

    def _cast(self, loss_of: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        device = next((p.device.type for p in self._model.parameters()), "cpu")
        with torch.autocast(device, dtype=dtype):
            return loss_of()

    def _scaled(self, loss_of: Callable[[], Tensor]) -> Tensor:
        kept = [buffer.clone() for buffer in self._model.buffers()]
        while True:
            loss = self._cast(loss_of, torch.float16)
            self.counted += 1
            if not loss.isfinite().all():
                self._explain()
                return loss
            (loss.float() * self.scale).backward()
            gradients = [_values(p.grad) for p in self._model.parameters() if p.grad is not None]
            if all(bool(gradient.isfinite().all()) for gradient in gradients):
                for gradient in gradients:
                    gradient.div_(self.scale)
                self._steps += 1
                if self._steps % GROWTH_STEPS == 0:
                    self.scale *= 2
                return loss
            self._again(kept)

    def _again(self, kept: Sequence[Tensor]) -> None:
        """Undo a step and halve the scale; refuse a scale below 1."""
        if self.scale <= 1:
            raise TrainingError(
                f"a gradient overflows fp16 ({LARGEST:g} at most) with a finite loss, whatever it is scaled by: train "
                "with --precision bf16, or clip or lower the loss"
            )
        self.scale, self._steps, self.overflows = self.scale / 2, 0, self.overflows + 1
        self._model.zero_grad()
        for buffer, before in zip(self._model.buffers(), kept, strict=True):
            buffer.copy_(before)
        if self.overflows & (self.overflows - 1) == 0:
            print(
                f"distbelief: fp16: {self.overflows} gradients overflowed so far; each was computed again, and the "
                f"loss is now scaled by {self.scale:g}",
                file=sys.stderr,
                flush=True,
            )

    def _explain(self) -> None:
        """Raise a `TrainingError` if a parameter that fp16 cannot hold explains a loss that is not finite."""
        for name, parameter in self._model.named_parameters():
            if over := int((parameter.detach().abs() > LARGEST).sum()):
                raise TrainingError(
                    f"{over} of {parameter.numel()} values of {name!r} overflow fp16 ({LARGEST:g} at most): train with "
                    "--precision bf16"
                )


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


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
"""Operations that multiply tensors, and the positions of their factors."""
HIDDEN = ("scaled_dot_product", "rnn_layer", "_cudnn_rnn", "_thnn_fused", "_trilinear", "_sparse", "embedding_bag")
"""Parts of the names of fused operations, whose factors cannot be rounded."""


class FixedPoint(TorchDispatchMode):
    """Losses and gradients of a model by products in dynamic fixed point, with factors of this many bits.

    Each factor of each product in a step has its own scale: the inputs, the weights and the gradients of each layer.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 0.3]]))
    >>> FixedPoint(3).backward(lambda: layer(torch.tensor([[1.0, 1.0]])).sum()), layer.weight.grad
    (tensor(1.5000, grad_fn=<SumBackward0>), tensor([[1., 1.]]))
    """

    def __init__(self, bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has given it no types
        self._products = 0
        self._scales = defaultdict[tuple[int, int], DynamicScale](partial(DynamicScale, bits))
        """Scale of each factor, by the number of its product in a step and its position."""

    @property
    def overflows(self) -> int:
        """Return the number of values that were cut to the range."""
        return sum(scale.overflows for scale in self._scales.values())

    @property
    def counted(self) -> int:
        """Return the number of rounded values."""
        return sum(scale.values for scale in self._scales.values())

    def backward(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Compute the loss of a minibatch by `loss_of`, and leave its gradient in the parameters' `.grad`.

        Raises:
            TrainingError: a factor is not finite, or the model multiplies in a fused operation.
        """
        self._products = 0
        with self:
            loss = loss_of()
            loss.backward()
        if not self._scales:
            raise TrainingError(
                "--fixed-point rounds the factors of products and convolutions, and this model has none: leave it off"
            )
        return loss

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if (places := OPERANDS.get(func)) is not None:
            rounded = list(args)
            for at in places:
                if rounded[at].is_floating_point():
                    rounded[at] = self._scales[self._products, at].round(rounded[at])
            args, self._products = tuple(rounded), self._products + 1
        elif any(part in func.name() for part in HIDDEN):
            raise TrainingError(
                f"--fixed-point rounds the factors of products, which the fused {func.name()} does not show: train in "
                "another precision"
            )
        return func(*args, **(kwargs or {}))


def arithmetic_of(name: str, model: nn.Module) -> Autocast | FixedPoint:
    """Build the arithmetic of a model's gradients, by the name in `Settings.arithmetic`."""
    bits = None if name in PRECISIONS else fixed_point_bits(name)
    return FixedPoint(bits.products) if bits else Autocast(name, model)
