"""Spoils real frames and files, from one seed: bits, lengths, types and values."""

import random
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

from distbelief.core import wire
from distbelief.core.optimizer import Optimizer
from distbelief.core.protocol import MESSAGES
from distbelief.core.settings import Plan, Settings
from distbelief.core.values import hints_of
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Layout, Tensor, lay_out
from distbelief.strategies import Downpour

LAYOUT = lay_out(
    [Tensor("weight", (16, 4), "float32"), Tensor("bias", (16,), "float32"), Tensor("mean", (16,), "float32", "buffer")]
)
PLAN = Plan(
    Settings(strategy=Downpour(2, 2, optimizer=Optimizer("adagrad", 0.1, {"eps": 1e-8}))),
    LAYOUT,
    cut(LAYOUT, 1, 2),
    100,
)
EXTREMES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 127, 255, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    -(1 << 63), 0.5, -0.0, 1e308,
    float("inf"), float("nan"), "", "x", "x" * 300, "../../etc/passwd", "shard 0", "Lost", b"", b"\xff" * 9, [],
    [[[[]]]], [0] * 20, {}, {"x": 1},
)  # fmt: skip


def example(hint: Any) -> Any:
    """A value of a type that stands in a message."""
    if hint in (Layout, Plan):
        return LAYOUT if hint is Layout else PLAN
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint(**{name: example(kind) for name, kind in hints_of(hint).items()})
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return hint(*map(example, typing.get_type_hints(hint).values()))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    plain = {int: 3, float: 0.5, str: "replica 0", bool: True, bytes: b"data"}
    if hint in plain:
        return plain[hint]
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Literal:
        return inner[0]
    if kind is dict:
        return {example(inner[0]): example(inner[1])}
    if kind is tuple:
        return tuple(example(one) for one in inner if one is not ...)
    return None if type(None) in inner else example(inner[0])


MARKERS = (b"\xff", b"\0", b"\xdf", b"\xc6", b"\xdd")
"""Bytes that open values of a kind in msgpack."""

FRAMES = tuple(wire.encode(example(kind)) for kind in MESSAGES)
"""One real frame of each kind of message."""


class Spoiler:
    """Makes spoilt things, each from a seed of its own, so that one can be made again.

    >>> Spoiler(3).frame() == Spoiler(3).frame()
    True
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def frame(self, frames: Sequence[bytes] = FRAMES) -> bytes:
        """A real frame, spoilt in one of many ways."""
        chance = self.chance
        frame = chance.choice(frames)
        body, how = frame[wire.PREFIX.size :], chance.random()
        if how < 0.5:
            values = msgspec.msgpack.decode(body)
            body = msgspec.msgpack.encode(self.value(values))
        elif how < 0.8:
            body = self.data(body, frames)
        elif how < 0.9:
            return self.data(frame, frames)
        else:
            version, length = chance.choice(
                (
                    (wire.VERSION, chance.choice((0, 1, len(body) + 1, 1 << 24, 1 << 25, (1 << 32) - 1))),
                    (chance.randrange(256), len(body)),
                )
            )
            return wire.PREFIX.pack(version, length) + body
        return wire.PREFIX.pack(wire.VERSION, len(body)) + body

    def value(self, values: Any) -> Any:
        """Values as JSON or msgpack have them, with one or two of them replaced, taken away or doubled."""
        for _ in range(self.chance.choice((1, 1, 1, 2))):
            values = self._replaced(values)
        return values

    def _replaced(self, values: Any) -> Any:
        chance = self.chance
        if not isinstance(values, list | dict) or not values or chance.random() < 0.05:
            return chance.choice(EXTREMES)
        copy: Any = list(values) if isinstance(values, list) else dict(values)
        at = chance.randrange(len(copy)) if isinstance(copy, list) else chance.choice(list(copy))
        how = chance.random()
        if how < 0.9:
            copy[at] = self._replaced(copy[at])
        elif how < 0.95 or isinstance(copy, dict):
            del copy[at]
        else:
            copy.insert(at, copy[at])
        return copy

    def _flipped(self, data: bytes) -> bytes:
        """The bytes with one bit of each flipped."""
        return bytes(byte ^ 1 << self.chance.randrange(8) for byte in data)

    def data(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """Bytes with a few of them flipped, cut, doubled, replaced or spliced with others'."""
        chance, spoilt = self.chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 4))):
            at = chance.randrange(len(spoilt) + 1)
            end = min(len(spoilt), at + chance.choice((1, 1, 2, 4, 8, 64)))
            ways: list[Callable[[], Any]] = [
                lambda: spoilt.__setitem__(slice(at, end), self._flipped(spoilt[at:end])),  # noqa: B023
                lambda: spoilt.__setitem__(slice(at, end), chance.randbytes(end - at)),  # noqa: B023
                lambda: spoilt.__setitem__(slice(at, end), chance.choice(MARKERS) * (end - at)),  # noqa: B023
                lambda: spoilt.__delitem__(slice(at, None)),  # noqa: B023
                lambda: spoilt.__delitem__(slice(at, end)),  # noqa: B023
                lambda: spoilt.__setitem__(slice(at, at), spoilt[at:end]),  # noqa: B023
                lambda: spoilt.__setitem__(slice(at, None), chance.choice(others or (data,))[at:]),  # noqa: B023
            ]
            chance.choice(ways)()
        return bytes(spoilt)
