"""Codecs of symbols (small integers), packed or by Huffman codes; and of positions, by the gaps between them."""

from __future__ import annotations

import zlib

import numpy as np

from distbelief.codecs import MOST_BITS
from distbelief.codecs.codec import Positions, Symbols, cut
from distbelief.errors import DataError, UsageError


class Packed:
    """Codec of symbols from 0 to 2**bits - 1 by bit planes, the plane of the lowest bits first.

    A symbol has 1 to 12 bits.

    >>> Packed(4).encode(np.array([1, 15, 2], dtype=np.uint16)).hex()
    'c0604040'
    """

    def __init__(self, bits: int) -> None:
        if not 1 <= bits <= MOST_BITS:
            raise UsageError(f"{bits} bits for each symbol: must be 1 or more, and at most {MOST_BITS}")
        self.bits = bits

    def encode(self, values: Symbols) -> bytes:
        self.check(values)
        return _planes(values, self.bits)

    def decode(self, data: bytes, count: int) -> Symbols:
        cut(data, (self.bits * -(-count // 8),), f"{count:,} symbols of {self.bits} bits")
        return _of_planes(data, count, self.bits)

    def check(self, values: Symbols) -> None:
        """Raise a `UsageError` for a symbol that needs more bits."""
        if (largest := int(values.max(initial=0))) >> self.bits:
            most = (1 << self.bits) - 1
            raise UsageError(f"symbol {largest} does not fit into {self.bits} bits: it may be {most} at most")


class Huffman(Packed):
    """Codec of symbols from 0 to 2**bits - 1 by the Huffman codes of deflate (RFC 1951), with a table per 32,767 bytes.

    Symbols of few bits share a byte, so that frequent ones can take less than a bit. For symbols of more than 8 bits,
    the lowest bits are packed in front of the codes, since they are nearly random.

    >>> text = np.array([0, 1, 0, 2, 0, 0, 1, 0], dtype=np.uint16)
    >>> data = Huffman(2).encode(text)
    >>> len(data), Huffman(2).decode(data, 8).tolist()
    (4, [0, 1, 0, 2, 0, 0, 1, 0])
    """

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self._low = max(0, bits - 8)
        """Number of packed bits of each symbol."""
        self._shifts = np.arange(max(1, 8 // bits), dtype=np.uint16) * np.uint16(bits)
        """Positions in a byte of the symbols that share it."""

    def encode(self, values: Symbols) -> bytes:
        """Write the packed bits, and the codes with their tables."""
        self.check(values)
        text = np.zeros(-(-len(values) // len(self._shifts)), np.uint8)
        for place, shift in enumerate(self._shifts):
            part = values[place :: len(self._shifts)] >> self._low << shift
            text[: len(part)] |= part.astype(np.uint8)
        deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        return _planes(values, self._low) + deflate.compress(text.tobytes()) + deflate.flush()

    def decode(self, data: bytes, count: int) -> Symbols:
        what = f"a Huffman code of {count:,} symbols"
        planes, coded = cut(data, (self._low * -(-count // 8), -1), what)
        length, inflate = -(-count // len(self._shifts)), zlib.decompressobj(-zlib.MAX_WBITS)
        if length > 8 * len(coded):  # each byte takes at least a bit; deflate could repeat one endlessly
            raise DataError(f"{what} has {len(coded):,} bytes, which cannot hold them: it was cut or spoilt")
        try:
            text = np.frombuffer(inflate.decompress(coded, length + 1), np.uint8)
        except zlib.error as error:
            raise DataError(f"{what}: {error}") from error
        if len(text) != length or not inflate.eof or inflate.unused_data:
            raise DataError(f"{what} has more bytes or fewer than announced: it was cut or spoilt")
        high: Symbols = text[:, None].astype(np.uint16) >> self._shifts & np.uint16((1 << self.bits - self._low) - 1)
        return high.reshape(-1)[:count] << np.uint16(self._low) | _of_planes(planes, count, self._low)


def symbol_codec(bits: int, huffman: bool) -> Packed:
    """Make the codec of symbols of a number of bits."""
    return Huffman(bits) if huffman else Packed(bits)


def _planes(values: Symbols, bits: int) -> bytes:
    return b"".join(np.packbits((values & 1 << bit).astype(bool)).tobytes() for bit in range(bits))


def _of_planes(data: bytes, count: int, bits: int) -> Symbols:
    symbols, size = np.zeros(count, np.uint16), -(-count // 8)
    for bit in range(bits):
        plane = np.frombuffer(data[bit * size : (bit + 1) * size], np.uint8)
        symbols |= np.unpackbits(plane, count=count).astype(np.uint16) << bit
    return symbols


CANDIDATES = range(2, 11)
"""Numbers of bits for a gap that are tried."""


class Gaps:
    """Codec of ascending positions below `size` by the gaps between them (Han et al. 2016, section 2).

    A gap is a symbol, with the number of bits that gives the fewest bytes. The largest symbol is a filler: it stands
    for that number of empty positions before the next gap. Unlike the paper's filler it needs no value of its own.
    Without Huffman codes all gaps have the same number of bits.

    >>> codec = Gaps(100, huffman=False)
    >>> data = codec.encode(np.array([3, 4, 90]))
    >>> len(data), codec.decode(data, 3).tolist()
    (9, [3, 4, 90])
    """

    def __init__(self, size: int, huffman: bool = True) -> None:
        self.size, self.huffman = size, huffman

    def encode(self, values: Positions) -> bytes:
        """Write the bits of a gap, the number of symbols (four bytes), and the symbols."""
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
        """Read the positions; refuse those beyond `size`."""
        what = f"gaps of {count:,} positions among {self.size:,}"
        head, stream = cut(data, (5, -1), what)
        bits, length = head[0], int.from_bytes(head[1:], "little")
        most = count + self.size // ((1 << bits) - 1) if 1 <= bits <= MOST_BITS else -1
        if not count <= length <= most:
            raise DataError(f"{what} are {length:,} symbols of {bits} bits: they were spoilt")
        symbols, filler = symbol_codec(bits, self.huffman).decode(stream, length), (1 << bits) - 1
        # a kept position counts as one position, a filler as its value
        positions = np.cumsum(symbols + (symbols < filler), dtype=np.int64)[symbols < filler] - 1
        if len(positions) != count or (positions >= self.size).any():
            raise DataError(f"{what} are {len(positions):,}, or reach further: they were spoilt")
        return positions
