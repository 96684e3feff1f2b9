"""A tensor as a file holds it: all of its values, or those that were kept, each its own or one that many share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from distbelief.codecs import MOST_BITS, PRECISIONS
from distbelief.codecs.codec import Positions, Symbols, cut
from distbelief.codecs.gaps import Gaps
from distbelief.codecs.low_precision import LowPrecision
from distbelief.codecs.symbols import symbol_codec

DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""In a file each is a number: new ones are added at the end."""
VALUES_LIMIT = 1 << 34
"""Most values of all tensors: what is pruned has no bytes in a file, and needs memory all the same."""
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
    """All values, the kept ones, or the codebook that they share, flat."""
    positions: Positions | None = None
    """Places of the kept values, ascending, in the flattened tensor; None where all are kept."""
    ids: Symbols | None = None
    """Entry of the codebook that each kept value is; None where each is its own."""
    bits: int = 0
    """Bits of an id; the codebook has an entry for each."""
    precision: str = ""
    """Form of values of float32 that are not shared: bf16, fp16 or int8; "" as they are."""

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def kept(self) -> int:
        """Number of values that are not pruned."""
        return self.size if self.positions is None else len(self.positions)

    @property
    def constrained(self) -> bool:
        """True where values were pruned, or share others."""
        return self.positions is not None or self.ids is not None

    def dense(self) -> torch.Tensor:
        """Return the tensor itself: what was pruned is zero."""
        values = self.values if self.ids is None else self.values[torch.from_numpy(self.ids.astype(np.int32))]
        if self.positions is not None:
            values = torch.zeros(self.size, dtype=values.dtype).index_copy_(0, torch.from_numpy(self.positions), values)
        return values.reshape(self.shape)

    def encode(self, huffman: bool) -> tuple[bytes, bytes]:
        """Write the positions, and the values."""
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
    """Values that are not pruned; None for all."""
    bits: Annotated[int, Meta(ge=0, le=MOST_BITS)]
    precision: Annotated[int, Meta(ge=0, le=len(PRECISIONS))]
    """0 for values as they are, else one of `PRECISIONS`, counted from 1."""
    where: Count
    """Bytes of the positions."""
    what: Count
    """Bytes of the values."""

    def __post_init__(self) -> None:
        # a tensor of which all is kept has no positions, and only float32 is written in fewer bits, in one way
        beyond = self.where if self.kept is None else self.kept - self.size
        if beyond > 0 or (self.bits > 0) + (self.precision > 0) > (DTYPES[self.dtype] == "float32"):
            raise ValueError(f"no tensor is like {self}")

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def decode(self, huffman: bool, where: bytes, what: bytes) -> Stored:
        """Read the tensor that `Stored.encode` wrote.

        Raises:
            DataError: the bytes are not of such a tensor.
        """
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
