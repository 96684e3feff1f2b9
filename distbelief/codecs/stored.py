"""A tensor as a file holds it: all of its values, or those that were kept, each its own or one that many share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from distbelief.codecs import clusters
from distbelief.codecs.codec import Positions, Symbols
from distbelief.codecs.gaps import Gaps
from distbelief.codecs.low_precision import LowPrecision
from distbelief.errors import DataError

DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""In a file each is a number: new ones are added at the end."""


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
    """1-D: all values, the kept ones, or the codebook that they share."""
    positions: Positions | None = None
    """Of the kept values, ascending, in the flattened tensor; None where all are."""
    ids: Symbols | None = None
    """Which entry of the codebook each kept value is; None where each is its own."""
    bits: int = 0
    """Of an id."""
    precision: str = ""
    """How values of float32 that are not shared are written: bf16, fp16 or int8; "" for as they are."""

    @property
    def size(self) -> int:
        """Values of the tensor."""
        return math.prod(self.shape)

    @property
    def kept(self) -> int:
        """Values that are not pruned."""
        return self.size if self.positions is None else len(self.positions)

    @property
    def constrained(self) -> bool:
        """Whether values were pruned, or share others."""
        return self.positions is not None or self.ids is not None

    def dense(self) -> torch.Tensor:
        """The tensor itself: what was pruned is zero."""
        values = self.values if self.ids is None else self.values[torch.from_numpy(self.ids.astype(np.int32))]
        if self.positions is not None:
            whole = torch.zeros(self.size, dtype=values.dtype)
            whole[torch.from_numpy(self.positions)] = values
            values = whole
        return values.reshape(self.shape)

    def encode(self, huffman: bool) -> tuple[bytes, bytes]:
        """The bytes of the positions and of the values."""
        where = b"" if self.positions is None else Gaps(self.size, huffman).encode(self.positions)
        if self.precision:
            return where, LowPrecision(self.precision).encode(self.values.numpy())
        if self.ids is None:
            return where, self.values.contiguous().view(torch.uint8).numpy().tobytes()
        return where, clusters.write(self.values.numpy(), self.ids, self.bits, huffman)


def decode(
    shape: tuple[int, ...], dtype: str, kept: int | None, coded: tuple[int, str, bool], where: bytes, what: bytes
) -> Stored:
    """The tensor that `Stored.encode` wrote.

    Args:
        shape: of the tensor.
        dtype: of its values, one of `DTYPES`.
        kept: values that are not pruned; None for all.
        coded: the bits of an id, 0 where each value is its own; the precision of values; and whether symbols are
            written by their frequency.
        where: the bytes of the positions.
        what: the bytes of the values.

    Raises:
        DataError: they are not of such a tensor.
    """
    size, (bits, precision, huffman) = math.prod(shape), coded
    positions = None if kept is None else Gaps(size, huffman).decode(where, kept)
    count = size if kept is None else kept
    if bits:
        codebook, ids = clusters.read(what, count, bits, huffman)
        return Stored(shape, torch.tensor(codebook), positions, ids, bits)
    if precision:
        values = torch.tensor(LowPrecision(precision).decode(what, count))
        return Stored(shape, values, positions, precision=precision)
    kind = getattr(torch, dtype)
    if len(what) != count * kind.itemsize:
        raise DataError(f"{count:,} values of {dtype} in {len(what):,} bytes: they were cut or spoilt")
    stored = torch.frombuffer(bytearray(what), dtype=torch.uint8) if what else torch.zeros(0, dtype=torch.uint8)
    return Stored(shape, stored.view(kind), positions)
