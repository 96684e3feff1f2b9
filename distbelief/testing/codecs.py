"""Conformance suite of codecs: the promises of `distbelief.codecs.codec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distbelief.codecs.codec import Codec, Value
from distbelief.errors import DataError

CUTS = 20
"""Most positions at which an example's bytes are truncated."""
SPOILT = 50
"""Number of corrupt versions of the bytes of an example."""
MOST = 1 << 44
"""Number of values that exceeds any example."""


def check_codec(
    codec: Codec[Value],
    examples: Sequence[npt.NDArray[Value]],
    bound: Callable[[npt.NDArray[Value]], npt.NDArray[Any]] = np.zeros_like,
    seed: int = 0,
) -> None:
    """Check every promise of `distbelief.codecs.codec`.

    `examples` are 1-D arrays that the codec can encode; an empty one is added. `bound` returns the largest error of
    each decoded value, by default 0. `seed` is the seed of the corruptions.

    Raises:
        AssertionError: a promise is broken; the text names it and the example.
    """
    chance = np.random.default_rng(seed)
    for number, values in enumerate([*examples, examples[0][:0]]):
        example = f"example {number} ({len(values)} values)"
        data = _check_back(codec, values, bound(values), example)
        _check_refused(codec, data, len(values), values.dtype, example)
        for _ in range(SPOILT if data else 0):
            spoilt = bytearray(data)
            for at in chance.integers(0, len(data), chance.integers(1, 4)):
                spoilt[at] ^= int(chance.integers(1, 256))
            _check_any(codec, bytes(spoilt), len(values), values.dtype, f"{example}, spoilt")
        noise = chance.bytes(int(chance.integers(0, 2 * len(data) + 64)))
        _check_any(codec, noise, len(values), values.dtype, f"{example}, foreign bytes")


def _check_back(codec: Codec[Value], values: npt.NDArray[Value], bound: npt.NDArray[Any], example: str) -> bytes:
    before = values.copy()
    data = codec.encode(values)
    assert np.array_equal(before, values), f"{example}: encode changed the values"
    assert codec.encode(values.copy()) == data, f"{example}: the same values give other bytes"
    back = codec.decode(data, len(values))
    assert back.shape == values.shape, f"{example}: was decoded as {back.shape}"
    assert back.dtype == values.dtype, f"{example}: was decoded as {back.dtype}"
    wide = np.float64 if values.dtype.kind == "f" else np.int64
    distance = np.abs(back.astype(wide) - values.astype(wide))
    far = np.flatnonzero(distance > bound)
    assert not len(far), f"{example}: value {far[0]} is {values[far[0]]}, but was decoded as {back[far[0]]}"
    return data


def _check_refused(codec: Codec[Value], data: bytes, count: int, dtype: npt.DTypeLike, example: str) -> None:
    cuts = range(len(data)) if len(data) <= CUTS else np.linspace(0, len(data) - 1, CUTS).astype(int).tolist()
    for at in cuts:
        _must_refuse(codec, data[:at], count, f"{example}, cut to {at} of {len(data)} bytes")
    _must_refuse(codec, data + b"\0", count, f"{example}, with one extra byte")
    _must_refuse(codec, data, MOST, f"{example}, asked for {MOST} values")
    _check_any(codec, data, count + 1, dtype, f"{example}, asked for one more")


def _must_refuse(codec: Codec[Value], data: bytes, count: int, example: str) -> None:
    try:
        codec.decode(data, count)
    except DataError:
        return
    raise AssertionError(f"{example}: was not refused with a DataError")


def _check_any(codec: Codec[Value], data: bytes, count: int, dtype: npt.DTypeLike, example: str) -> None:
    """Check that bytes give a DataError or the requested number of values."""
    try:
        values = codec.decode(data, count)
    except DataError:
        return
    assert len(values) == count, f"{example}: gave {len(values)} values"
    assert values.dtype == dtype, f"{example}: gave values of {values.dtype}"
