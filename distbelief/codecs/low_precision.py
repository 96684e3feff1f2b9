"""Numbers with fewer bits: bf16, fp16, and int8 with a scale for each 1,024 values."""

from __future__ import annotations

import numpy as np
import torch

from distbelief.codecs.codec import Floats, check_finite, cut
from distbelief.errors import DataError, UsageError, unknown

PRECISIONS = ("bf16", "fp16", "int8")
BLOCK = 1024
"""Values of int8 that share a scale: blocks that fit the nearest cache are encoded fastest."""
LEVELS = 127
_SMALLEST = {"bf16": 2.0**-133, "fp16": 2.0**-24}
"""The smallest positive number of each."""
_DIGITS = {"bf16": 8, "fp16": 11}
"""Binary digits of each, the first one counted."""


class LowPrecision:
    """Float32 numbers in 16 or 8 bits, rounded to the nearest.

    Args:
        precision: bf16, fp16 or int8.

    Raises:
        UsageError: another.

    >>> codec = LowPrecision("int8")
    >>> data = codec.encode(np.array([1.0, -0.5, 0.0], dtype=np.float32))
    >>> len(data), codec.decode(data, 3).round(3).tolist()
    (7, [1.0, -0.5040000081062317, 0.0])
    """

    def __init__(self, precision: str) -> None:
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        self.precision = precision

    def encode(self, values: Floats) -> bytes:
        """Two bytes a value; in int8 one, and four for each block.

        Raises:
            UsageError: a value that is no finite number, or that fp16 or bf16 cannot hold.
        """
        check_finite(values)
        if self.precision == "int8":
            scales = _scales(values)
            spread = np.repeat(np.where(scales, scales, np.float32(1)), BLOCK)[: len(values)]
            whole = np.rint(values / spread).clip(-LEVELS, LEVELS).astype(np.int8)
            return bytes(scales.tobytes() + whole.tobytes())
        rounded = torch.tensor(values).to(_dtype(self.precision))
        if len(beyond := rounded.isfinite().logical_not().nonzero()):
            at = int(beyond[0])
            raise UsageError(f"value {at} of {len(values)} is {values[at]:g}, which overflows {self.precision}")
        return bytes(rounded.view(torch.int16).numpy().tobytes())

    def decode(self, data: bytes, count: int) -> Floats:
        """The numbers, as float32.

        Raises:
            DataError: not so many bytes, or numbers that are not finite.
        """
        what = f"{self.precision} of {count:,} values"
        if self.precision == "int8":
            scales, whole = cut(data, (4 * -(-count // BLOCK), count), what)
            spread = np.repeat(np.frombuffer(scales, np.float32), BLOCK)[:count]
            # a scale that is no number is refused below, where its product is
            with np.errstate(invalid="ignore", over="ignore"):
                values = np.frombuffer(whole, np.int8).astype(np.float32) * spread
        else:
            cut(data, (2 * count,), what)
            halves = torch.frombuffer(bytearray(data), dtype=torch.int16) if data else torch.zeros(0, dtype=torch.int16)
            values = np.asarray(halves.view(_dtype(self.precision)).float().numpy(), np.float32)
        if not np.isfinite(values).all():
            raise DataError(f"{what} hold one that is no finite number: they were spoilt")
        return values

    def bound(self, values: Floats) -> Floats:
        """Half of the last digit; in int8 half a level of the block's largest value."""
        if self.precision == "int8":
            half = np.repeat(_scales(values) * np.float32(0.5001), BLOCK)[: len(values)]
            return np.maximum(half, np.float32(2.0**-140), dtype=np.float32)
        half = np.abs(values) * np.float32(2.0 ** -_DIGITS[self.precision])
        return np.asarray(np.maximum(half, _SMALLEST[self.precision]), np.float32)

    def longest(self, count: int) -> int:
        """As long as it always is."""
        return count + 4 * -(-count // BLOCK) if self.precision == "int8" else 2 * count


def _scales(values: Floats) -> Floats:
    """What one level is worth, of each block."""
    blocks = np.zeros(-(-len(values) // BLOCK) * BLOCK, np.float32)
    blocks[: len(values)] = np.abs(values)
    largest: Floats = blocks.reshape(-1, BLOCK).max(1, initial=0)
    return largest / np.float32(LEVELS)


def _dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float16
