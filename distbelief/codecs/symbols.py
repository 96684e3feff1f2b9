"""Symbols, small whole numbers: each in as many bits as the largest may need, or by their frequency."""

from __future__ import annotations

import zlib

import numpy as np

from distbelief.codecs import MOST_BITS
from distbelief.codecs.codec import Symbols, cut
from distbelief.errors import DataError, UsageError


class Packed:
    """Symbols from 0 to 2**bits - 1: the lowest bit of all, then the next of all, up to the highest.

    Args:
        bits: of each symbol, 1 to 12.

    >>> Packed(4).encode(np.array([1, 15, 2], dtype=np.uint16)).hex()
    'c0604040'
    """

    def __init__(self, bits: int) -> None:
        if not 1 <= bits <= MOST_BITS:
            raise UsageError(f"{bits} bits for each symbol: must be 1 or more, and at most {MOST_BITS}")
        self.bits = bits

    def encode(self, values: Symbols) -> bytes:
        """Write each bit.

        Raises:
            UsageError: a symbol that needs more bits.
        """
        self.check(values)
        return _planes(values, self.bits)

    def decode(self, data: bytes, count: int) -> Symbols:
        """Read the symbols.

        Raises:
            DataError: not the bytes of so many.
        """
        cut(data, (self.bits * -(-count // 8),), f"{count:,} symbols of {self.bits} bits")
        return _of_planes(data, count, self.bits)

    def check(self, values: Symbols) -> None:
        """Refuse symbols that do not fit.

        Raises:
            UsageError: naming the largest.
        """
        if (largest := int(values.max(initial=0))) >> self.bits:
            most = (1 << self.bits) - 1
            raise UsageError(f"symbol {largest} does not fit into {self.bits} bits: it may be {most} at most")


class Huffman(Packed):
    """Symbols from 0 to 2**bits - 1 by the Huffman codes of deflate (RFC 1951), with a table for each 32,767 bytes.

    Symbols of few bits share a byte, so that frequent ones can have less than a bit. Of symbols of more than 8 bits the
    lowest ones are packed, in front: they are as good as random.

    Args:
        bits: that each symbol would have by itself, 1 to 12.

    >>> text = np.array([0, 1, 0, 2, 0, 0, 1, 0], dtype=np.uint16)
    >>> data = Huffman(2).encode(text)
    >>> len(data), Huffman(2).decode(data, 8).tolist()
    (4, [0, 1, 0, 2, 0, 0, 1, 0])
    """

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self._low = max(0, bits - 8)
        """Bits of each symbol that are packed."""
        self._shifts = np.arange(max(1, 8 // bits), dtype=np.uint16) * np.uint16(bits)
        """Places in a byte of the symbols that share it."""

    def encode(self, values: Symbols) -> bytes:
        """Write the packed bits, the codes, and their tables.

        Raises:
            UsageError: a symbol that needs more bits.
        """
        self.check(values)
        text = np.zeros(-(-len(values) // len(self._shifts)), np.uint8)
        for place, shift in enumerate(self._shifts):
            part = values[place :: len(self._shifts)] >> self._low << shift
            text[: len(part)] |= part.astype(np.uint8)
        deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        return _planes(values, self._low) + deflate.compress(text.tobytes()) + deflate.flush()

    def decode(self, data: bytes, count: int) -> Symbols:
        """Read the symbols.

        Raises:
            DataError: not the bytes of so many.
        """
        what = f"a Huffman code of {count:,} symbols"
        planes, coded = cut(data, (self._low * -(-count // 8), -1), what)
        length, inflate = -(-count // len(self._shifts)), zlib.decompressobj(-zlib.MAX_WBITS)
        if length > 8 * len(coded):  # each byte has a bit at least; deflate could repeat one without end
            raise DataError(f"{what} has {len(coded):,} bytes, which cannot hold them: it was cut or spoilt")
        try:
            text = np.frombuffer(inflate.decompress(coded, length + 1), np.uint8)
        except zlib.error as error:
            raise DataError(f"{what}: {error}") from error
        if len(text) != length or not inflate.eof or inflate.unused_data:
            raise DataError(f"{what} has more, or fewer: it was cut or spoilt")
        high: Symbols = text[:, None].astype(np.uint16) >> self._shifts & np.uint16((1 << self.bits - self._low) - 1)
        return high.reshape(-1)[:count] << np.uint16(self._low) | _of_planes(planes, count, self._low)


def symbol_codec(bits: int, huffman: bool) -> Packed:
    """Build the codec of symbols of so many bits."""
    return Huffman(bits) if huffman else Packed(bits)


def _planes(values: Symbols, bits: int) -> bytes:
    return b"".join(np.packbits((values & 1 << bit).astype(bool)).tobytes() for bit in range(bits))


def _of_planes(data: bytes, count: int, bits: int) -> Symbols:
    symbols, size = np.zeros(count, np.uint16), -(-count // 8)
    for bit in range(bits):
        plane = np.frombuffer(data[bit * size : (bit + 1) * size], np.uint8)
        symbols |= np.unpackbits(plane, count=count).astype(np.uint16) << bit
    return symbols
