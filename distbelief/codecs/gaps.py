"""Positions of a few among many by the gaps between them (Han et al. 2016, section 2).

A gap is a symbol of some bits. Its largest value stands for so many places without anything, in front of the gap that
follows; so, other than the paper's filler, it needs no value of its own.
"""

from __future__ import annotations

import numpy as np

from distbelief.codecs.codec import Positions, Symbols, cut
from distbelief.codecs.huffman import coder, fits
from distbelief.errors import DataError, UsageError

CANDIDATES = range(2, 11)
"""Bits of a gap that are tried."""
_HEAD = 5
"""Bytes in front: the bits of a gap, and how many symbols there are."""


class Gaps:
    """Ascending positions below `size`.

    Args:
        size: how many places there are.
        huffman: whether gaps are written by their frequency; else each in as many bits.
        bits: of a gap; 0 takes those that need the fewest bytes.

    >>> codec = Gaps(100, huffman=False)
    >>> data = codec.encode(np.array([3, 4, 90]))
    >>> len(data), codec.decode(data, 3).tolist()
    (8, [3, 4, 90])
    """

    def __init__(self, size: int, huffman: bool = True, bits: int = 0) -> None:
        if bits and not fits(bits):
            raise UsageError(f"gaps of {bits} bits: must be 1 to 12, or 0 for those that need the fewest bytes")
        self.size, self.huffman, self.bits = size, huffman, bits

    def encode(self, values: Positions) -> bytes:
        """The gaps of the positions.

        Raises:
            UsageError: they do not ascend, or are not below `size`.
        """
        gaps = np.diff(values, prepend=-1) - 1
        if len(values) and (gaps.min() < 0 or values[-1] >= self.size):
            raise UsageError(f"positions must ascend from 0 or more, and be below {self.size}")
        if not len(values):
            return b""
        bits = self.bits or min(CANDIDATES, key=lambda one: coder(one, self.huffman).size(_symbols(gaps, one)))
        symbols = _symbols(gaps, bits)
        return bytes([bits]) + len(symbols).to_bytes(4, "little") + coder(bits, self.huffman).encode(symbols)

    def decode(self, data: bytes, count: int) -> Positions:
        """The positions.

        Raises:
            DataError: not the bytes of so many, or positions beyond `size`.
        """
        what = f"gaps of {count:,} positions among {self.size:,}"
        if not count:
            cut(data, (0,), what)
            return np.zeros(0, np.int64)
        head, stream = cut(data, (_HEAD, -1), what)
        bits, length = head[0], int.from_bytes(head[1:], "little")
        if not fits(bits) or not count <= length <= count + self.size // ((1 << bits) - 1):
            raise DataError(f"{what} are {length:,} symbols of {bits} bits: they were spoilt")
        symbols = coder(bits, self.huffman).decode(stream, length)
        filler = (1 << bits) - 1
        # each place that holds something takes one, and a filler as many as its value
        reached = np.cumsum(symbols.astype(np.int64) + (symbols < filler))
        positions = reached[symbols < filler] - 1
        if len(positions) != count or reached[-1] > self.size or symbols[-1] == filler:
            raise DataError(f"{what} reach {int(reached[-1]):,} with {len(positions):,}: they were spoilt")
        return positions

    def bound(self, values: Positions) -> Positions:
        """Nothing is lost."""
        return np.zeros_like(values)

    def longest(self, count: int) -> int:
        """Positions as far apart as they may be."""
        bits = range(1, 13) if not self.bits else (self.bits,)
        return max(_HEAD + coder(b, self.huffman).longest(count + self.size // ((1 << b) - 1)) for b in bits)


def _symbols(gaps: Positions, bits: int) -> Symbols:
    """The gaps, each behind its fillers."""
    filler = (1 << bits) - 1
    at = np.cumsum(gaps // filler + 1) - 1
    symbols = np.full(int(at[-1]) + 1, filler, np.uint16)
    symbols[at] = gaps % filler
    return symbols
