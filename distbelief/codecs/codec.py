"""Promises of every codec: values to bytes and back, and all other bytes refused.

`distbelief.testing.check_codec` holds each codec to them:
1. `decode(encode(values), len(values))` is as long as the values, of their dtype, and as near to them as is said.
2. The same values give the same bytes, and are not written to.
3. Bytes that were cut, lengthened or spoilt are refused with a `DataError`, or give as many values as were asked for;
   nothing is allocated that the bytes at hand do not pay for.
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
    """Encodes 1-D arrays of one dtype."""

    def encode(self, values: npt.NDArray[Value]) -> bytes:
        """Return the bytes of some values.

        Raises:
            UsageError: a value that it cannot hold.
        """
        ...

    def decode(self, data: bytes, count: int) -> npt.NDArray[Value]:
        """Return the `count` values that these bytes hold.

        Raises:
            DataError: the bytes are not those of so many values.
        """
        ...


def check_finite(values: Floats) -> None:
    """Refuse values that are no finite numbers.

    Raises:
        UsageError: naming the first.
    """
    strange = np.flatnonzero(~np.isfinite(values))
    if len(strange):
        raise UsageError(
            f"value {int(strange[0])} of {len(values)} is {values[strange[0]]}: only finite numbers can be encoded"
        )


def cut(data: bytes, sizes: tuple[int, ...], what: str) -> list[bytes]:
    """Cut bytes into parts, each of its size.

    Args:
        data: all of them.
        sizes: of the parts in bytes; a last one that is negative takes what the others leave.
        what: is encoded so, for the error.

    Raises:
        DataError: there are fewer bytes, or more.

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
