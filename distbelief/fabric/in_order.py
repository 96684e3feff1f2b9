"""A fabric whose vectors are reduced one after the other in their order, by a thread beside the backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from distbelief.errors import JobFailed
from distbelief.fabric.buckets import Bucket

MEET_SECONDS = 15.0
"""Longest time to find a group's store, where it has one, and of each answer to a link: nothing breaks that off."""
LOOK_SECONDS = 2e-3
"""Time between two looks of a member that waits: whether the others are there, and whether anything has arrived."""


class InOrder(ABC):
    """One rank's side; what it begins with is reduced in its place.

    Args:
        device: where its vector is.
    """

    def __init__(self, device: torch.device) -> None:
        self.fault = ""
        """Why the last reduction could not be made."""
        self._device = device
        self._buckets: list[Bucket] = []
        self._vector = torch.zeros(0, dtype=torch.uint8)
        self._views: list[torch.Tensor] = []
        self._ready: list[bool] = []
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """One vector, in which the sum takes the place of the gradient."""
        self._buckets = list(buckets)
        self._vector = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._views = [self._vector[b.start : b.stop].view(getattr(torch, b.dtype)) for b in buckets]
        return self._vector, self._vector

    def _begin_round(self) -> None:
        self._ready = [False] * len(self._buckets)
        self._futures = []

    def ready(self, bucket: int) -> None:
        """The gradient of a bucket is there; buckets are reduced in their order, the same on all ranks."""
        self._ready[bucket] = True
        while self._formed and len(self._futures) < len(self._buckets) and self._ready[len(self._futures)]:
            self._futures.append(self._start(len(self._futures)))

    def reduce(self) -> bool | None:
        """Return whether all is reduced; False where a member is gone, None (after a rest) where others are awaited."""
        for future in self._futures:
            if not future.done():
                self._rest()
                return None
            try:
                future.value()
            except (RuntimeError, JobFailed) as error:
                self.fault = str(error)
                return False
        self._begin_round()
        return True

    @property
    @abstractmethod
    def _formed(self) -> bool: ...

    @abstractmethod
    def _start(self, bucket: int) -> torch.futures.Future[torch.Tensor]:
        """Have the thread reduce a bucket, after those before."""

    @abstractmethod
    def _rest(self) -> None:
        """Wait for the thread, for a moment."""
