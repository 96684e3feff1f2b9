"""The gradients of a replica that holds the whole model, in the vector in which those of a group are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from distbelief.core.settings import Plan
from distbelief.fabric.buckets import Bucket, buckets, of_buffers
from distbelief.sharding.layout import Range
from distbelief.strategies.grouped.settings import reduction


class GradientVectors(Protocol):
    """Vectors in which gradients are added up, as a carrier sees them."""

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """Open two vectors of so many bytes (1-D uint8), perhaps one: for this replica's gradient, and for the sum."""
        ...

    def ready(self, bucket: int) -> None:
        """The gradient of a bucket is written."""


class OwnVector:
    """The vector of a replica whose gradients travel as messages: they are added up where they are written.

    Args:
        device: where its model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def open(self, size: int, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """One vector for both."""
        vector = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return vector, vector

    def ready(self, bucket: int) -> None:
        """Nobody is told."""


class Gradients:
    """The gradients of a model, and the sum of the group's.

    Args:
        plan: of the job.
        partition: whose part of the model it is, where that is split.
        parameters: of the model, in the order of the layout.
        vector: in which the model lives, 1-D uint8.
        vectors: where gradients are added up.
        overlaps: whether each bucket is ready as soon as its last gradient is made.
    """

    def __init__(
        self, plan: Plan, partition: int, parameters: Sequence[torch.Tensor], vector: torch.Tensor,
        vectors: GradientVectors, overlaps: bool,
    ) -> None:  # fmt: skip
        layout, options = plan.layout, reduction(plan.settings)
        ranges = layout.partitions[partition]
        base = ranges.all.start
        trained_buckets = buckets(layout, options.bucket_mb, partition)
        both = (*trained_buckets, *(of_buffers(layout, partition) if options.buffers == "broadcast" else ()))
        self.slot, self.sum = vectors.open(ranges.moving.size, both)
        self._landing = None if self.sum.device == vector.device else torch.empty_like(self.sum, device=vector.device)
        """Copy of the sum on the model's device, where it is added up in the memory of the host."""
        self._ready, self._overlaps = vectors.ready, overlaps
        self._parameters, self._clip, self._trained = parameters, plan.settings.clip_norm, ranges.trained.size
        trained = [entry for entry in layout.trained_entries if entry.piece.partition == partition]
        self._views = [typed(self.slot, e.start - base, e.stop - base, e.tensor.dtype).view(e.shape) for e in trained]
        self._bucket = [
            next((i for i, b in enumerate(trained_buckets) if b.start <= e.start - base < b.stop), -1) for e in trained
        ]
        self._counts = [self._bucket.count(i) for i in range(len(trained_buckets))]
        self._all = len(both)
        self._sums = [typed(self.sum, b.start, b.stop, b.dtype) for b in trained_buckets]
        self._buffers = [
            (vector[b.start : b.stop], self.slot[b.start : b.stop], self.sum[b.start : b.stop])
            for b in both
            if not b.adds
        ]
        self._weight, self._first, self._last = 1.0, True, True
        self._missing, self._left = [True] * len(trained), list(self._counts)
        self._has, self._ranges = [False] * len(trained), [Range(e.start, e.stop) for e in trained]
        self._moving = ranges.moving
        if overlaps:
            for number, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._made(number))

    def weigh(self, weight: float, first: bool, last: bool) -> None:
        """Set the weight of the next gradient; whether it is its round's first, which is written, and its last."""
        self._weight, self._first, self._last = weight, first, last
        self._missing, self._left = [True] * len(self._views), list(self._counts)

    def _made(self, number: int) -> None:
        """A parameter's gradient is made: bring it into the vector, and tell where that was the last of its bucket."""
        view, gradient = self._views[number], self._parameters[number].grad
        self._missing[number] = False
        self._has[number] = gradient is not None or (self._has[number] and not self._first)
        if not self._first:
            if gradient is not None:
                view.add_(gradient.to(view.device), alpha=self._weight)
        elif gradient is None:
            view.zero_()
        elif self._weight == 1.0:
            view.copy_(gradient)
        elif (gradient.dtype, gradient.device) == (view.dtype, view.device):
            torch.mul(gradient, self._weight, out=view)
        else:
            view.copy_(gradient).mul_(self._weight)
        bucket = self._bucket[number]
        if bucket >= 0:
            self._left[bucket] -= 1
            if not self._left[bucket] and self._overlaps and self._last:
                self._ready(bucket)

    def gather(self) -> None:
        """Have the gradient of the step in the vector, and with the last of a round the buffers behind it."""
        with torch.no_grad():
            for number, missing in enumerate(self._missing):
                if missing:
                    self._made(number)
        if self._last:
            self._tell_rest()

    def covered(self) -> tuple[Range, ...]:
        """Return the ranges with a gradient of this replica in this round, buffers too; none where all have."""
        if all(self._has):
            return ()
        return self._moving.without(section for section, has in zip(self._ranges, self._has, strict=True) if not has)

    def contribute_nothing(self) -> None:
        """Have zeros there."""
        self.slot[: self._trained].zero_()
        self._tell_rest(everything=True)

    def _tell_rest(self, everything: bool = False) -> None:
        for buffer, slot, _ in self._buffers:
            slot.copy_(buffer)
        for bucket in range(0 if everything or not self._overlaps else len(self._counts), self._all):
            self._ready(bucket)

    def norm(self) -> float:
        """Return the norm of the sum, in float64, where the job clips it; else 0."""
        if not self._clip:
            return 0.0
        parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in self._sums]
        return float(torch.linalg.vector_norm(torch.stack(parts)))

    def clip(self, norm: float) -> tuple[str, torch.Tensor]:
        """Clip the sum to the job's norm, once; returns it on the model's device, and a name for that memory."""
        name, clipped = "sum", self.sum
        if self._clip and (shrinks := self._clip / (norm + 1e-6)) < 1:  # as torch's clip_grad_norm_
            self.slot[: self._trained].copy_(self.sum[: self._trained])
            for view in self._views:
                view.mul_(shrinks)
            name, clipped = "clipped", self.slot
        return (name, clipped) if self._landing is None else ("landing", self._landing.copy_(clipped))

    def adopt_buffers(self) -> None:
        """Take the buffers in the vector as the model's own."""
        for buffer, _, there in self._buffers:
            buffer.copy_(there)


def typed(vector: torch.Tensor, start: int, stop: int, dtype: str) -> torch.Tensor:
    """Bytes [start, stop) of a vector, as values of a dtype."""
    return vector[start:stop].view(getattr(torch, dtype))
