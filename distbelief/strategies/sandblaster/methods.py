"""The batch methods: how each makes a direction from the gradient and its history, and what it learns from a step.

`wolfe` and `learn` are generators. A line search yields a step to try, and is sent the loss and the slope there. It
returns the step that it accepts, always the last that it tried, or None if no step lowers the loss enough. `learn`
yields commands, is sent their scalars, and returns a note for the user, or "".

L-BFGS is the two-loop recursion on a matrix of dot products. Its history is a list of curvature pairs (s, y): an
iteration's step, and the change of the gradient over it. The direction is -H g; H is the inverse Hessian that the pairs
give, from gamma times the identity (Nocedal and Wright, algorithm 7.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, Protocol

from distbelief.core.conversations.operations import HISTORY, AbsoluteNorms, AnyCommand, Combine, Copy, Dots
from distbelief.core.records import Json
from distbelief.strategies.sandblaster.settings import CONJUGATE, LBFGS, STEEPEST, Descent

X, X0, G, G0, D = "x", "x0", "g", "g0", "d"
"""Names of vectors: parameters and gradient, each now and at the start of the iteration, and the direction.

Evaluators see `x0`.
"""
NORMS = AbsoluteNorms("max", (G,)), AbsoluteNorms("sum", (G,))
"""Commands for the two norms of the gradient."""
SUFFICIENT, CURVATURE = 1e-4, 0.9
"""c1 and c2 of the Wolfe conditions."""
TRIALS = 25
"""Most steps that a search tries."""
NARROW = 1e-9
"""Least length of a bracket, times the largest component of the direction."""


class SearchPoint(NamedTuple):
    """A step, with the loss and the slope there."""

    step: float
    loss: float
    slope: float


class SearchStart(NamedTuple):
    """Start of a search: loss and slope at step 0, the first step, the direction's largest component, and c2."""

    loss: float
    slope: float
    first: float
    largest: float = 1.0
    curvature: float = CURVATURE


Search = Generator[float, tuple[float, float], SearchPoint | None]


def _try(step: float) -> Generator[float, tuple[float, float], SearchPoint]:
    loss, slope = yield step
    # a loss that is not finite counts as infinite, so that the search goes back to smaller steps
    return SearchPoint(step, loss if math.isfinite(loss) else math.inf, slope)


def cubic(a: SearchPoint, b: SearchPoint, least: float, most: float) -> float:
    """Return the minimum of the cubic through two trials, or the middle of the bounds (Nocedal and Wright, 3.59).

    >>> cubic(SearchPoint(0.0, 1.0, -2.0), SearchPoint(3.0, 4.0, 4.0), 0.0, 3.0)
    1.0
    """
    if a.step > b.step:
        a, b = b, a
    if not all(map(math.isfinite, (*a, *b))):
        return (least + most) / 2
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if square < 0:
        return (least + most) / 2
    d2 = math.sqrt(square)
    below = b.slope - a.slope + 2 * d2
    if not below:
        return (least + most) / 2
    return min(max(b.step - (b.step - a.step) * ((b.slope + d2 - d1) / below), least), most)


def wolfe(start: SearchStart) -> Search:
    """Find a step that satisfies the strong Wolfe conditions: bracket, then zoom (Nocedal and Wright, 3.5 and 3.6).

    When trials run out or the bracket is too narrow, accept the best step that lowers the loss enough.

    >>> search = wolfe(SearchStart(loss=1.0, slope=-2.0, first=3.0)); next(search)
    3.0
    >>> search.send(((1 - 3.0) ** 2, 2 * (3.0 - 1)))
    1.0
    """
    zero = SearchPoint(0.0, start.loss, start.slope)
    before, here, tried = zero, (yield from _try(start.first)), 1
    bracket: list[SearchPoint] = []

    def enough(trial: SearchPoint) -> bool:
        return trial.loss <= start.loss + SUFFICIENT * trial.step * start.slope

    def flat(trial: SearchPoint) -> bool:
        return abs(trial.slope) <= -start.curvature * start.slope

    while not bracket:
        if not enough(here) or (tried > 2 and here.loss >= before.loss):
            bracket = [before, here]
        elif flat(here):
            return here
        elif here.slope >= 0:
            bracket = [before, here]
        elif tried >= TRIALS:
            return here
        else:
            least, most = here.step + 0.01 * (here.step - before.step), here.step * 10
            before, here = here, (yield from _try(cubic(before, here, least, most)))
            tried += 1
    return (yield from _zoom(zero, bracket, tried, start, enough, flat))


