"""A replica that holds the whole model: its parameters in one flat vector, stepped as a shard steps its slice, and the
vector of its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
import torch

from distbelief.core.settings import Plan
from distbelief.fabric.buckets import Bucket, buckets, of_buffers
from distbelief.server.slice import TorchSlice
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Layout
from distbelief.strategies.grouped.settings import reduction
from distbelief.tasks.flat import FlatModule


class GradientVectors(Protocol):
    """Where the gradients are added up, by whoever adds them."""

    def open(self, size: int, found: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """Two vectors of so many bytes (1-D uint8), which may be one: where this replica writes its gradient, and where
        it finds the sum.
        """
        ...

    def ready(self, bucket: int) -> None:
        """The gradient of a bucket is written."""


class OwnVector:
    """The vector of a replica whose gradients travel as messages: they are added up where they are written."""

    def open(self, size: int, found: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """One vector for both."""
        vector = torch.zeros(size, dtype=torch.uint8)
        return vector, vector

    def ready(self, bucket: int) -> None:
        """Nobody is told."""


class _Stepped(TorchSlice):
    """The slice of a replica that holds everything: the model's own buffers are in it, and are no business of an
    update's.
    """

    def __init__(self, plan: Plan, vector: torch.Tensor, partition: int) -> None:
        moving = plan.layout.homes[partition].moving.size
        super().__init__(plan, partition, vector[:moving], vector[moving:])
        self._carried = []


class TorchWhole:
    """A model and its optimizer.

    Args:
        flat: the model.
        home: where gradients are added up.
        overlaps: whether each bucket is ready as soon as its last gradient is made: only where every step is one
            backward pass.
        partition: whose part of the model it is, where that is split.
    """

    def __init__(
        self, flat: FlatModule, home: GradientVectors | None = None, overlaps: bool = False, partition: int = 0
    ) -> None:
        self.flat, self._partition = flat, partition
        self._own = flat.layout.homes[partition]
        self._home: GradientVectors = home or OwnVector()
        self._overlaps = overlaps
        self._weight, self._first, self._last = 1.0, True, True

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        return self.flat.layout

    def digest(self) -> str:
        """Of the parameters' bytes."""
        vector = torch.zeros(self._own.all.size, dtype=torch.uint8)
        self.flat.write(vector)
        return blake2b(vector.numpy().data, digest_size=16).hexdigest()

    def bind(self, plan: Plan) -> None:
        """Have the model live in the flat vector from here on."""
        layout, device, partition = plan.layout, self.flat.device, self._partition
        mesh, moving, base = plan.settings.mesh, self._own.moving.size, self._own.all.start
        plan = msgspec.structs.replace(plan, assignments=cut(layout, mesh, mesh.partitions))
        vector = torch.zeros(self._own.all.size, dtype=torch.uint8, device=device)
        self.flat.write(vector)
        self._clip = plan.settings.clip_norm
        own = reduction(plan.settings)
        found = buckets(layout, own.bucket_mb, partition)
        both = (*found, *(of_buffers(layout, partition) if own.buffers == "broadcast" else ()))
        self._slot, self.sum = self._home.open(moving, both)
        self.flat.bind([], [vector])
        self.flat.swap(0)
        self.slice = _Stepped(plan, vector, partition)
        self.slice.fill(vector[:moving], frozen=False)
        trained = [entry for entry in layout.trained_entries if entry.piece.home == partition]
        self._views = [_typed(self._slot, e.start - base, e.stop - base, e.tensor.dtype).view(e.shape) for e in trained]
        self._parameters = self.flat.trained
        self._bucket = [
            next((i for i, b in enumerate(found) if b.start <= e.start - base < b.stop), -1) for e in trained
        ]
        self._counts = [self._bucket.count(i) for i in range(len(found))]
        self._all = len(both)
        self._sums = [_typed(self.sum, b.start, b.stop, b.dtype) for b in found]
        self._buffers = [
            (vector[b.start : b.stop], self._slot[b.start : b.stop], self.sum[b.start : b.stop])
            for b in both
            if not b.adds
        ]
        self._begin()
        if self._overlaps:
            for number, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._made(number))

    # gradients

    def weigh(self, weight: float, first: bool = True, last: bool = True) -> None:
        """What the next gradient is multiplied with, and whether it is the first of its round, which is written, and
        the last.
        """
        self._weight, self._first, self._last = weight, first, last
        self._begin()

    def _begin(self) -> None:
        self._missing = [True] * len(self._views)
        self._left = list(self._counts)

    def _made(self, number: int) -> None:
        """A parameter's gradient is made: bring it into the vector, and tell where that was the last of its bucket."""
        view, gradient = self._views[number], self._parameters[number].grad
        self._missing[number] = False
        if not self._first:
            if gradient is not None:
                view.add_(gradient, alpha=self._weight)
        elif gradient is None:
            view.zero_()
        elif self._weight == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, self._weight, out=view) if gradient.dtype == view.dtype else view.copy_(gradient).mul_(
                self._weight
            )
        bucket = self._bucket[number]
        if bucket >= 0:
            self._left[bucket] -= 1
            if not self._left[bucket] and self._overlaps and self._last:
                self._home.ready(bucket)

    def gather(self) -> None:
        """Have the gradient of the step in the vector, and with the last of a round the buffers behind it."""
        with torch.no_grad():
            for number, missing in enumerate(self._missing):
                if missing:
                    self._made(number)
        if self._last:
            self._tell_rest()

    def contribute_nothing(self) -> None:
        """Have zeros there."""
        self._slot[: self._own.trained.size].zero_()
        self._tell_rest(everything=True)

    def _tell_rest(self, everything: bool = False) -> None:
        for own, slot, _ in self._buffers:
            slot.copy_(own)
        for bucket in range(0 if everything or not self._overlaps else len(self._counts), self._all):
            self._home.ready(bucket)

    def norm(self) -> float:
        """Of the sum, in float64, where the job clips it; else 0."""
        if not self._clip:
            return 0.0
        parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in self._sums]
        return float(torch.linalg.vector_norm(torch.stack(parts)))

    def update(self, factor: float, norm: float) -> None:
        """Make one optimizer step with the sum, clipped to the job's norm."""
        if self._clip and (shrinks := self._clip / (norm + 1e-6)) < 1:  # as torch's clip_grad_norm_
            trained = self._own.trained.size
            self._slot[:trained].copy_(self.sum[:trained])
            for view in self._views:
                view.mul_(shrinks)
            self.slice.apply("clipped", 0, self._slot, factor)
            return
        self.slice.apply("sum", 0, self.sum, factor)

    def adopt_buffers(self) -> None:
        """Take the buffers in the vector as the model's own."""
        for own, _, there in self._buffers:
            own.copy_(there)

    # everything

    def arrays(self) -> dict[str, Any]:
        """Everything it holds, by name."""
        return self.slice.arrays()

    def values(self) -> bytes:
        """Of the flat vector, what it holds: a copy."""
        vector = torch.zeros(self._own.all.size, dtype=torch.uint8)
        self.flat.write(vector)
        return vector.numpy().tobytes()

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Take back what `arrays` gave."""
        self.slice.load(dict(arrays))

    def state(self) -> list[tuple[str, str, tuple[int, ...], bytes]]:
        """Everything it holds, to be sent."""
        return [
            (
                name,
                str(value.dtype).removeprefix("torch."),
                tuple(value.shape),
                value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
            for name, value in self.arrays().items()
        ]

    def take_state(self, arrays: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        """Take what another's `state` gave."""
        device = self.flat.device
        self.load(
            {name: _from_bytes(data, dtype).view(shape).to(device) for name, (dtype, shape, data) in arrays.items()}
        )

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        """A copy of a range of the vector."""
        return self._slot[start:stop].numpy().tobytes()

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        """Add to a range of the vector, or put there."""
        if data:
            here = _typed(self._slot, start, start + len(data), bucket.dtype)
            there = _from_bytes(data, bucket.dtype)
            here.add_(there) if adds else here.copy_(there)


def _typed(vector: torch.Tensor, start: int, stop: int, dtype: str) -> torch.Tensor:
    return vector[start:stop].view(getattr(torch, dtype))


def _from_bytes(data: bytes, dtype: str) -> torch.Tensor:
    if not data:
        return torch.zeros(0, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
