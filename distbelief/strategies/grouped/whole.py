"""Whole model of a replica, as a story asks for it: parameters with their optimizer, and the vector of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distbelief.core.conversations.agreement import Squares
from distbelief.fabric.buckets import Bucket
from distbelief.sharding.layout import Layout

if TYPE_CHECKING:
    import torch


class Whole:
    """The model of a replica as its client sees it; this one holds nothing, for simulations that compute nothing.

    Ranges are of the flat vector, in bytes.

    Args:
        layout: the model's.
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

        Args:
            factor: of the learning rate.
            norms: of the layers that are cut over partitions, each as a whole.
            alone: leave out parameters without a gradient, as plain PyTorch does: no other replica has one for them.
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
