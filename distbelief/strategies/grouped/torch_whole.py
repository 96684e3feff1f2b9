"""A replica that holds the whole model: its parameters in one flat vector, stepped as a shard steps its slice."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec
import torch

from distbelief.core.conversations.agreement import Squares
from distbelief.core.settings import Plan
from distbelief.fabric.buckets import Bucket
from distbelief.server.slice import TorchSlice
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Layout
from distbelief.strategies.grouped.gradients import Gradients, GradientVectors, OwnVector, typed
from distbelief.tasks.flat import FlatModule


class _Stepped(TorchSlice):
    """The slice of a replica that holds everything: the model's own buffers are in it, and take no update."""

    def __init__(self, plan: Plan, vector: torch.Tensor, partition: int) -> None:
        moving = plan.layout.partitions[partition].moving.size
        super().__init__(plan, partition, vector[:moving], vector[moving:])
        self._carried = []


class TorchWhole:
    """A model and its optimizer.

    Args:
        flat: the model.
        vectors: where gradients are added up.
        overlaps: whether each bucket is ready as soon as its last gradient is made: only where every step is one
            backward pass.
        partition: whose part of the model it is, where that is split.
    """

    def __init__(
        self, flat: FlatModule, vectors: GradientVectors | None = None, overlaps: bool = False, partition: int = 0
    ) -> None:
        self.flat, self._partition = flat, partition
        self._own = flat.layout.partitions[partition]
        self._vectors: GradientVectors = vectors or OwnVector(flat.device)
        self._overlaps = overlaps
        self._gradients: Gradients | None = None
        self._slice: TorchSlice | None = None
        self._vector = torch.empty(0, dtype=torch.uint8)
        """In which the model lives, once it is bound."""
        self._applied = "", torch.empty(0)
        """Kind and tensor that the next update is made with."""

    @property
    def gradients(self) -> Gradients:
        """Its gradients, once it is bound."""
        assert self._gradients is not None
        return self._gradients

    @property
    def slice(self) -> TorchSlice:
        """Its parameters and their optimizer, once it is bound."""
        assert self._slice is not None
        return self._slice

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        return self.flat.layout

    def digest(self) -> str:
        """Return a digest of the parameters' bytes."""
        vector = torch.zeros(self._own.all.size, dtype=torch.uint8)
        self.flat.write(vector)
        return blake2b(vector.numpy().data, digest_size=16).hexdigest()

    def bind(self, plan: Plan) -> None:
        """Have the model live in the flat vector from here on."""
        layout, device, partition = plan.layout, self.flat.device, self._partition
        partitions, moving = plan.settings.partitions, self._own.moving.size
        plan = msgspec.structs.replace(plan, assignments=cut(layout, partitions, partitions))
        vector = torch.zeros(self._own.all.size, dtype=torch.uint8, device=device)
        self.flat.write(vector)
        self._vector = vector
        self.flat.bind([], [vector])
        self.flat.swap(0)
        self._slice = _Stepped(plan, vector, partition)
        self._slice.fill(vector[:moving], frozen=False)
        self._gradients = Gradients(plan, partition, self.flat.trained, vector, self._vectors, self._overlaps)

    # gradients

    def weigh(self, weight: float, first: bool = True, last: bool = True) -> None:
        """Set the weight of the next gradient, and whether it is the first of its round, and the last."""
        self.gradients.weigh(weight, first, last)

    def gather(self) -> None:
        """Have the gradient of the step in the vector, and with the last of a round the buffers behind it."""
        self.flat.take_buffers(self._vector)
        self.gradients.gather()

    def take_written(self) -> None:
        """Go on from what the script has written to its parameters."""
        self.flat.write(self._vector)
        self.slice.moved()

    def contribute_nothing(self) -> None:
        """Have zeros there."""
        self.flat.take_buffers(self._vector)
        self.gradients.contribute_nothing()

    def norm(self) -> float:
        """Return the norm of the sum, where the job clips it; else 0."""
        return self.gradients.norm()

    def clip(self, norm: float) -> None:
        """Clip the sum to the job's norm, where this is its own."""
        self._applied = self.gradients.clip(norm)

    def squares(self) -> Squares:
        """With the sum: what the parts that are here add to the norms of the layers that are cut."""
        name, clipped = self._applied
        return self.slice.squares_with(name, 0, clipped)

    def update(self, factor: float, norms: Squares = (), alone: bool = False) -> None:
        """Make one optimizer step with the sum."""
        name, clipped = self._applied
        covered = self.gradients.covered() if alone else ()
        self.slice.apply(name, 0, clipped, factor, covered, norms)
        self.flat.swap(0)

    def adopt_buffers(self) -> None:
        """Take the buffers in the vector as the model's own."""
        self.gradients.adopt_buffers()

    # everything

    def arrays(self) -> dict[str, torch.Tensor]:
        """Everything it holds, by name."""
        self.flat.take_buffers(self._vector)
        return self.slice.arrays()

    def values(self, start: int, stop: int) -> bytes:
        """Copy a range of the flat vector."""
        base = self._own.all.start
        return self._vector[start - base : stop - base].cpu().numpy().tobytes()

    def load(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Take back what `arrays` gave."""
        self.slice.load(dict(arrays))
        self.flat.swap(0)

    def state(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """List all arrays to be sent: name, dtype, shape and length in bytes of each."""
        arrays = self.arrays().items()
        return [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.nbytes) for name, t in arrays]

    def state_bytes(self, name: str, start: int, stop: int) -> bytes:
        """A copy of bytes [start, stop) of one of these arrays."""
        return self.arrays()[name].detach().reshape(-1).view(torch.uint8)[start:stop].cpu().numpy().tobytes()

    def take_state(self, arrays: Mapping[str, tuple[str, tuple[int, ...], bytearray]]) -> None:
        """Take what another holds."""
        device = self.flat.device
        self.load(
            {name: _from_bytes(data, dtype).view(shape).to(device) for name, (dtype, shape, data) in arrays.items()}
        )

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        """A copy of a range of the vector."""
        return self.gradients.slot[start:stop].cpu().numpy().tobytes()

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        """Add to a range of the vector, or put there."""
        if data:
            here = typed(self.gradients.slot, start, start + len(data), bucket.dtype)
            there = _from_bytes(bytearray(data), bucket.dtype).to(here.device)
            here.add_(there) if adds else here.copy_(there)


def _from_bytes(data: bytearray, dtype: str) -> torch.Tensor:
    if not data:
        return torch.zeros(0, dtype=getattr(torch, dtype))
    return torch.frombuffer(data, dtype=getattr(torch, dtype))
