"""Flat vectors of a replica as its story uses them: the arithmetic of Algorithm 1.1, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from distbelief.core.conversations.pushing import Fetched
from distbelief.core.effects import Payload, Phantom
from distbelief.core.messages import Version
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
        return 0.0

    def outgoing(self, slot: int, part: Range) -> Payload:
        return Phantom(part.size)

    def covered(self, slot: int, part: Range) -> tuple[Range, ...]:
        return (part,)


# What has arrived and what is in use are kept apart, since a fetch may be in flight while a step computes: a push must
# name the version that its gradient was computed from, not one that arrived meanwhile.
class Parameters:
    """Versions in use, and versions that have arrived and are not in use yet.

    Args:
        shards: that hold any parameters that move.

    >>> held = Parameters(["shard 0", "shard 1"])
    >>> held.arrive("shard 0", Fetched(0, 0, 16, Version(0, 4), floor=3)); held.land()
    >>> held.versions["shard 0"].updates, held.floor, held.newest, held.behind()
    (4, 0, 3, ['shard 1'])
    """

    def __init__(self, shards: Iterable[str]) -> None:
        self.versions = dict.fromkeys(shards, Version(0, 0))
        """Version of each shard, in use."""
        self.floor = 0
        """Tick below which every push is in the parameters in use, at all shards."""
        self._arrived = dict(self.versions)
        self._floors = dict.fromkeys(self.versions, 0)

    def arrive(self, shard: str, event: Fetched) -> None:
        """Note parameters that have arrived from a shard; those that do not move have no floor."""
        self._arrived[shard] = event.version
        if shard in self._floors:
            self._floors[shard] = event.floor

    def arrived(self, shard: str) -> Version:
        """Return the version of a shard that has arrived last."""
        return self._arrived[shard]

    def land(self) -> None:
        """Use what has arrived from now on."""
        self.versions, self.floor = dict(self._arrived), min(self._floors.values())

    @property
    def newest(self) -> int:
        """Highest floor of any shard."""
        return max(self._floors.values())

    def behind(self, tick: int = 0) -> list[str]:
        """Return the shards whose floor is lower than another's, or than a tick."""
        newest = max(self.newest, tick)
        return [shard for shard, floor in self._floors.items() if floor < newest]
