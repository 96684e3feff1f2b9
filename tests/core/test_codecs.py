"""Codecs: their conformance suite, and what each is worth, by oracles of their own."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest

from distbelief.codecs import PRECISIONS, symbols
from distbelief.codecs.stored import LowPrecision
from distbelief.codecs.symbols import Gaps, Huffman, Packed
from distbelief.errors import DataError, UsageError
from distbelief.lab.compress.compressing import cluster
from distbelief.lab.compress.options import STARTS
from distbelief.testing import check_codec

CHANCE = np.random.default_rng(7)
NORMAL = CHANCE.normal(size=9001).astype(np.float32)
NUMBERS = [
    NORMAL,
    NORMAL[:1],
    np.zeros(1030, np.float32),
    np.array([1e-40, 3e38, -1e-45], np.float32),
    np.repeat(np.float32([1, 2]), 9),
]
SMALL = [values for values in NUMBERS if np.abs(values).max() < 6e4]
SYMBOLS = [
    CHANCE.geometric(0.3, 2053).clip(0, 15).astype(np.uint16),
    CHANCE.integers(0, 16, 70_000).astype(np.uint16),
    np.full(1025, 3, np.uint16),
    np.array([15], np.uint16),
    np.repeat(np.arange(15, dtype=np.uint16), np.array([2**one for one in range(12)] + [1, 1, 1])),
]
PLACES = [
    np.flatnonzero(CHANCE.random(50_000) < 0.08),
    np.array([0]),
    np.array([49_999]),
    np.arange(50_000),
    np.array([7, 8, 40_000]),
]


def half_of_the_last_digit(digits: int, smallest: float) -> Any:
    return lambda values: np.maximum(np.abs(values) * 2.0**-digits, smallest)


def half_a_level(values: Any) -> Any:
    """Half of a 127th of the largest value among each 1,024."""
    blocks = [np.abs(values[at : at + 1024]) for at in range(0, len(values), 1024)]
    return np.concatenate([np.zeros(0), *(np.full(len(one), max(one.max() / 253.9, 2.0**-140)) for one in blocks)])


CODECS: dict[str, tuple[Any, ...]] = {
    "bf16": (LowPrecision("bf16"), NUMBERS, half_of_the_last_digit(8, 2.0**-133)),
    "fp16": (LowPrecision("fp16"), SMALL, half_of_the_last_digit(11, 2.0**-24)),
    "int8": (LowPrecision("int8"), NUMBERS, half_a_level),
    "packed": (Packed(4), SYMBOLS),
    "packed, 12 bits": (Packed(12), SYMBOLS),
    "huffman": (Huffman(4), SYMBOLS),
    "huffman, 12 bits": (Huffman(12), SYMBOLS),
    "gaps": (Gaps(50_000), PLACES),
    "gaps, packed": (Gaps(50_000, huffman=False), PLACES),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.long
def test_every_codec_keeps_its_promises(name: str) -> None:
    check_codec(*CODECS[name])


def entropy(symbols: Any) -> float:
    _, counts = np.unique(symbols, return_counts=True)
    return float(-(counts * np.log2(counts / len(symbols))).sum() / 8)


TABLE = 64
"""Bytes of a table of codes, which each 32,768 bytes of symbols have."""


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8, 9, 12])
def test_a_huffman_code_is_within_3_percent_of_the_entropy(bits: int) -> None:
    spread = CHANCE.normal(size=60_000) * 2**bits / 6 + 2**bits / 2
    gaps = np.diff(np.flatnonzero(CHANCE.random(700_000) < 1 / 12))
    for numbers in (spread, gaps) if bits <= 8 else (spread,):
        symbols = numbers.clip(0, 2**bits - 1).astype(np.uint16)
        assert len(Huffman(bits).encode(symbols)) < 1.03 * entropy(symbols) + 2 * TABLE


@pytest.mark.parametrize(("count", "told"), [(1000, "has more bytes or fewer"), (1 << 24, "which cannot hold them")])
def test_a_code_is_not_unpacked_beyond_what_was_asked_for_and_its_bytes_pay_for(count: int, told: str) -> None:
    """Of 16 million zeros in 16 kB, as deflate repeats what it has seen."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = deflate.compress(bytes(1 << 24)) + deflate.flush()
    tracemalloc.start()
    with pytest.raises(DataError, match=told):
        Huffman(8).decode(data, count)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_gaps_of_few_positions_are_not_made_of_as_many_symbols_as_bytes_can_hold() -> None:
    """Fillers without end, which a few bytes hold, are refused before they are unpacked."""
    codes = Huffman(1).encode(np.ones(1_000_000, np.uint16))
    forged = bytes([1]) + (1_000_000).to_bytes(4, "little") + codes
    with pytest.raises(DataError, match="1,000,000 symbols of 1 bits: they were spoilt"):
        Gaps(10, huffman=True).decode(forged, 0)


@pytest.mark.parametrize("huffman", [True, False])
def test_the_bits_of_a_gap_are_those_that_need_the_fewest_bytes(huffman: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, positions, sizes = Gaps(50_000, huffman), PLACES[0], []
    least = len(codec.encode(positions))
    for bits in range(2, 11):
        monkeypatch.setattr(symbols, "CANDIDATES", (bits,))
        sizes.append(len(data := codec.encode(positions)))
        assert np.array_equal(codec.decode(data, len(positions)), positions)
    assert least == min(sizes) < max(sizes)


def within(values: Any, codebook: Any, ids: Any) -> float:
    return float(((values.astype(np.float64) - codebook.astype(np.float64)[ids]) ** 2).sum())


@pytest.mark.parametrize("start", STARTS)
def test_k_means_comes_to_rest_where_plain_lloyd_does(start: str) -> None:
    values = NORMAL[:500]
    codebook, ids = cluster(values, 8, start, seed=3)
    distances = np.abs(values[:, None].astype(np.float64) - codebook)
    assert (distances[np.arange(500), ids] <= distances.min(1) + 1e-7).all()
    for one in range(8):
        assert codebook[one] == pytest.approx(values[ids == one].mean(dtype=np.float64), abs=1e-5)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: LowPrecision("fp16").encode(np.float32([0, 7e4])), "value 1 of 2 is 70000, which overflows fp16"),
        (lambda: LowPrecision("int8").encode(np.float32([np.inf])), "value 0 of 1 is inf"),
        (lambda: LowPrecision("fp8"), "unknown precision 'fp8'; did you mean 'fp16'"),
        (lambda: Packed(3).encode(np.array([8], np.uint16)), "symbol 8 does not fit into 3 bits: it may be 7 at most"),
        (lambda: Huffman(13), "13 bits for each symbol: must be 1 or more, and at most 12"),
        (lambda: Gaps(9).encode(np.array([3, 3])), "positions must ascend from 0 or more, and be below 9"),
        (lambda: Gaps(9).encode(np.array([9])), "positions must ascend from 0 or more, and be below 9"),
    ],
)
def test_what_cannot_be_encoded_is_refused_with_its_value(wrong: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        wrong()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_that_are_not_finite_are_refused_in_files_too(precision: str) -> None:
    bytes_of = {"bf16": b"\x80\x7f", "fp16": b"\x00\x7c", "int8": b"\x00\x00\xc0\x7f\x01"}
    with pytest.raises(DataError, match="a number that is not finite"):
        LowPrecision(precision).decode(bytes_of[precision], 1)
