"""Dynamic fixed point: whole numbers of few bits times a power of two that follows the values (Courbariaux 2014)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from distbelief.errors import TrainingError

PERIOD = 32
"""Tensors after which a scale may be raised or lowered; the paper has 10,000 samples."""
MOST_OVERFLOWS = 1e-4
"""Share of values beyond the range above which it is doubled; it is halved where no more are beyond half of it."""


def rounded(values: torch.Tensor, bits: int, exponent: int) -> torch.Tensor:
    """Round to the nearest in fixed point of so many bits, the sign among them.

    Values lie from -2**exponent up to below 2**exponent; those beyond are cut to the last.

    >>> rounded(torch.tensor([0.3, -0.9, 5.0]), 3, 0)
    tensor([ 0.2500, -1.0000,  0.7500])
    """
    levels = 1 << (bits - 1)
    # the power of two is applied in two halves: one alone may be beyond float32 where values are very small
    low = (bits - 1 - exponent) // 2
    high = bits - 1 - exponent - low
    whole = (values * 2.0**low).mul_(2.0**high).round_().clamp_(-levels, levels - 1)
    return whole.mul_(2.0**-low).mul_(2.0**-high)


def round_each(tensors: Iterable[torch.Tensor], bits: int) -> None:
    """Round tensors in place, each at the scale of its largest value.

    So nothing is cut, and the same values become the same whoever rounds them.
    """
    for tensor in tensors:
        values = tensor.detach()
        values.copy_(rounded(values, bits, math.frexp(_largest(values))[1]))


class DynamicScale:
    """Rounds one tensor after another of a kind: a layer's inputs, its weights, or the gradients of its outputs.

    The scale is raised or lowered by how many values were beyond the range.

    Args:
        bits: of a value, 2 or more.

    >>> scale = DynamicScale(8)
    >>> scale.round(torch.tensor([0.3, -0.9]))
    tensor([ 0.2969, -0.8984])
    >>> scale.round(torch.tensor([0.3, 5.0])), scale.values, scale.overflows
    (tensor([0.2969, 0.9922]), 4, 1)
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.exponent: int | None = None
        """Values are below 2 to the power of it; None before the first that is not zero."""
        self.values = self.overflows = 0
        """Values so far, and those that were beyond the range, and cut."""
        self._tensors = self._seen = self._beyond = self._beyond_half = 0

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values in fixed point, as another tensor.

        Raises:
            TrainingError: one is infinite, or no number.
        """
        largest = _largest(values)
        if not math.isfinite(largest):
            raise TrainingError(
                f"--fixed-point: a value is {largest} where finite ones are multiplied: lower --lr, clip with "
                "--clip-norm, or look for a division by zero in the model"
            )
        if self.exponent is None:
            if not largest:
                return values
            self.exponent = math.frexp(largest)[1]  # the least e for which it is below 2**e
        result = rounded(values, self.bits, self.exponent)
        self._count(values, largest, 2.0**self.exponent)
        return result

    def _count(self, values: torch.Tensor, largest: float, end: float) -> None:
        """Count what is beyond the range and beyond its half; after a period, move the range."""
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
    """Return the largest magnitude; 0 of no values."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values.detach())
    return max(-float(low), float(high)) if not math.isnan(float(low)) else math.nan
