"""Algorithm 1.2 of the paper, as a generator that needs only names of vectors and scalars.

It yields an `AskOperation`, answered by the scalars of its commands, an `AskEvaluation`, answered by a `LossSum`, or an
`IterationDone`. There the job may rest: a generator that starts with that state goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from distbelief.core.conversations.operations import Add, AnyCommand, Combine, Copy, Dots, Scale
from distbelief.core.records import Cause, Json
from distbelief.strategies.sandblaster.methods import (
    G0,
    X0,
    D,
    Direction,
    G,
    Method,
    SearchPoint,
    SearchStart,
    Terms,
    X,
    method_of,
    wolfe,
)
from distbelief.strategies.sandblaster.settings import Descent

TAIL = "g.tail0"


class AskOperation(NamedTuple):
    """Commands for every shard; answered by their scalars, summed over the shards."""

    commands: tuple[AnyCommand, ...]


class AskEvaluation(NamedTuple):
    """Commands for every shard, then a batch of which replicas compute loss and gradient; answered by a `LossSum`."""

    batch: int
    commands: tuple[AnyCommand, ...]


class LossSum(NamedTuple):
    """Sum of a batch's losses, its number of samples, and the portions in each of its parts."""

    loss: float
    samples: int
    weights: tuple[float, ...]


class IterationDone(NamedTuple):
    """An iteration that is done, and the state with which a generator goes on."""

    iteration: int
    loss: float
    gradient: float
    """Largest component of the gradient."""
    step: float
    evaluations: int
    note: str
    state: Json


Returned = TypeVar("Returned")
Steps = Generator[AskOperation | AskEvaluation | IterationDone, Any, Returned]


class Descend:
    """The descent of a job.

    `state` is that of the `IterationDone` from which it goes on; empty at the start.
    """

    def __init__(self, descent: Descent, iterations: int, state: Json) -> None:
        self.descent, self.iterations = descent, iterations
        self.method: Method = method_of(descent, state)
        self._iteration = int(state.get("iteration", 0))
        self._whole, self._part = not descent.batch_size, descent.sums
        self._evaluations = 0
        self._begin: tuple[AnyCommand, ...] = ()
        """Commands that make the direction, until they are sent."""
        self._weights: tuple[float, ...] = ()

    def story(self) -> Steps[tuple[Cause, str]]:
        """Run Algorithm 1.2: evaluate a batch, make a direction, search along it, update; return why it ends."""
        method = self.method
        loss, scalars = yield from self._evaluate((), method.asks())
        method.begin(scalars)
        if not math.isfinite(loss):
            why = (
                f"the loss is {loss} at the initial parameters: look for a division by zero in the model, or use other "
                "initial parameters"
            )
            return Cause.LOSS_NOT_FINITE, why
        while (over := self._over()) is None:
            direction = method.direction()
            point, then = yield from self._search(loss, direction)
            if point is None:
                back = () if self._whole else (Copy(TAIL, self._part[-1]),)
                yield AskOperation((Copy(X0, X), Copy(G0, G), *back))
                if not method.forget():
                    return Cause.NO_DESCENT, f"no step along the steepest descent lowers the loss of {loss:.6g}"
                yield self._iterated(loss, 0.0, "the line search failed: it restarts with steepest descent")
                continue
            self._iteration += 1
            if then is None or not self._whole:  # a search has left the parameters at the accepted step
                then, _ = yield from self._evaluate(self._at(point.step) if then is None else ())
            note = yield from self._learn(point, direction)
            loss = then
            yield AskOperation((Copy(X, X0),))
            yield self._iterated(loss, point.step, note)
        return over

    def _over(self) -> tuple[Cause, str] | None:
        if self.method.largest <= self.descent.tolerance:
            why = (
                f"no component of the gradient is larger than {self.method.largest:.3g} (--tolerance "
                f"{self.descent.tolerance:g})"
            )
            return Cause.CONVERGED, why
        return (Cause.EPOCHS_DONE, "all iterations are done") if self._iteration >= self.iterations else None

    def _iterated(self, loss: float, step: float, note: str) -> IterationDone:
        evaluations, self._evaluations = self._evaluations, 0
        state = {"iteration": self._iteration, **self.method.state()}
        return IterationDone(self._iteration, loss, self.method.largest, step, evaluations, note, state)

    def _evaluate(
        self, at: tuple[AnyCommand, ...], wanted: tuple[AnyCommand, ...] = ()
    ) -> Steps[tuple[float, list[float]]]:
        """Return a batch's loss at the parameters that `at` makes, and scalars of `wanted`; the gradient is in `g`."""
        gathered: LossSum = yield AskEvaluation(0 if self._whole else self._iteration, at)
        self._evaluations += 1
        self._weights = gathered.weights
        scale = 1.0 / sum(gathered.weights)
        mean: AnyCommand = Scale(scale, G) if self._whole else Combine(tuple((scale, part) for part in self._part), G)
        decay = self.descent.weight_decay
        regular: tuple[AnyCommand, ...] = (Add(decay, X, G), Dots(((X, X),))) if decay else ()
        scalars = yield AskOperation((mean, *regular, *wanted))
        square, scalars = (scalars[0], scalars[1:]) if decay else (0.0, scalars)
        return gathered.loss / gathered.samples + 0.5 * decay * square, scalars

    def _search(self, loss: float, direction: Direction) -> Steps[tuple[SearchPoint | None, float | None]]:
        """Search along a direction; return the point that was accepted, and the loss if it was evaluated there."""
        keep = (Copy(G, G0),) if self._whole else (Copy(G, G0), Copy(self._part[-1], TAIL))
        self._begin = (direction.command, *keep)
        if self.descent.line_search == "none":
            return SearchPoint(direction.first, loss, direction.slope), None
        search = wolfe(SearchStart(loss, direction.slope, direction.first, direction.largest, self.method.curvature))
        step = next(search)
        while True:
            loss_there, (slope,) = yield from self._evaluate(self._at(step), (Dots(((G, D),)),))
            try:
                step = search.send((loss_there, slope))
            except StopIteration as end:
                return end.value, loss_there

    def _at(self, step: float) -> tuple[AnyCommand, ...]:
        """Return commands that go to a step along the direction; at first also those that make the direction."""
        begin, self._begin = self._begin, ()
        return (*begin, Combine(((1.0, X0), (step, D)), X))

    def _learn(self, point: SearchPoint, direction: Direction) -> Steps[str]:
        """Have the method learn from the iteration."""
        s = Combine(((point.step, D),), self.method.step_name)
        decay = self.descent.weight_decay
        if self._whole:
            change: Terms = ((1.0, G), (-1.0, G0))
        else:  # the curvature shows only in what two batches share
            head = 1.0 / self._weights[0]
            change = ((head, self._part[0]), (-head, TAIL), *([(decay, self.method.step_name)] if decay else []))
        learning = self.method.learn(s, change, point, direction)
        commands = next(learning)
        while True:
            scalars = yield AskOperation(commands)
            try:
                commands = learning.send(scalars)
            except StopIteration as end:
                note: str = end.value
                return note
