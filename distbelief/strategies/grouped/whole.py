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
    """The model of one replica; this one holds nothing, for simulations that compute nothing.

    Ranges are of the flat vector, in bytes.

    Args:
        layout: of the model.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def digest(self) -> str:
        """Return a digest of the initial parameters: equal ones have the same."""
        return "phantom"

    def weigh(self, weight: float, first: bool = True, last: bool = True) -> None:
        """Set the weight of the next gradient, its share of its round; and whether it is the first there, or last."""

    def gather(self) -> None:
        """Add the step's gradient to the round's vector, zero where there is none, with the buffers behind it."""

    def take_written(self) -> None:
        """Go on from what the script has written to its parameters."""

    def contribute_nothing(self) -> None:
        """Have zeros there: this replica has no minibatch in the round."""

    def norm(self) -> float:
        """Return the norm of the sum, where the job clips it; else 0."""
        return 0.0

    def clip(self, norm: float) -> None:
        """Clip the sum, whose norm in the whole model is this, once and before the update."""

    def squares(self) -> Squares:
        """With the sum: what the parts that are here add to the norms of the layers that are cut."""
        return ()

    def update(self, factor: float, norms: Squares = (), alone: bool = False) -> None:
        """Make one optimizer step with the sum, at `factor` times the learning rate; `norms` are those of the layers
        that are cut, as a whole. Of a replica that is `alone` it leaves out parameters without a gradient.
        """

    def adopt_buffers(self) -> None:
        """Take the buffers in the vector as the model's own."""

    def arrays(self) -> dict[str, torch.Tensor]:
        """Everything it holds, by name: views, not copies."""
        return {}

    def values(self, start: int, stop: int) -> bytes:
        """Copy a range of the flat vector."""
        return b""

    def load(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Take back what `arrays` gave."""

    def state(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """List all arrays to be sent: name, dtype, shape and length in bytes of each."""
        return []

    def state_bytes(self, name: str, start: int, stop: int) -> bytes:
        """A copy of bytes [start, stop) of one of these arrays."""
        return b""

    def take_state(self, arrays: Mapping[str, tuple[str, tuple[int, ...], bytearray]]) -> None:
        """Take what another holds: dtype, shape and bytes of each array."""

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        """A copy of a range of the vector."""
        return b""

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        """Add to a range of the vector, or put there."""
