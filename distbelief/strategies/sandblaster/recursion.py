"""L-BFGS direction, vector-free: the two-loop recursion on a matrix of dot products.

The history is a list of curvature pairs (s, y): an iteration's step, and the change of the gradient over it. The
direction is -H g; H is the inverse Hessian that the pairs give, from gamma times the identity (Nocedal and Wright,
algorithm 7.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distbelief.core.conversations.operations import HISTORY


class CurvaturePair(NamedTuple):
    """Names of the two vectors of a curvature pair.

    >>> CurvaturePair.of(3)
    CurvaturePair(s='history.s3', y='history.y3')
    """

    s: str
    y: str

    @classmethod
    def of(cls, slot: int) -> CurvaturePair:
        """Return the pair of a slot; a slot is used again once its pair is too old."""
        return cls(f"{HISTORY}s{slot}", f"{HISTORY}y{slot}")


class Gram:
    """The known dot products of named vectors.

    >>> gram = Gram(); gram.learn([("s", "y")], [2.0]); gram["y", "s"]
    2.0
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], float] = {}

    def learn(self, pairs: Iterable[tuple[str, str]], values: Iterable[float]) -> None:
        """Add dot products."""
        for (left, right), value in zip(pairs, values, strict=True):
            self._known[left, right] = self._known[right, left] = value

    def __getitem__(self, pair: tuple[str, str]) -> float:
        return self._known[pair]


def new_products(pairs: Sequence[CurvaturePair], gradient: str) -> list[tuple[str, str]]:
    """Return the products that the last pair and a new gradient add to the known ones: 6m for m pairs.

    >>> len(new_products([CurvaturePair.of(i) for i in range(10)], "g"))
    60
    """
    *old, new = pairs
    products = [(new.s, new.s), (new.s, new.y), (new.y, new.y)]
    for pair in old:
        products += [(new.s, pair.s), (new.s, pair.y), (new.y, pair.s), (new.y, pair.y)]
    return products + gradient_products(pairs, gradient)


def gradient_products(pairs: Sequence[CurvaturePair], gradient: str) -> list[tuple[str, str]]:
    """Return the products that a new gradient adds."""
    return [(gradient, gradient), *((gradient, name) for pair in pairs for name in pair)]


def all_products(pairs: Sequence[CurvaturePair], gradient: str) -> list[tuple[str, str]]:
    """Return all products that a direction needs."""
    return [product for i in range(len(pairs)) for product in new_products(pairs[: i + 1], gradient)] or [
        (gradient, gradient)
    ]


def coefficients(gram: Gram, pairs: Sequence[CurvaturePair], gradient: str) -> dict[str, float]:
    """Combine history and gradient into the direction: the two-loop recursion on scalars (Chen et al. 2014).

    Args:
        gram: has all dot products of these vectors.
        pairs: oldest first.
        gradient: name of the gradient.

    >>> coefficients(Gram(), [], "g")
    {'g': -1.0}
    """
    delta = dict.fromkeys([name for pair in pairs for name in pair], 0.0) | {gradient: -1.0}

    def dot(name: str) -> float:
        return sum(value * gram[other, name] for other, value in delta.items() if value)

    alpha = {}
    for pair in reversed(pairs):
        alpha[pair] = dot(pair.s) / gram[pair.s, pair.y]
        delta[pair.y] -= alpha[pair]
    if pairs:
        scale = gram[pairs[-1].s, pairs[-1].y] / gram[pairs[-1].y, pairs[-1].y]
        delta = {name: scale * value for name, value in delta.items()}
    for pair in pairs:
        delta[pair.s] += alpha[pair] - dot(pair.y) / gram[pair.s, pair.y]
    return delta