def _zoom(
    zero: SearchPoint,
    bracket: list[SearchPoint],
    tried: int,
    start: SearchStart,
    enough: Callable[[SearchPoint], bool],
    flat: Callable[[SearchPoint], bool],
) -> Search:
    """Narrow a bracket that contains such a step."""
    low, high = sorted(bracket, key=lambda trial: trial.loss)
    last, slow = bracket[-1], False
    while tried < TRIALS and abs(high.step - low.step) * start.largest >= NARROW:
        left, right = sorted((low.step, high.step))
        step, margin = cubic(low, high, left, right), 0.1 * (right - left)
        near = min(right - step, step - left) < margin
        if near and (slow or step in (left, right)):
            step = right - margin if right - step < step - left else left + margin
            near = False
        slow = near
        last = trial = yield from _try(step)
        tried += 1
        if not enough(trial) or trial.loss >= low.loss:
            high = trial
            if high.loss < low.loss:
                low, high = high, low
        elif flat(trial):
            return trial
        else:
            if trial.slope * (high.step - low.step) >= 0:
                high = low
            low = trial
    if not (low.step and enough(low) and low.loss < zero.loss):
        return None
    return low if last.step == low.step else (yield from _try(low.step))


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


Gram = dict[tuple[str, str], float]
"""Known dot products of named vectors, by both orders of their names."""


def products_of(pairs: Iterable[tuple[str, str]], values: Iterable[float]) -> Gram:
    """Return dot products by both orders of their names.

    >>> products_of([("s", "y")], [2.0])["y", "s"]
    2.0
    """
    known = list(zip(pairs, values, strict=True))
    return dict(known) | {(right, left): value for (left, right), value in known}


def new_products(pairs: Sequence[CurvaturePair]) -> list[tuple[str, str]]:
    """Return the products that the last pair and a new gradient add to the known ones: 6m for m pairs.

    >>> len(new_products([CurvaturePair.of(i) for i in range(10)]))
    60
    """
    *old, new = pairs
    products = [(new.s, new.s), (new.s, new.y), (new.y, new.y)]
    for pair in old:
        products += [(new.s, pair.s), (new.s, pair.y), (new.y, pair.s), (new.y, pair.y)]
    return products + gradient_products(pairs)


def gradient_products(pairs: Sequence[CurvaturePair]) -> list[tuple[str, str]]:
    """Return the products that a new gradient adds."""
    return [(G, G), *((G, name) for pair in pairs for name in pair)]


def all_products(pairs: Sequence[CurvaturePair]) -> list[tuple[str, str]]:
    """Return all products that a direction needs."""
    return [product for i in range(len(pairs)) for product in new_products(pairs[: i + 1])] or [(G, G)]


def coefficients(gram: Gram, pairs: Sequence[CurvaturePair]) -> dict[str, float]:
    """Combine history and gradient into the direction: the two-loop recursion on scalars (Chen et al. 2014).

    Args:
        gram: has all dot products of these vectors.
        pairs: oldest first.

    >>> coefficients({}, [])
    {'g': -1.0}
    """
    delta = dict.fromkeys([name for pair in pairs for name in pair], 0.0) | {G: -1.0}

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


FLAT = 1e-8
"""A pair with s.y below this times |s|^2 shows no curvature, and is skipped."""

Terms = tuple[tuple[float, str], ...]
Learning = Generator[tuple[AnyCommand, ...], list[float], str]


class Direction(NamedTuple):
    """The command that makes a direction, the loss's slope along it, the first step, and its largest component."""

    command: AnyCommand
    slope: float
    first: float
    largest: float = 1.0


class Method(Protocol):
    """A batch method."""

    largest: float
    """The largest component of the gradient."""
    curvature: float
    """c2 of the Wolfe conditions."""

    @property
    def step_name(self) -> str:
        """Name of the vector for an iteration's step."""

    def asks(self) -> tuple[AnyCommand, ...]:
        """Return commands whose scalars the first direction needs."""

    def begin(self, scalars: list[float]) -> None:
        """Take the scalars of `asks`."""

    def direction(self) -> Direction:
        """Return the next direction."""

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """Learn from a step, which the command `step` makes, and from the gradient's change, a combination `change`."""

    def forget(self) -> bool:
        """Restart with steepest descent; return whether there was anything to forget."""

    def state(self) -> Json:
        """Return the state with which it goes on after a checkpoint."""


class GradientDescent:
    """Steepest descent: d = -g. A search first tries a step that would change the loss as much as the last one did."""

    curvature, step_name = CURVATURE, "s"

    def __init__(self, descent: Descent, state: Json) -> None:
        self._step, self._fixed = descent.step, descent.line_search == "none"
        self._last = float(state.get("last", 0.0))
        self.largest = self._sum = self._square = 0.0

    def asks(self) -> tuple[AnyCommand, ...]:
        return (*NORMS, Dots(((G, G),)))

    def begin(self, scalars: list[float]) -> None:
        self.largest, self._sum, self._square = scalars

    def _first(self, slope: float) -> float:
        if self._fixed:
            return self._step
        return min(self._last / slope, 1e10) if self._last and slope else self._step / max(1.0, self._sum)

    def direction(self) -> Direction:
        return Direction(Combine(((-1.0, G),), D), -self._square, self._first(-self._square), self.largest)

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        self._last = point.step * direction.slope
        self.begin((yield self.asks()))
        return ""

    def forget(self) -> bool:
        forgotten, self._last = bool(self._last), 0.0
        return forgotten

    def state(self) -> Json:
        return {"last": self._last}


