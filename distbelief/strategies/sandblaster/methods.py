"""The batch methods: how each makes a direction of the gradient and its history, and what it learns of a step.

`learn` is a story too: it yields commands, is sent their scalars, and returns a note for whoever watches, or "".
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, Protocol

from distbelief.core.conversations.operations import HISTORY, AbsoluteNorms, AnyCommand, Combine, Copy, Dots
from distbelief.core.records import Json
from distbelief.strategies.sandblaster.line_search import CURVATURE, SearchPoint
from distbelief.strategies.sandblaster.recursion import (
    CurvaturePair,
    Gram,
    all_products,
    coefficients,
    gradient_products,
    new_products,
)
from distbelief.strategies.sandblaster.settings import Descent

G, G0, D = "g", "g0", "d"
FLAT = 1e-8
"""A pair whose s.y is no larger than this, times |s|^2, tells no curvature and is skipped."""

Terms = tuple[tuple[float, str], ...]
Learning = Generator[tuple[AnyCommand, ...], list[float], str]


class Direction(NamedTuple):
    """Commands that make the direction, the loss's slope along it, the first step, and a bound on its components."""

    command: AnyCommand
    slope: float
    first: float
    largest: float = 1.0


class Method(Protocol):
    """One batch method."""

    largest: float
    """The largest component of the gradient."""
    curvature: float
    """c2 of its Wolfe conditions."""

    @property
    def step_name(self) -> str:
        """The vector that is to hold the step of an iteration."""
        ...

    def asks(self) -> tuple[AnyCommand, ...]:
        """Return what must be known before the first direction."""
        ...

    def begin(self, scalars: list[float]) -> None:
        """The answer to that."""

    def direction(self) -> Direction:
        """The next direction."""
        ...

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """Take in a step, which `step` makes, and the change of the gradient, which `change` is the combination for."""
        ...

    def forget(self) -> bool:
        """Begin anew from the steepest descent; whether anything was forgotten."""
        ...

    def state(self) -> Json:
        """Return what it goes on with."""
        ...


class GradientDescent:
    """Steepest descent on whole batches: d = -g; a search tries first the step that changes the loss as the last."""

    curvature, step_name = CURVATURE, "s"

    def __init__(self, descent: Descent, state: Json) -> None:
        self._step, self._fixed = descent.step, descent.line_search == "none"
        self._last = float(state.get("last", 0.0))
        self.largest = self._sum = self._square = 0.0

    def asks(self) -> tuple[AnyCommand, ...]:
        """The norms of the gradient."""
        return (AbsoluteNorms("max", (G,)), AbsoluteNorms("sum", (G,)), Dots(((G, G),)))

    def begin(self, scalars: list[float]) -> None:
        """Know the gradient."""
        self.largest, self._sum, self._square = scalars

    def _first(self, slope: float) -> float:
        if self._fixed:
            return self._step
        return min(self._last / slope, 1e10) if self._last and slope else self._step / max(1.0, self._sum)

    def direction(self) -> Direction:
        """Down the gradient."""
        return Direction(Combine(((-1.0, G),), D), -self._square, self._first(-self._square), self.largest)

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """The new gradient's norms are all there is to learn."""
        self._last = point.step * direction.slope
        self.begin((yield self.asks()))
        return ""

    def forget(self) -> bool:
        """Nothing but the length of the last step."""
        forgotten, self._last = bool(self._last), 0.0
        return forgotten

    def state(self) -> Json:
        """The length of the last step."""
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
        """The norms of the gradient, and how far the last direction points along it."""
        return (*super().asks(), Dots(((G, self._old),))) if self._beta else super().asks()

    def begin(self, scalars: list[float]) -> None:
        """Know the gradient, and the last direction."""
        self._along = scalars[3] if self._beta else 0.0
        super().begin(scalars[:3])

    def direction(self) -> Direction:
        """Make the gradient conjugate to the last direction; the steepest descent where that leads upwards."""
        slope = -self._square + self._beta * self._along
        if not self._beta or slope >= 0:
            return super().direction()
        return Direction(Combine(((-1.0, G), (self._beta, self._old)), D), slope, self._first(slope), self.largest)

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """Beta, of the old gradient and the new."""
        self._last = point.step * direction.slope
        old = self._square
        dots = (*super().asks(), Dots(((G, "y"), (G, self._old))))
        *norms, change_along, self._along = yield (step, Combine(change, "y"), Copy(D, self._old), *dots)
        super().begin(norms)
        self._beta = max(0.0, change_along / old) if old else 0.0
        return ""

    def forget(self) -> bool:
        """The last direction."""
        forgotten = super().forget() or bool(self._beta)
        self._beta = 0.0
        return forgotten

    def state(self) -> Json:
        """Beta, and the length of the last step."""
        return {**super().state(), "beta": self._beta}


