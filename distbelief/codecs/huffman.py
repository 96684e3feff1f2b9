"""Symbols by a canonical Huffman code: the frequent ones in fewer bits.

Symbols of few bits are taken several together, so that what is frequent can have less than a bit. What is written: the
length of each symbol's code (four bits each, 0 for one that does not occur), the bits of each chunk of 1,024
symbols (two bytes each), and the codes, one behind the other. Since it is known where each chunk begins,
all are decoded at once, a symbol of each at a time. Where only one symbol occurs, its code has no bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from distbelief.codecs.codec import Symbols, cut
from distbelief.codecs.packed import MOST_BITS, Packed, check_symbols
from distbelief.errors import DataError

LONGEST = 15
"""Bits of a code: so that a length has four bits, and the length of a chunk sixteen."""
CHUNK = 1024
TOGETHER_BITS = 6
"""Symbols are taken together while they have no more bits than these."""
_AT_ONCE = 1024
"""Chunks whose bits are apart at one time."""

Lengths = npt.NDArray[np.uint16]


class Huffman:
    """Symbols from 0 to 2**bits - 1 by their frequency.

    Args:
        bits: that each symbol would have by itself, 1 to 12.

    >>> text = np.array([0, 1, 0, 2, 0, 0, 1, 0], dtype=np.uint16)
    >>> data = Huffman(2).encode(text)
    >>> len(data), Huffman(2).decode(data, 8).tolist()
    (35, [0, 1, 0, 2, 0, 0, 1, 0])
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._together = max(1, TOGETHER_BITS // Packed(bits).bits)
        self._table = Packed(4)
        self._symbols = 1 << bits * self._together

    def encode(self, values: Symbols) -> bytes:
        """A table and the codes.

        Raises:
            UsageError: a symbol that needs more bits.
        """
        check_symbols(values, self.bits)
        if not len(values):
            return b""
        values = self._joined(values)
        lengths = code_lengths(np.bincount(values, minlength=self._symbols))
        spent = np.where((lengths > 0).sum() > 1, lengths, 0).astype(np.uint16)
        starts = np.arange(0, len(values), CHUNK)
        chunks = np.add.reduceat(spent[values].astype(np.int64), starts).astype("<u2")
        return self._table.encode(lengths) + chunks.tobytes() + b"".join(_stream(values, spent, canonical(lengths)))

    def decode(self, data: bytes, count: int) -> Symbols:
        """The symbols.

        Raises:
            DataError: not the bytes of so many.
        """
        what = f"a Huffman code of {count:,} symbols"
        if not count:
            cut(data, (0,), what)
            return np.zeros(0, np.uint16)
        words = -(-count // self._together)
        chunks = -(-words // CHUNK)
        table, sizes, stream = cut(data, (self._table.longest(self._symbols), 2 * chunks, -1), what)
        lengths = self._table.decode(table, self._symbols)
        ends = np.frombuffer(sizes, "<u2").astype(np.int64).cumsum()
        cut(stream, (-(-int(ends[-1]) // 8),), what)
        found = _walk(stream, np.concatenate([[0], ends]), _lookup(lengths), words)
        if found is None:
            raise DataError(f"{what} does not end where its chunks do: it was spoilt")
        return self._apart(found)[:count]

    def _joined(self, values: Symbols) -> Symbols:
        """Several symbols as one; behind the last ones zeros."""
        if self._together == 1:
            return values
        whole = np.zeros(-(-len(values) // self._together) * self._together, np.uint16)
        whole[: len(values)] = values
        parts = whole.reshape(-1, self._together)
        return parts @ (1 << np.arange(self._together) * self.bits).astype(np.uint16)

    def _apart(self, joined: Symbols) -> Symbols:
        if self._together == 1:
            return joined
        shifts = np.arange(self._together, dtype=np.uint16) * np.uint16(self.bits)
        return (joined[:, None] >> shifts & np.uint16((1 << self.bits) - 1)).reshape(-1)

    def bound(self, values: Symbols) -> Symbols:
        """Nothing is lost."""
        return np.zeros_like(values)

    def longest(self, count: int) -> int:
        """A table, and codes of the longest."""
        return 0 if not count else self._symbols // 2 + 2 * -(-count // CHUNK) + -(-count * LONGEST // 8)

    def size(self, values: Symbols) -> int:
        """How many bytes some symbols become."""
        if not len(values):
            return 0
        counts = np.bincount(self._joined(values), minlength=self._symbols)
        lengths = code_lengths(counts)
        bits = int((lengths * counts).sum()) if (lengths > 0).sum() > 1 else 0
        return self._symbols // 2 + 2 * -(-int(counts.sum()) // CHUNK) + -(-bits // 8)


def code_lengths(counts: npt.NDArray[np.int64]) -> Lengths:
    """The bits of each symbol's code, 15 at most; 0 for one that does not occur, 1 for one that is alone.

    >>> code_lengths(np.array([5, 2, 1, 0])).tolist()
    [1, 2, 2, 0]
    """
    lengths = np.zeros(len(counts), np.uint16)
    weights = counts.astype(np.int64)
    while True:
        for symbol, depth in _depths(weights):
            lengths[symbol] = depth
        if lengths.max(initial=0) <= LONGEST:
            return lengths
        # flatter counts make a flatter tree; all counts being 1, it is as flat as the alphabet allows
        weights = (weights + 1) // 2


def _depths(weights: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """How deep each symbol lies in a Huffman tree."""
    trees = [(int(weights[symbol]), int(symbol), [int(symbol)]) for symbol in np.flatnonzero(weights)]
    depths = {symbol: int(len(trees) == 1) for _, symbol, _ in trees}
    heapq.heapify(trees)
    while len(trees) > 1:
        (weight, _, members), (other, first, more) = heapq.heappop(trees), heapq.heappop(trees)
        for symbol in (*members, *more):
            depths[symbol] += 1
        heapq.heappush(trees, (weight + other, first, members + more))
    yield from depths.items()


def canonical(lengths: Lengths) -> Lengths:
    """The code of each symbol: shorter before longer, then in the order of the symbols.

    >>> [f"{code:b}" for code in canonical(np.array([1, 2, 2], dtype=np.uint16)).tolist()]
    ['0', '10', '11']
    """
    codes = np.zeros(len(lengths), np.uint16)
    code = last = 0
    for symbol in np.lexsort((np.arange(len(lengths)), lengths)):
        if length := int(lengths[symbol]):
            code <<= length - last
            codes[symbol] = code
            code, last = code + 1, length
    return codes


def _stream(values: Symbols, lengths: Lengths, codes: Lengths) -> Iterator[bytes]:
    """The codes of all symbols, in bytes; bits that fill none go before those that follow."""
    rest = np.zeros(0, np.uint8)
    for at in range(0, len(values), _AT_ONCE * CHUNK):
        some = values[at : at + _AT_ONCE * CHUNK]
        sizes, words = lengths[some], codes[some]
        ends = len(rest) + sizes.astype(np.int64).cumsum()
        bits = np.zeros(int(ends[-1]), np.uint8)
        bits[: len(rest)] = rest
        for back in range(int(sizes.max())):
            having = np.flatnonzero(sizes > back)
            bits[ends[having] - 1 - back] = words[having] >> back & 1
        whole = len(bits) // 8 * 8 if at + len(some) < len(values) else len(bits)
        yield np.packbits(bits[:whole]).tobytes()
        rest = bits[whole:]


def _lookup(lengths: Lengths) -> tuple[npt.NDArray[np.uint16], int]:
    """By the next bits of a stream, which symbol they begin with (times 16) and the bits of its code; and how many next
    bits.

    Raises:
        DataError: the lengths are of no Huffman code.
    """
    deepest, present = int(lengths.max()), np.flatnonzero(lengths)
    if len(present) == 1 and deepest == 1:
        return (present << 4).astype(np.uint16), 0
    filled = (1 << LONGEST - lengths[present].astype(np.int64)).sum()
    if filled != 1 << LONGEST:
        raise DataError(f"code lengths {lengths[:16].tolist()} are of no Huffman code: they were spoilt")
    order = present[np.lexsort((present, lengths[present]))]
    entries = (order << 4 | lengths[order]).astype(np.uint16)
    return np.repeat(entries, 1 << deepest - lengths[order].astype(np.int64)), deepest


def _walk(
    stream: bytes, starts: npt.NDArray[np.int64], lookup: tuple[npt.NDArray[np.uint16], int], count: int
) -> Symbols | None:
    """Decode all chunks at once, a symbol of each at a time; None where one does not end where the next begins."""
    table, deepest = lookup
    # a spoilt stream is read on beyond its end, by as much as a chunk may be long
    padded = np.frombuffer(stream + bytes(CHUNK * LONGEST // 8 + 3), np.uint8).astype(np.uint32)
    words = padded[:-2] << 16 | padded[1:-1] << 8 | padded[2:]
    positions, mask = starts[:-1].copy(), np.uint32((1 << deepest) - 1)
    chunks, last = len(positions), (count - 1) % CHUNK + 1
    found = np.empty((CHUNK if chunks > 1 else last, chunks), np.uint16)
    end = 0
    for step in range(len(found)):
        entries = table[words[positions >> 3] >> (24 - deepest - (positions & 7)).astype(np.uint32) & mask]
        found[step] = entries >> 4
        positions += entries & 15
        if step == last - 1:
            end = int(positions[-1])
    if end != starts[-1] or (positions[:-1] != starts[1:-1]).any():
        return None
    return np.ascontiguousarray(found.T).reshape(-1)[:count]


def coder(bits: int, huffman: bool) -> Huffman | Packed:
    """How symbols of so many bits are written."""
    return Huffman(bits) if huffman else Packed(bits)


def fits(bits: int) -> bool:
    """Whether symbols may have so many bits."""
    return 1 <= bits <= MOST_BITS
