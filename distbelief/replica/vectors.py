"""Flat vectors of a replica: the arithmetic of Algorithm 1.1, in place, and the versions of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from distbelief.core.conversations.pushing import Fetched
from distbelief.core.effects import Payload, Phantom
from distbelief.core.messages import Version
from distbelief.sharding.layout import Layout, Range


# A fetch lands in a vector that the model does not compute with, and becomes the model's in a `swap` between two steps.
# A push is sent from its slot, so no gradient is written there before all shards have applied the push.
class Vectors(Protocol):
    """Parameter vectors of the model, two where fetches are in flight during steps, and slots of accrued gradients."""

    layout: Layout

    def initial(self, slot: int) -> None:
        """Write the model's values, frozen ones too, into a gradient slot, to initialise the shards."""

    def swap(self, landing: int, parts: Sequence[Range] = ()) -> None:
        """Have the model compute with parameter vector `landing`; `parts` were fetched, or all where it is empty."""

    def accrue(self, slot: int, first: bool, weight: float = 1.0, model: int = 0) -> None:
        """Add a model's gradient of the step, times a weight, to a slot, or begin the slot with it."""

    def descend(self, rate: float, clipping: float = 1.0) -> None:
        """Step the model with the step's gradient, times `clipping`: by the local optimizer, or by plain SGD.

        `rate` is the learning rate of plain SGD. With a local optimizer it is a factor on that optimizer's rate.
        """

    def change(self, slot: int, part: Range | None = None) -> None:
        """Write the change by local steps into a slot, or a part of it: the fetched values less the present ones."""

    def mix(self, part: Range, alpha: float) -> None:
        """Move the parameters in a range to the fetched ones: `alpha` is the weight of the present values."""

    def norm(self) -> float:
        """Return the norm of the step's gradient, in float64."""

    def carry_buffers(self, slot: int, model: int = 0, part: Range | None = None) -> None:
        """Write a model's present buffers behind the gradient in a slot, or those in a part of it."""

    def outgoing(self, slot: int, part: Range) -> Payload:
        """Return a range of a gradient slot, to send."""

    def covered(self, slot: int, part: Range) -> tuple[Range, ...]:
        """Return the parts of a range with gradients in a slot, and buffers, in order."""

    def free(self, slot: int) -> None:
        """Note that all shards have applied the push in a slot."""


class PhantomVectors:
    """Vectors without values, for simulations that compute nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def _do_nothing(self, *_args: object, **_options: object) -> None:
        pass

    initial = swap = accrue = descend = change = mix = carry_buffers = free = _do_nothing

    def norm(self) -> float:
        return 0.0

    def outgoing(self, slot: int, part: Range) -> Payload:
        return Phantom(part.size)

    def covered(self, slot: int, part: Range) -> tuple[Range, ...]:
        return (part,)


# Versions in use are apart from those that have arrived, since a fetch may land during a step: a push must name the
# version that its gradient was computed from.
class Parameters:
    """Versions of the parameters in use, and of those that have arrived.

    Args:
        shards: with moving ranges.

    >>> held = Parameters(["shard 0", "shard 1"])
    >>> held.arrive("shard 0", Fetched(0, 0, 16, Version(0, 4), floor=3)); held.land()
    >>> held.versions["shard 0"].updates, held.floor, held.newest, held.behind()
    (4, 0, 3, ['shard 1'])
    """

    def __init__(self, shards: Iterable[str]) -> None:
        self.versions = dict.fromkeys(shards, Version(0, 0))
        """Version of each shard in use."""
        self.floor = 0
        """Tick below which all pushes are in the parameters in use."""
        self.samples = 0
        """Samples that are in the newest parameters."""
        self._arrived = dict(self.versions)
        self._floors = dict.fromkeys(self.versions, 0)

    def arrive(self, shard: str, event: Fetched) -> None:
        """Note parameters from a shard; frozen ones have no floor."""
        self._arrived[shard] = event.version
        self.samples = max(self.samples, event.samples)
        if shard in self._floors:
            self._floors[shard] = event.floor

    def arrived(self, shard: str) -> Version:
        """Return the last version that has arrived from a shard."""
        return self._arrived[shard]

    def land(self) -> None:
        """Use the versions that have arrived."""
        self.versions, self.floor = dict(self._arrived), min(self._floors.values())

    @property
    def newest(self) -> int:
        """Highest floor of any shard."""
        return max(self._floors.values())

    def behind(self, tick: int = 0) -> list[str]:
        """Return the shards whose floor is lower than another shard's, or than a tick."""
        newest = max(self.newest, tick)
        return [shard for shard, floor in self._floors.items() if floor < newest]
