"""Promises of a fabric, the common part of a job's carriers, and the player of schedules.

A fabric is one rank's side of the reduction of a group's vectors, round after round.

1. *It adds up.* When `reduce` has returned True, every vector on every rank fulfils the postcondition of its schedule;
   all ranks have the same bits.
2. *It does not block.* `ready` and `reduce` return within a moment, whichever rank is late: the driver serves links
   meanwhile.
3. *Any order is right.* Ranks may make vectors ready at any time, and the vectors of a round in any order.
4. *It returns vectors.* After True no rank reads or writes this rank's vectors, and the results do not change until
   this rank makes vectors ready again.
5. *It writes only to the vectors.*
6. *It reports a lost rank.* `reduce` returns False if a rank is gone; the driver may give up a round at any moment.

`distbelief.testing.check_fabric` checks these promises. There are three carriers: the `memory` of a host,
`role_links`, and torch's `process_group`; simulated role links are `messages`.
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
"""Function that returns whether a message has arrived that a waiting rank must take now."""
MEET_SECONDS = 15.0
"""Limit for reaching a group's store, and for each answer on a new link: nothing can interrupt these."""
LOOK_SECONDS = 2e-3
"""Time after which a waiting member looks again, for the others and for messages."""
V = TypeVar("V")
V_contra = TypeVar("V_contra", contravariant=True)


class Fabric(Protocol):
    """One rank's side of a reduction; its vectors are the buckets of one flat vector, by number."""

    def ready(self, bucket: int) -> None:
        """Note that a bucket holds this rank's values: once in each round."""

    def reduce(self) -> bool | None:
        """Continue a round; return True when all is reduced, False if a rank is gone, None to be called again."""
        ...


class Carrier:
    """One replica's part in the groups of a job.

    This base class has vectors but carries nothing: the replica is alone, or its story sends messages.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.store = ""
        """Address at which the other members of a group reach this one; "" if they need none."""
        self.fault = ""
        """Reason why the last group or reduction failed; "" for none."""
        self.traffic = Traffic()
        """Bytes that it moves, besides those of the role's own endpoint."""

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """Open two vectors of `size` bytes (1-D uint8), for the gradient and for the sum; they may be the same."""
        vector = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return vector, vector

    def form(self, group: Assemble, interrupted: Told) -> bool:
        """Join a group, and leave the one before; return False if that fails, or once `interrupted` is true."""
        return True

    def ready(self, bucket: int) -> None:
        """Note that a bucket is written, as in a fabric."""

    def reduce(self) -> bool | None:
        return True

    def close(self) -> None:
        """Leave the group, and close everything opened."""


class InOrder(Carrier, ABC):
    """Carrier that reduces its buckets in place and in order, beside the backward pass."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buckets: list[Bucket] = []
        self._views: list[torch.Tensor] = []
        self._ready: list[bool] = []
        self._begun: list[torch.futures.Future[Any]] = []
        self._wait = Wait()

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        vector, _ = super().open(size, buckets)
        self._buckets = list(buckets)
        self._views = [vector[b.start : b.stop].view(getattr(torch, b.dtype)) for b in buckets]
        return vector, vector

    def _begin_round(self) -> None:
        self._wait.end()
        self._ready = [False] * len(self._buckets)
        self._begun = []

    def ready(self, bucket: int) -> None:
        # torch's collectives and a link's chunks need the same order on all ranks, whichever gradient autograd finishes
        # first
        self._ready[bucket] = True
        while len(self._begun) < len(self._buckets) and self._ready[len(self._begun)]:
            self._begun.append(self._begin(len(self._begun)))

    def reduce(self) -> bool | None:
        for reduced in self._begun:
            while not reduced.done():
                if self._wait.rest():
                    return None
            try:
                reduced.wait()  # on a GPU the next kernels wait, not this thread
            except (RuntimeError, JobFailed) as error:
                self.fault = str(error)
                return False
        self._begin_round()
        return True

    @abstractmethod
    def _begin(self, bucket: int) -> torch.futures.Future[Any]:
        """Begin to reduce a bucket."""


def schedule_of(bucket: Bucket, algorithm: str, ranks: int, per_host: int) -> Schedule:
    """Return the schedule of a bucket; buffers go from the first rank to all."""
    if not bucket.adds:
        return broadcast(ranks, bucket.length)
    hosts = by_host(ranks, per_host) if algorithm.startswith("hierarchical") else ()
    return schedule(algorithm, ranks, bucket.length, hosts)


class Mover(Protocol[V_contra]):
    """Mover of one rank's bytes, step by step; it chooses the type of its vectors."""

    def post(self, vector: V_contra, step: RankStep) -> None:
        """Send the elements that leave at a step, with their present values."""

    def take(self, vector: V_contra, step: RankStep) -> bool:
        """Add or store the elements that a step receives if all have come; return whether they have.

        It may wait only in a thread.
        """
        ...


class SchedulePlayer(Generic[V]):
    """Progress of one rank through one schedule."""

    __slots__ = ("_mover", "_steps", "done", "vector")

    def __init__(self, mover: Mover[V], vector: V, steps: Sequence[RankStep]) -> None:
        self._mover, self.vector, self._steps = mover, vector, steps
        self.done = 0
        """Number of finished steps."""

    @property
    def step(self) -> RankStep | None:
        """Present step; None once all are done."""
        return self._steps[self.done] if self.done < len(self._steps) else None

    def begin(self) -> bool:
        """Begin with this rank's values in the vector; return whether nothing more is to do."""
        if self._steps:
            self._mover.post(self.vector, self._steps[0])
        return self.advance()

    def advance(self) -> bool:
        """Take all steps whose bytes have come; return whether the last is done."""
        steps, count = self._steps, len(self._steps)
        while self.done < count:
            if not self._mover.take(self.vector, steps[self.done]):
                return False
            self.done += 1
            if self.done < count:
                self._mover.post(self.vector, steps[self.done])
        return True


def play(mover: Mover[V], vector: V, steps: Sequence[RankStep]) -> None:
    """Play a schedule to its end, with a mover that waits by itself."""
    player = SchedulePlayer(mover, vector, steps)
    done = player.begin()
    while not done:
        done = player.advance()
