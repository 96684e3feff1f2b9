"""Flat vectors of a replica as its story uses them: the arithmetic of Algorithm 1.1, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distbelief.core.effects import Payload, Phantom
from distbelief.sharding.layout import Layout, Range


# Why vectors and slots: a fetch lands in a vector that the model does not compute with, and becomes the model's in a
# `swap` between two steps. A push is sent from the slot itself, so no gradient is written there before all shards have
# applied the push.
class Vectors(Protocol):
    """Parameters of the model (one vector, or two where a fetch is in flight), and slots in which gradients accrue."""

    layout: Layout
    """Layout of the model."""

    def initial(self, slot: int) -> None:
        """Write the model's own values into a gradient slot, frozen parameters too, to initialise the shards with."""

    def swap(self, landing: int, parts: Sequence[Range] = ()) -> None:
        """Have the model compute with parameter vector `landing`, of which these parts were fetched (all where none
        is named).
        """

    def accrue(self, slot: int, first: bool, weight: float = 1.0, model: int = 0) -> None:
        """Add the step's gradient of a model, times its weight, to a slot, or begin the slot with it."""

    def descend(self, rate: float) -> None:
        """Step the model's own parameters by plain SGD with the step's gradient."""

    def norm(self) -> float:
        """Return the norm of the step's gradient, in float64."""

    def carry_buffers(self, slot: int, model: int = 0) -> None:
        """Write a model's buffers, as they are now, behind the gradient of a slot."""

    def outgoing(self, slot: int, part: Range) -> Payload:
        """Return a range of a gradient slot, to be sent."""

    def covered(self, slot: int, part: Range) -> tuple[Range, ...]:
        """Return the parts of a range that have a gradient in a slot, buffers too, in order."""

    def free(self, slot: int) -> None:
        """Note that all shards have applied what a gradient slot holds."""


class PhantomVectors:
    """Vectors that hold nothing, for simulations that compute nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def _do_nothing(self, *_args: object, **_options: object) -> None:
        pass

    initial = swap = accrue = descend = carry_buffers = free = _do_nothing

    def norm(self) -> float:
        """Return the norm of nothing."""
        return 0.0

    def outgoing(self, slot: int, part: Range) -> Payload:
        """Return a stand-in that knows its length."""
        return Phantom(part.size)

    def covered(self, slot: int, part: Range) -> tuple[Range, ...]:
        """Return the whole range."""
        return (part,)
