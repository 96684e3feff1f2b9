"""Promises of every codec, which `distbelief.testing.check_codec` tests.

1. `decode(encode(values), len(values))` has the length and the dtype of the values, within the codec's error bound.
2. Encoding the same values gives the same bytes, and does not change the values.
3. Bytes that are cut, lengthened or corrupt are refused with a `DataError`, or give the requested number of values.
   Allocations are bounded by the length of the bytes.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from distbelief.errors import DataError, UsageError

Floats = npt.NDArray[np.float32]
Symbols = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]
Value = TypeVar("Value", bound=np.generic)


class Codec(Protocol[Value]):
    """Encoding of 1-D arrays of one dtype."""

    def encode(self, values: npt.NDArray[Value]) -> bytes:
        """Encode values, or raise a `UsageError` for a value that the encoding cannot hold."""
        ...

    def decode(self, data: bytes, count: int) -> npt.NDArray[Value]:
        """Decode `count` values, or raise a `DataError` if the bytes do not hold them."""
        ...


def check_finite(values: Floats) -> None:
    """Raise a `UsageError` for the first value that is not finite."""
    strange = np.flatnonzero(~np.isfinite(values))
    if len(strange):
        raise UsageError(
            f"value {int(strange[0])} of {len(values)} is {values[strange[0]]}: only finite numbers can be encoded"
        )


def cut(data: bytes, sizes: tuple[int, ...], what: str) -> list[bytes]:
    """Cut bytes into parts of these sizes; a negative last size takes the rest.

    Too few bytes, or too many, raise a `DataError`, in which `what` names the encoded values.

    >>> cut(b"abcd", (1, -1), "a word")
    [b'a', b'bcd']
    """
    rest = len(data) - sum(size for size in sizes if size >= 0)
    if rest < 0 or (rest and sizes[-1] >= 0):
        raise DataError(f"{what} is {len(data)} bytes long where it should be {len(data) - rest}: it was cut or spoilt")
    parts, at = [], 0
    for size in sizes:
        parts.append(data[at : at + size] if size >= 0 else data[at:])
        at += size
    return parts
