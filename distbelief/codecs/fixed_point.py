"""Dynamic fixed point: integers of few bits, times a power of two that follows the values' range (Courbariaux 2014)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from distbelief.errors import TrainingError

PERIOD = 32
"""Number of tensors after which a scale may change; the paper uses 10,000 samples."""
MOST_OVERFLOWS = 1e-4
"""If a larger share of the values lies beyond the range, the range is doubled; it is halved if no larger share lies
beyond its half."""


def rounded(values: torch.Tensor, bits: int, exponent: int) -> torch.Tensor:
    """Round values to fixed point of `bits` bits, including the sign, in a range from -2**exponent to 2**exponent.

    Values beyond the range are clamped.

    >>> rounded(torch.tensor([0.3, -0.9, 5.0]), 3, 0)
    tensor([ 0.2500, -1.0000,  0.7500])
    """
    levels = 1 << (bits - 1)
    # the power of two is applied in two halves, since for very small values it may exceed float32
    low = (bits - 1 - exponent) // 2
    high = bits - 1 - exponent - low
    whole = (values * 2.0**low).mul_(2.0**high).round_().clamp_(-levels, levels - 1)
    return whole.mul_(2.0**-low).mul_(2.0**-high)


def round_each(tensors: Iterable[torch.Tensor], bits: int) -> None:
    """Round tensors in place, each at the scale of its largest value, so that nothing is clamped."""
    for tensor in tensors:
        values = tensor.detach()
        values.copy_(rounded(values, bits, math.frexp(_largest(values))[1]))


class DynamicScale:
    """Scale for tensors of one kind: the inputs of a layer, its weights, or the gradients of its outputs.

    `bits` is the number of bits of a value, 2 or more. The scale follows the share of values beyond the range.

    >>> scale = DynamicScale(8)
    >>> scale.round(torch.tensor([0.3, -0.9]))
    tensor([ 0.2969, -0.8984])
    >>> scale.round(torch.tensor([0.3, 5.0])), scale.values, scale.overflows
    (tensor([0.2969, 0.9922]), 4, 1)
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.exponent: int | None = None
        """Exponent of the range; None before the first value that is not zero."""
        self.values = self.overflows = 0
        """Number of values so far, and of those that were beyond the range and clamped."""
        self._tensors = self._seen = self._beyond = self._beyond_half = 0

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values rounded to fixed point, or raise a `TrainingError` if one is not finite."""
        largest = _largest(values)
        if not math.isfinite(largest):
            raise TrainingError(
                f"--fixed-point: a factor of a product is {largest}: lower --lr, clip with --clip-norm, or look for a "
                "division by zero in the model"
            )
        if self.exponent is None:
            if not largest:
                return values
            self.exponent = math.frexp(largest)[1]  # the least e with largest < 2**e
        result = rounded(values, self.bits, self.exponent)
        self._count(values, largest, 2.0**self.exponent)
        return result

    def _count(self, values: torch.Tensor, largest: float, end: float) -> None:
        """Count the values beyond the range and beyond half of it; after a period, adjust the range."""
        size = values.numel()
        self.values, self._seen, self._tensors = self.values + size, self._seen + size, self._tensors + 1
        if 2 * largest >= end:
            magnitudes = values.abs()
            self._beyond_half += int((magnitudes >= end / 2).sum())
            if largest >= end:
                beyond = int((magnitudes >= end).sum())
                self._beyond, self.overflows = self._beyond + beyond, self.overflows + beyond
        if self._tensors < PERIOD:
            return
        assert self.exponent is not None
        if self._beyond > MOST_OVERFLOWS * self._seen:
            self.exponent += 1
        elif self._beyond_half <= MOST_OVERFLOWS * self._seen and largest:
            self.exponent -= 1
        self._tensors = self._seen = self._beyond = self._beyond_half = 0


def _largest(values: torch.Tensor) -> float:
    """Return the largest magnitude; 0 without values."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values.detach())
    return max(-float(low), float(high)) if not math.isnan(float(low)) else math.nan
