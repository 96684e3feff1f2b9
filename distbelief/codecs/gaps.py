"""Positions of a few among many by the gaps between them (Han et al. 2016, section 2).

A gap is a symbol of some bits. Its largest value stands for so many places without anything, in front of the gap that
follows; so, other than the paper's filler, it needs no value of its own.
"""

from __future__ import annotations

import numpy as np

from distbelief.codecs import MOST_BITS
from distbelief.codecs.codec import Positions, cut
from distbelief.codecs.symbols import symbol_codec
from distbelief.errors import DataError, UsageError

CANDIDATES = range(2, 11)
"""Bits of a gap that are tried."""


class Gaps:
    """Ascending positions below `size`, in gaps of the bits that need the fewest bytes.

    Args:
        size: how many places there are.
        huffman: whether gaps are written by their frequency; else each in as many bits.

    >>> codec = Gaps(100, huffman=False)
    >>> data = codec.encode(np.array([3, 4, 90]))
    >>> len(data), codec.decode(data, 3).tolist()
    (9, [3, 4, 90])
    """

    def __init__(self, size: int, huffman: bool = True) -> None:
        self.size, self.huffman = size, huffman

    def encode(self, values: Positions) -> bytes:
        """Write the bits of a gap, how many symbols there are (four bytes), and these.

        Raises:
            UsageError: they do not ascend, or are not below `size`.
        """
        gaps = np.diff(values, prepend=-1) - 1
        if (gaps < 0).any() or (values >= self.size).any():
            raise UsageError(f"positions must ascend from 0 or more, and be below {self.size}")
        return min((self._encode(gaps, bits) for bits in CANDIDATES), key=len)

    def _encode(self, gaps: Positions, bits: int) -> bytes:
        filler = (1 << bits) - 1
        ends = np.cumsum(gaps // filler + 1)
        symbols = np.full(ends[-1] if len(ends) else 0, filler, np.uint16)
        symbols[ends - 1] = gaps % filler
        return bytes([bits]) + len(symbols).to_bytes(4, "little") + symbol_codec(bits, self.huffman).encode(symbols)

    def decode(self, data: bytes, count: int) -> Positions:
        """Read the positions.

        Raises:
            DataError: not the bytes of so many, or positions beyond `size`.
        """
        what = f"gaps of {count:,} positions among {self.size:,}"
        head, stream = cut(data, (5, -1), what)
        bits, length = head[0], int.from_bytes(head[1:], "little")
        most = count + self.size // ((1 << bits) - 1) if 1 <= bits <= MOST_BITS else -1
        if not count <= length <= most:
            raise DataError(f"{what} are {length:,} symbols of {bits} bits: they were spoilt")
        symbols, filler = symbol_codec(bits, self.huffman).decode(stream, length), (1 << bits) - 1
        # each place that holds something takes one, and a filler as many as its value
        positions = np.cumsum(symbols + (symbols < filler), dtype=np.int64)[symbols < filler] - 1
        if len(positions) != count or (positions >= self.size).any():
            raise DataError(f"{what} are {len(positions):,}, or reach further: they were spoilt")
        return positions