class ConjugateGradient(GradientDescent):
    """Nonlinear conjugate gradient: d = -g + beta d, beta = max(0, g.(g - g0) / g0.g0) (Polak and Ribiere)."""

    curvature = 0.1
    _old = f"{HISTORY}d"

    def __init__(self, descent: Descent, state: Json) -> None:
        super().__init__(descent, state)
        self._beta = float(state.get("beta", 0.0))
        self._along = 0.0

    def asks(self) -> tuple[AnyCommand, ...]:
        return (*super().asks(), Dots(((G, self._old),))) if self._beta else super().asks()

    def begin(self, scalars: list[float]) -> None:
        self._along = scalars[3] if self._beta else 0.0
        super().begin(scalars[:3])

    def direction(self) -> Direction:
        """Return the conjugate direction, or steepest descent if that leads upwards."""
        slope = -self._square + self._beta * self._along
        if not self._beta or slope >= 0:
            return super().direction()
        return Direction(Combine(((-1.0, G), (self._beta, self._old)), D), slope, self._first(slope), self.largest)

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        self._last = point.step * direction.slope
        old = self._square
        dots = (*super().asks(), Dots(((G, "y"), (G, self._old))))
        *norms, change_along, self._along = yield (step, Combine(change, "y"), Copy(D, self._old), *dots)
        super().begin(norms)
        self._beta = max(0.0, change_along / old) if old else 0.0
        return ""

    def forget(self) -> bool:
        forgotten = super().forget() or bool(self._beta)
        self._beta = 0.0
        return forgotten

    def state(self) -> Json:
        return {**super().state(), "beta": self._beta}


class Lbfgs:
    """L-BFGS, vector-free: a direction combines 2m + 1 vectors, with factors computed from their dot products."""

    curvature = CURVATURE

    def __init__(self, descent: Descent, state: Json) -> None:
        self._descent = descent
        self._slots: list[int] = list(state.get("slots", ()))
        self._gram: Gram = {}
        self.largest = self._sum = 0.0

    @property
    def _pairs(self) -> list[CurvaturePair]:
        return [CurvaturePair.of(slot) for slot in self._slots]

    @property
    def _free(self) -> int:
        """Slot of the next pair. There is one more slot than pairs: the oldest pair stays until the new one is good."""
        return next(slot for slot in range(self._descent.history + 1) if slot not in self._slots)

    @property
    def step_name(self) -> str:
        return CurvaturePair.of(self._free).s

    def asks(self) -> tuple[AnyCommand, ...]:
        return (*NORMS, Dots(tuple(all_products(self._pairs))))

    def begin(self, scalars: list[float]) -> None:
        self.largest, self._sum, *products = scalars
        self._gram |= products_of(all_products(self._pairs), products)

    def direction(self) -> Direction:
        """Return -H g."""
        factors = coefficients(self._gram, self._pairs)
        slope = sum(factor * self._gram[name, G] for name, factor in factors.items())
        step = self._descent.step
        if not self._slots and self._descent.line_search != "none":
            step *= 1.0 / max(1.0, self._sum)
        return Direction(Combine(tuple((factor, name) for name, factor in factors.items()), D), slope, step)

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """Add a curvature pair; if the step shows no curvature, learn only the products of the new gradient."""
        slot, before = self._free, self._slots
        kept = before[-(self._descent.history - 1) :] if self._descent.history > 1 else []
        pairs, new = [*map(CurvaturePair.of, kept), CurvaturePair.of(slot)], CurvaturePair.of(slot)
        products = new_products(pairs)
        self.largest, self._sum, *values = yield (step, Combine(change, new.y), *NORMS, Dots(tuple(products)))
        ss, sy, yy = values[:3]
        note = ""
        if not (sy > FLAT * ss and yy > 0):
            note = "the step shows no curvature and is left out of the history"
            products = gradient_products(self._pairs)
            values = yield (Dots(tuple(products)),)
        else:
            self._slots = [*kept, slot]
        self._gram |= products_of(products, values)
        return note

    def forget(self) -> bool:
        forgotten, self._slots = bool(self._slots), []
        return forgotten

    def state(self) -> Json:
        return {"slots": list(self._slots)}


def method_of(descent: Descent, state: Json) -> Method:
    """Return a job's method, in the state with which it goes on."""
    kinds: dict[str, Callable[[Descent, Json], Method]]
    kinds = {LBFGS: Lbfgs, CONJUGATE: ConjugateGradient, STEEPEST: GradientDescent}
    return kinds[descent.method](descent, state)
