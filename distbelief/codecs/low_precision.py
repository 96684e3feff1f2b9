"""Numbers with fewer bits: bf16, fp16, and int8 with a scale for each 1,024 values."""

from __future__ import annotations

import numpy as np
import torch

from distbelief.codecs import PRECISIONS
from distbelief.codecs.codec import Floats, check_finite, cut
from distbelief.errors import DataError, UsageError, unknown

BLOCK = 1024
"""Values of int8 that share a scale: blocks that fit the nearest cache are encoded fastest."""
LEVELS = 127


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
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float16

    def encode(self, values: Floats) -> bytes:
        """Write two bytes a value; in int8 one, and four for each block.

        Raises:
            UsageError: a value that is no finite number, or that fp16 or bf16 cannot hold.
        """
        check_finite(values)
        if self.precision == "int8":
            blocks = np.zeros((-(-len(values) // BLOCK), BLOCK), np.float32)
            blocks.flat[: len(values)] = values
            scales: Floats = np.abs(blocks).max(1) / np.float32(LEVELS)
            levels = np.rint(blocks / np.where(scales, scales, 1)[:, None]).clip(-LEVELS, LEVELS).astype(np.int8)
            return scales.tobytes() + levels.tobytes()[: len(values)]
        rounded = torch.tensor(values).to(self._dtype)
        if len(beyond := rounded.isfinite().logical_not().nonzero()):
            at = int(beyond[0])
            raise UsageError(f"value {at} of {len(values)} is {values[at]:g}, which overflows {self.precision}")
        return bytes(rounded.view(torch.int16).numpy().tobytes())

    def decode(self, data: bytes, count: int) -> Floats:
        """Read the numbers.

        Raises:
            DataError: not so many bytes, or numbers that are not finite.
        """
        what = f"{self.precision} of {count:,} values"
        if self.precision == "int8":
            scales, levels = cut(data, (4 * -(-count // BLOCK), count), what)
            # a scale that is no number is refused below, where its product is
            with np.errstate(invalid="ignore", over="ignore"):
                values = np.frombuffer(levels, np.int8) * np.frombuffer(scales, np.float32).repeat(BLOCK)[:count]
        else:
            cut(data, (2 * count,), what)
            values = torch.tensor(np.frombuffer(data, np.int16)).view(self._dtype).float().numpy()
        if not np.isfinite(values).all():
            raise DataError(f"{what} hold one that is no finite number: they were spoilt")
        return values
