"""Gradients in bf16 or fp16: products in few bits, sums in float32, and a scaled loss where fp16 would lose gradients.

A gradient that overflows is never given to anybody: its minibatch is computed again with half the scale, and that is
counted and told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from distbelief.errors import TrainingError

FIRST_SCALE = 2.0**15
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale is doubled."""
LARGEST = 65504.0
"""Largest value of fp16."""


class Autocast:
    """Computes losses and gradients of a model in a precision.

    Args:
        precision: float32, bf16 or fp16.
        model: whose gradients are computed.
        tell: is told of overflows, in a line.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.fill_(1.0)
    >>> loss = Autocast("bf16", layer).backward(lambda: layer(torch.tensor([[1.0, 1 + 2**-9]])).sum())
    >>> loss, layer.weight.grad
    (tensor(2., dtype=torch.bfloat16, grad_fn=<SumBackward0>), tensor([[1., 1.]]))
    """

    def __init__(self, precision: str, model: nn.Module, tell: Callable[[str], None] | None = None) -> None:
        self.precision, self._model, self._tell = precision, model, tell or _to_stderr
        self.scale = FIRST_SCALE if precision == "fp16" else 1.0
        self.overflows = 0
        """Minibatches that were computed again, so far."""
        self.counted = 0
        """Minibatches in fp16, so far, each as often as it was computed."""
        self._steps = 0

    def backward(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Compute the loss, unscaled, its gradient left in the parameters' `.grad`.

        Args:
            loss_of: computes the loss of one minibatch, the same each time.

        Raises:
            TrainingError: values that fp16 cannot hold, at any scale.
        """
        if self.precision == "float32":
            loss = loss_of()
            loss.backward()
            return loss
        if self.precision == "bf16":
            loss = self._cast(loss_of, torch.bfloat16)
            loss.backward()
            return loss
        return self._scaled(loss_of)

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
        """Take back what a step has left, and halve the scale.

        Raises:
            TrainingError: it is as small as it may be.
        """
        if self.scale <= 1:
            raise TrainingError(
                f"a gradient overflows fp16 ({LARGEST:g} at most) with a finite loss, whatever it is scaled by: train "
                "with --precision bf16, or clip or lower the loss"
            )
        self.scale, self._steps, self.overflows = self.scale / 2, 0, self.overflows + 1
        for parameter in self._model.parameters():
            parameter.grad = None
        for buffer, before in zip(self._model.buffers(), kept, strict=True):
            buffer.copy_(before)
        if self.overflows & (self.overflows - 1) == 0:
            self._tell(
                f"fp16: {self.overflows} gradients overflowed so far; each was computed again, and the loss is now "
                f"scaled by {self.scale:g}"
            )

    def _explain(self) -> None:
        """Name a parameter that fp16 cannot hold, where that is why the loss is no number.

        Raises:
            TrainingError: there is one.
        """
        for name, parameter in self._model.named_parameters():
            if over := int((parameter.detach().abs() > LARGEST).sum()):
                raise TrainingError(
                    f"{over} of {parameter.numel()} values of {name!r} overflow fp16 ({LARGEST:g} at most): train with "
                    "--precision bf16"
                )


def _values(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, dense or sparse."""
    return gradient._values() if gradient.is_sparse else gradient


def _to_stderr(line: str) -> None:
    print(f"distbelief: {line}", file=sys.stderr, flush=True)
