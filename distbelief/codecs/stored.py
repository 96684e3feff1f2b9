"""Tensor as a `.dbz` file holds it: all values or the kept ones, individual or shared, in full or low precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from distbelief.codecs import MOST_BITS, PRECISIONS
from distbelief.codecs.codec import Floats, Positions, Symbols, check_finite, cut
from distbelief.codecs.symbols import Gaps, symbol_codec
from distbelief.errors import DataError, UsageError, unknown

DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Dtypes; files contain their numbers, so new ones are added at the end."""
VALUES_LIMIT = 1 << 34
"""Most values of all tensors: pruned values have no bytes in a file, but need memory."""
Count = Annotated[int, Meta(ge=0, le=1 << 36)]


@dataclass(frozen=True)
class Stored:
    """One tensor.

    >>> some = Stored((2, 2), torch.tensor([0.5, 2.0]), np.array([0, 3]), np.array([1, 0], dtype=np.uint16), 1)
    >>> some.dense()
    tensor([[2.0000, 0.0000],
            [0.0000, 0.5000]])
    """

    shape: tuple[int, ...]
    values: torch.Tensor
    """All values, the kept values, or the codebook, flat."""
    positions: Positions | None = None
    """Positions of the kept values, ascending, in the flat tensor; None if all are kept."""
    ids: Symbols | None = None
    """Entry of the codebook for each kept value; None without a codebook."""
    bits: int = 0
    """Bits of an id; the codebook has 2**bits entries."""
    precision: str = ""
    """Encoding of float32 values without a codebook: bf16, fp16 or int8; "" for none."""

    @property
    def size(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    @property
    def kept(self) -> int:
        """Return the number of values that are not pruned."""
        return self.size if self.positions is None else len(self.positions)

    @property
    def constrained(self) -> bool:
        """Return whether values are pruned or shared."""
        return self.positions is not None or self.ids is not None

    def dense(self) -> torch.Tensor:
        """Return the dense tensor, in which pruned values are zero."""
        values = self.values if self.ids is None else self.values[torch.from_numpy(self.ids.astype(np.int32))]
        if self.positions is not None:
            values = torch.zeros(self.size, dtype=values.dtype).index_copy_(0, torch.from_numpy(self.positions), values)
        return values.reshape(self.shape)

    def encode(self, huffman: bool) -> tuple[bytes, bytes]:
        """Encode the positions and the values."""
        where = b"" if self.positions is None else Gaps(self.size, huffman).encode(self.positions)
        if self.precision:
            return where, LowPrecision(self.precision).encode(self.values.numpy())
        what = self.values.contiguous().view(torch.uint8).numpy().tobytes()
        return where, what if self.ids is None else what + symbol_codec(self.bits, huffman).encode(self.ids)


class TensorHeader(msgspec.Struct, array_like=True, frozen=True):
    """One tensor in the header of a file."""

    name: str
    dtype: Annotated[int, Meta(ge=0, lt=len(DTYPES))]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    kept: Count | None
    """Number of values that are not pruned; None for all."""
    bits: Annotated[int, Meta(ge=0, le=MOST_BITS)]
    precision: Annotated[int, Meta(ge=0, le=len(PRECISIONS))]
    """Number in `PRECISIONS`, counted from 1; 0 for none."""
    where: Count
    """Bytes of the positions."""
    what: Count
    """Bytes of the values."""

    def __post_init__(self) -> None:
        # a tensor without pruned values has no positions; only float32 has a codebook or a precision, not both
        beyond = self.where if self.kept is None else self.kept - self.size
        if beyond > 0 or (self.bits > 0) + (self.precision > 0) > (DTYPES[self.dtype] == "float32"):
            raise ValueError(f"no tensor is like {self}")

    @property
    def size(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    def decode(self, huffman: bool, where: bytes, what: bytes) -> Stored:
        """Decode the bytes of `Stored.encode`, or raise a `DataError`."""
        count = self.size if self.kept is None else self.kept
        positions = None if self.kept is None else Gaps(self.size, huffman).decode(where, count)
        if self.precision:
            precision = PRECISIONS[self.precision - 1]
            rounded = torch.from_numpy(LowPrecision(precision).decode(what, count))
            return Stored(self.shape, rounded, positions, precision=precision)
        dtype = getattr(torch, DTYPES[self.dtype])
        entries, rest = (1 << self.bits, -1) if self.bits else (count, 0)
        stored, coded = cut(what, (entries * dtype.itemsize, rest), f"{entries:,} values of {DTYPES[self.dtype]}")
        values = torch.tensor(np.frombuffer(stored, np.uint8)).view(dtype)
        ids = symbol_codec(self.bits, huffman).decode(coded, count) if self.bits else None
        return Stored(self.shape, values, positions, ids, self.bits)


BLOCK = 1024
"""Number of int8 values with one scale: blocks that fit the nearest cache are encoded fastest."""
LEVELS = 127


class LowPrecision:
    """Codec of float32 numbers in 16 or 8 bits (bf16, fp16 or int8), rounded to the nearest.

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
        """Write two bytes per value, or with int8 one per value and four per block."""
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
        """Read the numbers; refuse a wrong number of bytes, and numbers that are not finite."""
        what = f"{self.precision} of {count:,} values"
        if self.precision == "int8":
            scales, levels = cut(data, (4 * -(-count // BLOCK), count), what)
            # a scale that is not finite is refused below with its products
            with np.errstate(invalid="ignore", over="ignore"):
                values = np.frombuffer(levels, np.int8) * np.frombuffer(scales, np.float32).repeat(BLOCK)[:count]
        else:
            cut(data, (2 * count,), what)
            values = torch.tensor(np.frombuffer(data, np.int16)).view(self._dtype).float().numpy()
        if not np.isfinite(values).all():
            raise DataError(f"{what} hold a number that is not finite: they were spoilt")
        return values
