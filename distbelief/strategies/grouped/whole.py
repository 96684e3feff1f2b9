"""The model of a replica in a group: its parameters in one flat vector, updated as a shard's slice is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec
import torch

from distbelief.core.conversations.agreement import Squares
from distbelief.core.settings import Plan
from distbelief.fabric.base import Carrier
from distbelief.fabric.buckets import Bucket, buckets, of_buffers
from distbelief.server.slice import TorchSlice, as_bytes, copy_scaled
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Layout, Range
from distbelief.strategies.grouped.settings import reduction
from distbelief.tasks.flat import FlatModule


class Whole:
    """The model of a replica as its client sees it; this one holds nothing, for simulations that compute nothing.

    Ranges are of the flat vector, in bytes.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def digest(self) -> str:
        """Return a digest of the parameters' bytes, by which replicas with equal parameters are recognised."""
        return "phantom"

    def weigh(self, weight: float, first: bool = True, last: bool = True) -> None:
        """Set the weight of the next gradient in its round, and whether it is the round's first, and its last."""

    def gather(self) -> None:
        """Add the step's gradient to the round's vector; with the last one, put the buffers behind it."""

    def take_written(self) -> None:
        """Take what the script has written to the model's parameters."""

    def contribute_nothing(self) -> None:
        """Contribute zeros: this replica has no minibatch in the round."""

    def norm(self) -> float:
        """Return the norm of the sum, where the job clips it; else 0."""
        return 0.0

    def clip(self, norm: float) -> None:
        """Clip the sum of the gradients, given its norm over the whole model."""

    def squares(self) -> Squares:
        """Return the squares of the parts that are here of layers cut over partitions, after the update to come."""
        return ()

    def update(self, factor: float, norms: Squares = (), alone: bool = False) -> None:
        """Make an optimizer step with the sum, at `factor` times the learning rate.

        `norms` are those of the layers that are cut over partitions, each as a whole. `alone` leaves out parameters
        without a gradient, as plain PyTorch does: no other replica has one for them.
        """

    def adopt_buffers(self) -> None:
        """Copy the buffers in the vector to the model."""

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return all its tensors by name; these are views, not copies."""
        return {}

    def values(self, start: int, stop: int) -> bytes:
        """Return a copy of a range of the flat vector."""
        return b""

    def load(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Restore what `arrays` returned."""

    def state(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """List name, dtype, shape and length in bytes of each array of the state."""
        return []

    def state_bytes(self, name: str, start: int, stop: int) -> bytes:
        """Return a copy of bytes [start, stop) of an array."""
        return b""

    def take_state(self, arrays: Mapping[str, tuple[str, tuple[int, ...], bytearray]]) -> None:
        """Take the state of another replica: dtype, shape and bytes of each array."""

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        """Return a copy of a range of the vector of gradients."""
        return b""

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        """Add data to a range of the vector, or overwrite it."""


class _Stepped(TorchSlice):
    """The slice of a replica that holds everything; it contains the model's buffers, which no update changes."""

    def __init__(self, plan: Plan, vector: torch.Tensor, partition: int) -> None:
        moving = plan.layout.partitions[partition].moving.size
        super().__init__(plan, partition, vector[:moving], vector[moving:])
        self._carried = []


class TorchWhole(Whole):
    """A model and its optimizer.

    Args:
        overlaps: whether a bucket is ready once its last gradient is: only where a step is one backward pass.
    """

    def __init__(
        self, flat: FlatModule, carrier: Carrier | None = None, overlaps: bool = False, partition: int = 0
    ) -> None:
        super().__init__(flat.layout)
        self.flat, self._partition = flat, partition
        self._ranges = flat.layout.partitions[partition]
        self._carrier = carrier or Carrier(flat.device)
        self._overlaps = overlaps
        self._gradients: Gradients | None = None
        self._slice: TorchSlice | None = None
        self._vector = torch.empty(0, dtype=torch.uint8)
        """The model's parameters, once it is bound."""
        self._applied = "", torch.empty(0)
        """Name and tensor of the gradient for the next update."""

    @property
    def gradients(self) -> Gradients:
        """The model's gradients, once it is bound."""
        assert self._gradients is not None
        return self._gradients

    @property
    def slice(self) -> TorchSlice:
        """The parameters and their optimizer, once the model is bound."""
        assert self._slice is not None
        return self._slice

    def digest(self) -> str:
        vector = torch.zeros(self._ranges.all.size, dtype=torch.uint8)
        self.flat.write(vector)
        return blake2b(vector.numpy().data, digest_size=16).hexdigest()

    def bind(self, plan: Plan) -> None:
        """Move the model's parameters into the flat vector."""
        layout, device, partition = plan.layout, self.flat.device, self._partition
        partitions, moving = plan.settings.partitions, self._ranges.moving.size
        plan = msgspec.structs.replace(plan, assignments=cut(layout, partitions, partitions))
        vector = torch.zeros(self._ranges.all.size, dtype=torch.uint8, device=device)
        self.flat.write(vector)
        self._vector = vector
        self.flat.bind([], [vector])
        self.flat.swap(0)
        self._slice = _Stepped(plan, vector, partition)
        self._slice.fill(vector[:moving], frozen=False)
        self._gradients = Gradients(plan, partition, self.flat.trained, vector, self._carrier, self._overlaps)

    # gradients

    def weigh(self, weight: float, first: bool = True, last: bool = True) -> None:
        self.gradients.weigh(weight, first, last)

    def gather(self) -> None:
        self.flat.take_buffers(self._vector)
        self.gradients.gather()

    def take_written(self) -> None:
        self.flat.write(self._vector)
        self.slice.moved()

    def contribute_nothing(self) -> None:
        self.flat.take_buffers(self._vector)
        self.gradients.contribute_nothing()

    def norm(self) -> float:
        return self.gradients.norm()

    def clip(self, norm: float) -> None:
        self._applied = self.gradients.clip(norm)

    def squares(self) -> Squares:
        name, clipped = self._applied
        return self.slice.squares_with(name, 0, clipped)

    def update(self, factor: float, norms: Squares = (), alone: bool = False) -> None:
        name, clipped = self._applied
        covered = self.gradients.covered() if alone else ()
        self.slice.apply(name, 0, clipped, factor, covered, norms)
        self.flat.swap(0)

    def adopt_buffers(self) -> None:
        self.gradients.adopt_buffers()

    # state

    def arrays(self) -> dict[str, torch.Tensor]:
        self.flat.take_buffers(self._vector)
        return self.slice.arrays()

    def values(self, start: int, stop: int) -> bytes:
        base = self._ranges.all.start
        return self._vector[start - base : stop - base].cpu().numpy().tobytes()

    def load(self, arrays: Mapping[str, torch.Tensor]) -> None:
        self.slice.load(dict(arrays))
        self.flat.swap(0)

    def state(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        arrays = self.arrays().items()
        return [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.nbytes) for name, t in arrays]

    def state_bytes(self, name: str, start: int, stop: int) -> bytes:
        return as_bytes(self.arrays()[name].detach())[start:stop].cpu().numpy().tobytes()

    def take_state(self, arrays: Mapping[str, tuple[str, tuple[int, ...], bytearray]]) -> None:
        device = self.flat.device
        self.load(
            {name: _from_bytes(data, dtype).view(shape).to(device) for name, (dtype, shape, data) in arrays.items()}
        )

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        return self.gradients.slot[start:stop].cpu().numpy().tobytes()

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        if data:
            target = typed(self.gradients.slot, start, start + len(data), bucket.dtype)
            values = _from_bytes(bytearray(data), bucket.dtype).to(target.device)
            target.add_(values) if adds else target.copy_(values)


def _from_bytes(data: bytearray, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.frombuffer(data, dtype=kind) if data else torch.zeros(0, dtype=kind)


class Gradients:
    """The gradients of a model, and the sum of those of the group, in vectors of the carrier.

    Args:
        parameters: the model's, in the order of the layout.
        vector: the memory of the model, 1-D uint8.
        overlaps: whether a bucket is ready once its last gradient is.
    """

    def __init__(
        self,
        plan: Plan,
        partition: int,
        parameters: Sequence[torch.Tensor],
        vector: torch.Tensor,
        carrier: Carrier,
        overlaps: bool,
    ) -> None:
        layout, options = plan.layout, reduction(plan.settings)
        ranges = layout.partitions[partition]
        base = ranges.all.start
        trained_buckets = buckets(layout, options.bucket_mb, partition)
        both = (*trained_buckets, *(of_buffers(layout, partition) if options.buffers == "broadcast" else ()))
        self.slot, self.sum = carrier.open(ranges.moving.size, both)
        self._landing = None if self.sum.device == vector.device else torch.empty_like(self.sum, device=vector.device)
        """Copy of the sum on the model's device, where the sum is made in the host's memory."""
        self._ready, self._overlaps = carrier.ready, overlaps
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
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._take(number))

    def weigh(self, weight: float, first: bool, last: bool) -> None:
        """Set the weight of the next gradient, and whether it is the round's first, which is written, and its last."""
        self._weight, self._first, self._last = weight, first, last
        self._missing, self._left = [True] * len(self._views), list(self._counts)

    def _take(self, number: int) -> None:
        """Bring a parameter's gradient into the vector; after the last of a bucket, the carrier may add that up."""
        view, gradient = self._views[number], self._parameters[number].grad
        self._missing[number] = False
        self._has[number] = gradient is not None or (self._has[number] and not self._first)
        if not self._first:
            if gradient is not None:
                view.add_(gradient.to(view.device), alpha=self._weight)
        elif gradient is None:
            view.zero_()
        else:
            copy_scaled(view, gradient, self._weight)
        bucket = self._bucket[number]
        if bucket >= 0:
            self._left[bucket] -= 1
            if not self._left[bucket] and self._overlaps and self._last:
                self._ready(bucket)

    def gather(self) -> None:
        """Bring the step's gradient into the vector; with a round's last one, also the buffers."""
        with torch.no_grad():
            for number, missing in enumerate(self._missing):
                if missing:
                    self._take(number)
        if self._last:
            self._release()

    def covered(self) -> tuple[Range, ...]:
        """Return the ranges for which this replica has a gradient in the round, with buffers; () for all."""
        if all(self._has):
            return ()
        return self._moving.without(section for section, has in zip(self._ranges, self._has, strict=True) if not has)

    def contribute_nothing(self) -> None:
        """Contribute zeros: this replica has no minibatch in the round."""
        self.slot[: self._trained].zero_()
        self._release(everything=True)

    def _release(self, everything: bool = False) -> None:
        """Hand the carrier the buffers, and the buckets that it does not have."""
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
        """Clip the sum, given its norm; return a name for its memory, and the sum on the model's device."""
        name, clipped = "sum", self.sum
        if self._clip and (shrinks := self._clip / (norm + 1e-6)) < 1:  # as torch's clip_grad_norm_
            self.slot[: self._trained].copy_(self.sum[: self._trained])
            for view in self._views:
                view.mul_(shrinks)
            name, clipped = "clipped", self.slot
        return (name, clipped) if self._landing is None else ("landing", self._landing.copy_(clipped))

    def adopt_buffers(self) -> None:
        """Copy the buffers in the vector to the model."""
        for buffer, _, source in self._buffers:
            buffer.copy_(source)


def typed(vector: torch.Tensor, start: int, stop: int, dtype: str) -> torch.Tensor:
    """Return bytes [start, stop) of a vector as values of a dtype."""
    return vector[start:stop].view(getattr(torch, dtype))
