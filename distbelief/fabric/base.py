"""The promises of a fabric, and what a job's carriers have in common.

A fabric is one rank's side of what reduces the vectors of a group, round after round.

1. *It adds up.* When `reduce` has said True, every vector holds on every rank what the postcondition of its schedule
   says, of what the ranks held when they made it ready; all ranks have the same bits.
2. *It waits for nobody.* `ready` and `reduce` come back within a moment, whoever is late: who drives it carries links
   meanwhile.
3. *In any order.* Ranks make vectors ready when they like, and the vectors of a round in any order.
4. *It gives back.* After True nobody reads or writes what this rank brought, and what it found stays as it is until
   this rank makes vectors ready again.
5. *It keeps to its place.* It writes to nothing but the vectors.
6. *It ends nothing that it was not told to end.* False says that a rank is gone; who drives may give up at any moment.

`distbelief.testing.check_fabric` holds a fabric to them. There are three carriers: the `memory` of a host,
`role_links`, and torch's `process_group`; where time is simulated, `messages` are those of role links.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from distbelief.core.conversations.grouping import Assemble
from distbelief.core.messages import Traffic
from distbelief.errors import JobFailed
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.waiting import Wait
from distbelief.schedules.allreduce import broadcast, by_host, schedule
from distbelief.schedules.schedule import RankStep, Schedule

Told = Callable[[], bool]
"""Tells that something has arrived of which a waiting rank must know now."""
MEET_SECONDS = 15.0
"""Longest time to find a group's store, where it has one, and of each answer to a link: nothing breaks that off."""
LOOK_SECONDS = 2e-3
"""Time between two looks of a member that waits: whether the others are there, and whether anything has arrived."""


class Fabric(Protocol):
    """One rank's side; its vectors are the buckets of one flat vector, known by their number."""

    def ready(self, bucket: int) -> None:
        """Note that a bucket holds what this rank brings: once in each round."""

    def reduce(self) -> bool | None:
        """Go on with a round of which all vectors are ready: True when all is reduced, False where that cannot be.

        None says that others are waited for: it is to be asked again.
        """
        ...


class Carrier:
    """One replica's part in the groups of a job. This one is of a replica whose gradient is the sum, or travels as
    messages: it has a vector, and nobody to wait for.

    Args:
        device: where its vector is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.store = ""
        """Address at which the other members of a group reach this one, where they do."""
        self.fault = ""
        """Why the last group could not be formed, or the last reduction made."""
        self.traffic = Traffic()
        """Bytes that it moves beside its links."""

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """Open two vectors of so many bytes (1-D uint8), perhaps one: for this replica's gradient, and for the sum."""
        vector = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return vector, vector

    def form(self, group: Assemble, interrupted: Told) -> bool:
        """Take one's place in a group, in that of the one before.

        False where that cannot be, or as soon as `interrupted` says that something has arrived.
        """
        return True

    def ready(self, bucket: int) -> None:
        """Note that a bucket is written; as a fabric."""

    def reduce(self) -> bool | None:
        return True


class InOrder(Carrier, ABC):
    """A carrier that begins with its buckets in their order, beside the backward pass, and reduces in their place."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buckets: list[Bucket] = []
        self._views: list[torch.Tensor] = []
        self._ready: list[bool] = []
        self._begun: list[torch.futures.Future[Any]] = []
        self._wait = Wait()

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """One vector, in which the sum takes the place of the gradient."""
        vector, _ = super().open(size, buckets)
        self._buckets = list(buckets)
        self._views = [vector[b.start : b.stop].view(getattr(torch, b.dtype)) for b in buckets]
        return vector, vector

    def _begin_round(self) -> None:
        self._wait.end()
        self._ready = [False] * len(self._buckets)
        self._begun = []

    def ready(self, bucket: int) -> None:
        """The gradient of a bucket is there; buckets are reduced in their order, the same on all ranks."""
        self._ready[bucket] = True
        while len(self._begun) < len(self._buckets) and self._ready[len(self._begun)]:
            self._begun.append(self._begin(len(self._begun)))

    def reduce(self) -> bool | None:
        """Return whether all is reduced; False where a member is gone, None (after a rest) where others are awaited."""
        for reduced in self._begun:
            while not reduced.done():
                if self._wait.rest():
                    return None
            try:
                reduced.wait()  # on a GPU, what is asked of it next waits
            except (RuntimeError, JobFailed) as error:
                self.fault = str(error)
                return False
        self._begin_round()
        return True

    @abstractmethod
    def _begin(self, bucket: int) -> torch.futures.Future[Any]:
        """Begin with a bucket, after those before."""


def schedule_of(bucket: Bucket, algorithm: str, ranks: int, per_host: int) -> Schedule:
    """The schedule of a bucket; one that is not added up goes from the first rank to all."""
    if not bucket.adds:
        return broadcast(ranks, bucket.length)
    hosts = by_host(ranks, per_host) if algorithm.startswith("hierarchical") else ()
    return schedule(algorithm, ranks, bucket.length, hosts)


V = TypeVar("V")
V_contra = TypeVar("V_contra", contravariant=True)


class Mover(Protocol[V_contra]):
    """Mover of the bytes of one rank, step by step; vectors are whatever it knows them by."""

    def post(self, vector: V_contra, step: RankStep) -> None:
        """Let go what leaves at a step, as it is now, whatever is taken into its place later."""

    def take(self, vector: V_contra, step: RankStep) -> bool:
        """Add or put what is received at a step, in its order, if all of it has come; whether it has.

        It waits for a moment at most, but where it has a thread of its own.
        """
        ...


class SchedulePlayer(Generic[V]):
    """One rank's way through one schedule.

    Args:
        mover: of this rank.
        vector: what is moved.
        steps: of this rank.
    """

    __slots__ = ("_mover", "_steps", "done", "vector")

    def __init__(self, mover: Mover[V], vector: V, steps: Sequence[RankStep]) -> None:
        self._mover, self.vector, self._steps = mover, vector, steps
        self.done = 0
        """Steps that are done."""

    @property
    def step(self) -> RankStep | None:
        """The step at which it is; None where all are done."""
        return self._steps[self.done] if self.done < len(self._steps) else None

    def begin(self) -> bool:
        """The vector holds what this rank brings; whether that was all."""
        if self._steps:
            self._mover.post(self.vector, self._steps[0])
        return self.advance()

    def advance(self) -> bool:
        """Take the steps for which all has come, as many as there are; whether the last is done."""
        steps, count = self._steps, len(self._steps)
        while self.done < count:
            if not self._mover.take(self.vector, steps[self.done]):
                return False
            self.done += 1
            if self.done < count:
                self._mover.post(self.vector, steps[self.done])
        return True


def play(mover: Mover[V], vector: V, steps: Sequence[RankStep]) -> None:
    """Play to the end here, over a mover that rests where it waits."""
    player = SchedulePlayer(mover, vector, steps)
    done = player.begin()
    while not done:
        done = player.advance()
