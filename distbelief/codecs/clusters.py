"""Numbers that share a few values: k-means in one dimension, on sorted numbers (Han et al. 2016, section 3)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from distbelief.codecs.codec import Floats, Symbols, check_finite, cut
from distbelief.codecs.huffman import coder
from distbelief.codecs.packed import Packed
from distbelief.errors import DataError, UsageError, unknown

STARTS = ("linear", "density", "random")
ROUNDS = 300
"""Most rounds of k-means; it has nearly always come to rest long before."""


def cluster(values: Floats, clusters: int, start: str = "linear", seed: int = 0) -> tuple[Floats, Symbols]:
    """The centers of some numbers, ascending, and which is nearest to each: Lloyd's k-means until it comes to rest.

    Args:
        values: finite numbers.
        clusters: how many centers, no more than there are different numbers.
        start: from where: linear (evenly from the least number to the largest), density (as many numbers between each
            two), or random (some of the numbers).
        seed: of random.

    Raises:
        UsageError: a number that is not finite, more clusters than different numbers, or no such start.

    >>> cluster(np.array([0.0, 9.0, 1.0, 8.0], dtype=np.float32), 2)
    (array([0.5, 8.5], dtype=float32), array([0, 1, 0, 1], dtype=uint16))
    """
    if start not in STARTS:
        raise unknown("start", start, STARTS)
    check_finite(values)
    different = np.unique(values)
    if not 1 <= clusters <= len(different):
        raise UsageError(
            f"{clusters} clusters of {len(different)} different values: there must be 1 or more, and no more than these"
        )
    ordered = np.sort(values).astype(np.float64)
    sums = np.concatenate([[0.0], ordered.cumsum()])
    centers = _start(ordered, different, clusters, start, seed)
    for _ in range(ROUNDS):
        cuts = np.searchsorted(ordered, (centers[1:] + centers[:-1]) / 2)
        edges = np.concatenate([[0], cuts, [len(ordered)]])
        members = np.diff(edges)
        # a center without members stays where it is
        means = np.where(members > 0, np.diff(sums[edges]) / np.maximum(members, 1), centers)
        if np.array_equal(means, centers):
            break
        centers = np.sort(means)
    codebook = centers.astype(np.float32)
    return codebook, nearest(values, codebook)


def nearest(values: Floats, codebook: Floats) -> Symbols:
    """Which of the ascending values of a codebook is nearest to each number; of two, the lower."""
    middles = (codebook[1:].astype(np.float64) + codebook[:-1]) / 2
    return np.searchsorted(middles, values).astype(np.uint16)


def _start(
    ordered: npt.NDArray[np.float64], different: Floats, clusters: int, start: str, seed: int
) -> npt.NDArray[np.float64]:
    if start == "linear":
        return np.linspace(ordered[0], ordered[-1], clusters)
    if start == "density":
        return np.quantile(ordered, (np.arange(clusters) + 0.5) / clusters)
    return np.sort(np.random.default_rng(seed).choice(different, clusters, replace=False)).astype(np.float64)


class Clusters:
    """Float32 numbers as one of 2**bits shared values each: a codebook, and ids.

    Args:
        bits: of an id, 1 to 12.
        start: of k-means, as for `cluster`.
        huffman: whether ids are written by their frequency.
        seed: of random starts.

    >>> codec = Clusters(1)
    >>> data = codec.encode(np.array([0.0, 9.0, 1.0, 8.0], dtype=np.float32))
    >>> codec.decode(data, 4).tolist()
    [0.5, 8.5, 0.5, 8.5]
    """

    def __init__(self, bits: int, start: str = "linear", huffman: bool = False, seed: int = 0) -> None:
        self.bits, self.start, self.huffman, self.seed = Packed(bits).bits, start, huffman, seed

    def encode(self, values: Floats) -> bytes:
        """The codebook and the ids; fewer clusters where there are fewer different numbers.

        Raises:
            UsageError: a number that is not finite.
        """
        if not len(values):
            return b""
        check_finite(values)
        clusters = min(1 << self.bits, len(np.unique(values)))
        return write(*cluster(values, clusters, self.start, self.seed), self.bits, self.huffman)

    def decode(self, data: bytes, count: int) -> Floats:
        """Each number's shared value.

        Raises:
            DataError: not the bytes of so many, or an id beyond the codebook.
        """
        if not count:
            cut(data, (0,), "shared values")
            return np.zeros(0, np.float32)
        codebook, ids = read(data, count, self.bits, self.huffman)
        return codebook[ids]

    def bound(self, values: Floats) -> Floats:
        """A number may be anywhere in its cluster: the whole range."""
        return np.full_like(values, np.ptp(values) if len(values) else 0)

    def longest(self, count: int) -> int:
        """Whole codebook and longest ids."""
        return 2 + 4 * (1 << self.bits) + coder(self.bits, self.huffman).longest(count) if count else 0


def write(codebook: Floats, ids: Symbols, bits: int, huffman: bool) -> bytes:
    """A codebook and ids: how many shared values less one (two bytes), these, and the ids."""
    return (len(codebook) - 1).to_bytes(2, "little") + codebook.tobytes() + coder(bits, huffman).encode(ids)


def read(data: bytes, count: int, bits: int, huffman: bool) -> tuple[Floats, Symbols]:
    """The codebook and the `count` ids that `write` wrote.

    Raises:
        DataError: not the bytes of so many, an id beyond the codebook, or a shared value that is not finite.
    """
    what = f"a codebook and {count:,} ids of {bits} bits"
    head, rest = cut(data, (2, -1), what)
    entries = int.from_bytes(head, "little") + 1
    stored, stream = cut(rest, (4 * entries, -1), what)
    codebook, ids = np.frombuffer(stored, np.float32), coder(bits, huffman).decode(stream, count)
    if (len(ids) and int(ids.max()) >= entries) or not np.isfinite(codebook).all():
        raise DataError(f"{what}: an id is beyond the codebook of {entries}, or a shared value is no number")
    return codebook, ids