class Lbfgs:
    """L-BFGS, vector-free: the direction combines 2m + 1 vectors, whose factors come of their dot products."""

    curvature = CURVATURE

    def __init__(self, descent: Descent, state: Json) -> None:
        self._descent = descent
        self._slots: list[int] = list(state.get("slots", ()))
        self._gram = Gram()
        self.largest = self._sum = 0.0

    @property
    def _pairs(self) -> list[CurvaturePair]:
        return [CurvaturePair.of(slot) for slot in self._slots]

    @property
    def _free(self) -> int:
        """Return a slot for the next pair: one more than pairs, for the oldest stays until the newest is good."""
        return next(slot for slot in range(self._descent.history + 1) if slot not in self._slots)

    @property
    def step_name(self) -> str:
        """The vector of the next pair."""
        return CurvaturePair.of(self._free).s

    def asks(self) -> tuple[AnyCommand, ...]:
        """The norms of the gradient, and every dot product of the history."""
        return (AbsoluteNorms("max", (G,)), AbsoluteNorms("sum", (G,)), Dots(tuple(all_products(self._pairs, G))))

    def begin(self, scalars: list[float]) -> None:
        """Know the gradient and the history."""
        self.largest, self._sum, *products = scalars
        self._gram.learn(all_products(self._pairs, G), products)

    def direction(self) -> Direction:
        """-H g."""
        factors = coefficients(self._gram, self._pairs, G)
        slope = sum(factor * self._gram[name, G] for name, factor in factors.items())
        step = self._descent.step
        if not self._slots and self._descent.line_search != "none":
            step *= 1.0 / max(1.0, self._sum)
        return Direction(Combine(tuple((factor, name) for name, factor in factors.items()), D), slope, step)

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """A curvature pair, where it tells one; else what the new gradient has in common with the history."""
        slot, before = self._free, self._slots
        kept = before[-(self._descent.history - 1) :] if self._descent.history > 1 else []
        pairs, new = [*map(CurvaturePair.of, kept), CurvaturePair.of(slot)], CurvaturePair.of(slot)
        products = new_products(pairs, G)
        norms = AbsoluteNorms("max", (G,)), AbsoluteNorms("sum", (G,))
        self.largest, self._sum, *values = yield (step, Combine(change, new.y), *norms, Dots(tuple(products)))
        ss, sy, yy = values[:3]
        note = ""
        if not (sy > FLAT * ss and yy > 0):
            products, note = gradient_products(self._pairs, G), "the step tells no curvature: it is not in the history"
            values = yield (Dots(tuple(products)),)
        else:
            self._slots = [*kept, slot]
        self._gram.learn(products, values)
        return note

    def forget(self) -> bool:
        """The history."""
        forgotten, self._slots = bool(self._slots), []
        return forgotten

    def state(self) -> Json:
        """Return which slots hold pairs, oldest first."""
        return {"slots": list(self._slots)}


METHODS: dict[str, type[GradientDescent] | type[ConjugateGradient] | type[Lbfgs]] = {
    "lbfgs": Lbfgs,
    "cg": ConjugateGradient,
    "gradient": GradientDescent,
}


def method_of(descent: Descent, state: Json) -> Method:
    """The method of a job, with what it goes on with."""
    return METHODS[descent.method](descent, state)
