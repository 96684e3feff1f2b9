"""Small whole numbers in as many bits each as the largest may need."""

from __future__ import annotations

import numpy as np

from distbelief.codecs.codec import Symbols, cut
from distbelief.errors import UsageError

MOST_BITS = 12
"""Of a symbol."""
_AT_ONCE = 1 << 20
"""Symbols whose bits are apart at one time; a multiple of 8, so that they end with a byte."""


class Packed:
    """Symbols from 0 to 2**bits - 1, one behind the other, the high bit first.

    Args:
        bits: of each symbol, 1 to 12.

    >>> Packed(4).encode(np.array([1, 15, 2], dtype=np.uint16)).hex()
    '1f20'
    """

    def __init__(self, bits: int) -> None:
        if not 1 <= bits <= MOST_BITS:
            raise UsageError(f"{bits} bits for each symbol: must be 1 or more, and at most {MOST_BITS}")
        self.bits = bits

    def encode(self, values: Symbols) -> bytes:
        """As many bytes as all bits fill.

        Raises:
            UsageError: a symbol that needs more bits.
        """
        check_symbols(values, self.bits)
        shifts = np.arange(self.bits - 1, -1, -1, dtype=np.uint16)
        blocks = (values[at : at + _AT_ONCE, None] >> shifts & 1 for at in range(0, len(values), _AT_ONCE))
        return b"".join(np.packbits(block.astype(np.uint8)).tobytes() for block in blocks)

    def decode(self, data: bytes, count: int) -> Symbols:
        """The symbols.

        Raises:
            DataError: not the bytes of so many.
        """
        cut(data, (self.longest(count),), f"{count:,} symbols of {self.bits} bits")
        stored = np.frombuffer(data, np.uint8)
        found = np.empty(count, np.uint16)
        weights = (1 << np.arange(self.bits - 1, -1, -1)).astype(np.uint16)
        for at in range(0, count, _AT_ONCE):
            some = found[at : at + _AT_ONCE]
            part = stored[at * self.bits // 8 : -(-(at + len(some)) * self.bits // 8)]
            some[:] = np.unpackbits(part, count=len(some) * self.bits).reshape(-1, self.bits) @ weights
        return found

    def bound(self, values: Symbols) -> Symbols:
        """Nothing is lost."""
        return np.zeros_like(values)

    def size(self, values: Symbols) -> int:
        """How many bytes some symbols become."""
        return self.longest(len(values))

    def longest(self, count: int) -> int:
        """As long as it always is."""
        return -(-count * self.bits // 8)


def check_symbols(values: Symbols, bits: int) -> None:
    """Refuse symbols that do not fit.

    Raises:
        UsageError: naming the largest.
    """
    if len(values) and int(values.max()) >> bits:
        raise UsageError(f"symbol {int(values.max())} does not fit into {bits} bits: it may be {2**bits - 1} at most")
