"""The layers in a slice, for an optimizer that needs their norms; other shards may hold parts of a layer too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distbelief.core.conversations.agreement import Squares
from distbelief.core.norms import layers_in
from distbelief.server.layerwise import Layerwise
from distbelief.sharding.layout import ITEM_SIZES, Layout, Range, Section


# A step goes through the optimizer twice: `squares` returns the norms of the parts held here, of which those of cut
# layers go to the other shards; `step` puts in the norms of the whole layers, and finishes. A slice without cut layers
# does both in `step`.
class Layers:
    """The layers of one slice.

    Args:
        optimizer: of the slice.
        layout: of the model.
        pieces: the trained part of each section there, with the parameter that is stepped for it.
    """

    def __init__(self, optimizer: Layerwise, layout: Layout, pieces: Sequence[tuple[Section, torch.Tensor]]) -> None:
        self._optimizer = optimizer
        self._squares: torch.Tensor | None = None
        """Squared norms of the step that is under way."""
        self._rows: dict[int, int] = {}
        """Row of each cut layer in them."""
        row = 0
        for section, parameter in pieces:
            parts = []
            for number, part in layers_in(layout, Range(section.start, section.stop)):
                layer = layout.entries[number].tensor
                parts.append((part.size // ITEM_SIZES[section.dtype], len(layer.shape) > 1))
                if part.size < layer.size:
                    self._rows[number] = row
                row += 1
            optimizer.cut(parameter, parts)

    def squares(self) -> Squares:
        """Return what the parts that are here add to the squared norms of the layers that are cut."""
        self._squares = self._optimizer.squares()
        rows = self._squares.tolist()  # all at once: it may be on a device
        return tuple((number, *rows[row]) for number, row in self._rows.items())

    def step(self, norms: Squares) -> None:
        """Step, given the squared norms of the layers that are cut."""
        squares = self._optimizer.squares() if self._squares is None else self._squares
        self._squares = None
        for number, *both in norms:
            if number in self._rows:
                squares[self._rows[number]] = torch.tensor(both, dtype=squares.dtype)
        self._optimizer.finish(squares)
