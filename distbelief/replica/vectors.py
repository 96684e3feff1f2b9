"""Flat vectors of a replica as its story uses them: the arithmetic of Algorithm 1.1, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distbelief.core.effects import Payload, Phantom
from distbelief.sharding.layout import Layout, Range


class Vectors(Protocol):
    """The model's parameters (one vector, or two where a fetch is in flight) and the slots in which gradients
    accrue.
    """

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        ...

    def initial(self, slot: int) -> None:
        """Write the model's own values, frozen parameters too, into a gradient slot, to initialise the shards with."""

    def swap(self, landing: int, parts: Sequence[Range] = ()) -> None:
        """From here on the model computes with parameter vector `landing`, of which these parts were fetched: all where
        none is named.
        """

    def accrue(self, slot: int, first: bool, weight: float = 1.0, model: int = 0) -> None:
        """Add the step's gradient, times its weight, to a slot, or begin the slot with it. Of several models, that of
        one.
        """

    def descend(self, rate: float) -> None:
        """One step of plain SGD on the model's own parameters with the step's gradient."""

    def norm(self) -> float:
        """Return the norm of the step's gradient, in float64."""
        ...

    def carry_buffers(self, slot: int, model: int = 0) -> None:
        """Write the model's buffers behind the gradient of a slot, as they are now; of several models, those of
        one.
        """

    def outgoing(self, slot: int, part: Range) -> Payload:
        """A range of a gradient slot, to be sent."""
        ...

    def covered(self, slot: int, part: Range) -> tuple[Range, ...]:
        """Return the parts of a range that have a gradient in a slot, buffers too, in order."""
        ...

    def free(self, slot: int) -> None:
        """All shards have applied what a gradient slot holds."""


class PhantomVectors:
    """Vectors of a layout that hold nothing: for simulations that compute nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def initial(self, slot: int) -> None:
        """Nothing to write."""

    def swap(self, landing: int, parts: Sequence[Range] = ()) -> None:
        """Nothing to swap."""

    def accrue(self, slot: int, first: bool, weight: float = 1.0, model: int = 0) -> None:
        """Nothing to add."""

    def descend(self, rate: float) -> None:
        """Nothing to step."""

    def norm(self) -> float:
        """Return the norm of nothing."""
        return 0.0

    def carry_buffers(self, slot: int, model: int = 0) -> None:
        """Nothing to carry."""

    def outgoing(self, slot: int, part: Range) -> Payload:
        """A stand-in that knows its length."""
        return Phantom(part.size)

    def covered(self, slot: int, part: Range) -> tuple[Range, ...]:
        """All of it."""
        return (part,)

    def free(self, slot: int) -> None:
        """Nothing to let go."""
