"""The batch methods: how each makes a direction from the gradient and its history, and what it learns from a step.

`learn` is a generator: it yields commands, is sent their scalars, and returns a note for the user, or "".
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
        ...

    def asks(self) -> tuple[AnyCommand, ...]:
        """Return commands whose scalars the first direction needs."""
        ...

    def begin(self, scalars: list[float]) -> None:
        """Take the scalars of `asks`."""

    def direction(self) -> Direction:
        """Return the next direction."""
        ...

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """Learn from a step, which the command `step` makes, and from the gradient's change, a combination `change`."""
        ...

    def forget(self) -> bool:
        """Restart with steepest descent; return whether there was anything to forget."""
        ...

    def state(self) -> Json:
        """Return the state with which it goes on after a checkpoint."""
        ...


class GradientDescent:
    """Steepest descent: d = -g. A search first tries a step that would change the loss as much as the last one did."""

    curvature, step_name = CURVATURE, "s"

    def __init__(self, descent: Descent, state: Json) -> None:
        self._step, self._fixed = descent.step, descent.line_search == "none"
        self._last = float(state.get("last", 0.0))
        self.largest = self._sum = self._square = 0.0

    def asks(self) -> tuple[AnyCommand, ...]:
        """Return commands for the norms of the gradient."""
        return (AbsoluteNorms("max", (G,)), AbsoluteNorms("sum", (G,)), Dots(((G, G),)))

    def begin(self, scalars: list[float]) -> None:
        """Take the norms of the gradient."""
        self.largest, self._sum, self._square = scalars

    def _first(self, slope: float) -> float:
        if self._fixed:
            return self._step
        return min(self._last / slope, 1e10) if self._last and slope else self._step / max(1.0, self._sum)

    def direction(self) -> Direction:
        """Return the direction down the gradient."""
        return Direction(Combine(((-1.0, G),), D), -self._square, self._first(-self._square), self.largest)

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """Learn the norms of the new gradient."""
        self._last = point.step * direction.slope
        self.begin((yield self.asks()))
        return ""

    def forget(self) -> bool:
        """Forget the last change of the loss."""
        forgotten, self._last = bool(self._last), 0.0
        return forgotten

    def state(self) -> Json:
        """Return the last change of the loss."""
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
        """Return commands for the gradient's norms and its product with the last direction."""
        return (*super().asks(), Dots(((G, self._old),))) if self._beta else super().asks()

    def begin(self, scalars: list[float]) -> None:
        """Take the gradient's norms and its product with the last direction."""
        self._along = scalars[3] if self._beta else 0.0
        super().begin(scalars[:3])

    def direction(self) -> Direction:
        """Return the conjugate direction, or steepest descent if that leads upwards."""
        slope = -self._square + self._beta * self._along
        if not self._beta or slope >= 0:
            return super().direction()
        return Direction(Combine(((-1.0, G), (self._beta, self._old)), D), slope, self._first(slope), self.largest)

    def learn(self, step: Combine, change: Terms, point: SearchPoint, direction: Direction) -> Learning:
        """Learn beta from the old gradient and the new one."""
        self._last = point.step * direction.slope
        old = self._square
        dots = (*super().asks(), Dots(((G, "y"), (G, self._old))))
        *norms, change_along, self._along = yield (step, Combine(change, "y"), Copy(D, self._old), *dots)
        super().begin(norms)
        self._beta = max(0.0, change_along / old) if old else 0.0
        return ""

    def forget(self) -> bool:
        """Forget the last direction."""
        forgotten = super().forget() or bool(self._beta)
        self._beta = 0.0
        return forgotten

    def state(self) -> Json:
        """Return beta and the last change of the loss."""
        return {**super().state(), "beta": self._beta}


class Lbfgs:
    """L-BFGS, vector-free: a direction combines 2m + 1 vectors, with factors computed from their dot products."""

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
        """Slot of the next pair. There is one more slot than pairs: the oldest pair stays until the new one is good."""
        return next(slot for slot in range(self._descent.history + 1) if slot not in self._slots)

    @property
    def step_name(self) -> str:
        """Name of the step's vector in the next pair."""
        return CurvaturePair.of(self._free).s

    def asks(self) -> tuple[AnyCommand, ...]:
        """Return commands for the gradient's norms and all dot products of the history."""
        return (AbsoluteNorms("max", (G,)), AbsoluteNorms("sum", (G,)), Dots(tuple(all_products(self._pairs, G))))

    def begin(self, scalars: list[float]) -> None:
        """Take the gradient's norms and the dot products of the history."""
        self.largest, self._sum, *products = scalars
        self._gram.learn(all_products(self._pairs, G), products)

    def direction(self) -> Direction:
        """Return -H g."""
        factors = coefficients(self._gram, self._pairs, G)
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
        products = new_products(pairs, G)
        norms = AbsoluteNorms("max", (G,)), AbsoluteNorms("sum", (G,))
        self.largest, self._sum, *values = yield (step, Combine(change, new.y), *norms, Dots(tuple(products)))
        ss, sy, yy = values[:3]
        note = ""
        if not (sy > FLAT * ss and yy > 0):
            note = "the step shows no curvature and is left out of the history"
            products = gradient_products(self._pairs, G)
            values = yield (Dots(tuple(products)),)
        else:
            self._slots = [*kept, slot]
        self._gram.learn(products, values)
        return note

    def forget(self) -> bool:
        """Forget the history."""
        forgotten, self._slots = bool(self._slots), []
        return forgotten

    def state(self) -> Json:
        """Return the slots of the pairs, oldest first."""
        return {"slots": list(self._slots)}


METHODS: dict[str, type[GradientDescent] | type[ConjugateGradient] | type[Lbfgs]] = {
    "lbfgs": Lbfgs,
    "cg": ConjugateGradient,
    "gradient": GradientDescent,
}


def method_of(descent: Descent, state: Json) -> Method:
    """Return a job's method, in the state with which it goes on."""
    return METHODS[descent.method](descent, state)
