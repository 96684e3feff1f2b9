"""The versions of the weights that minibatches under way went forward with, each of which goes back with its own
(Narayanan et al. 2019, section 3.3: weight stashing).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch

from distbelief.tasks.flat import FlatModule


class Versions(Protocol):
    """Versions of the weights, as a story asks for them; one that computes nothing has none."""

    def keep(self) -> None:
        """A minibatch goes forward next: with the newest weights, which are kept until it is back."""

    def recall(self) -> None:
        """The earliest minibatch that is not back goes back next: with its weights, and gradients of its own."""

    def release(self) -> None:
        """It is back, and its weights are not needed any more."""

    def settle(self) -> None:
        """Nothing is under way: the model has the newest weights again."""


class NoVersions:
    """Those of a model that holds nothing."""

    def keep(self) -> None:
        """Nothing to keep."""

    def recall(self) -> None:
        """Nothing to go back with."""

    def release(self) -> None:
        """Nothing to release."""

    def settle(self) -> None:
        """Nothing to compute with."""


class WeightVersions:
    """Copies of the weights, beside the vector in which they are stepped. Buffers have one version.

    Args:
        flat: the model, which lives in the vector.
        newest: of the vector (1-D uint8), the trained parameters, which come first.
        most: minibatches that may be under way. Of a single one the weights are not copied: it is back before they are
            stepped.
    """

    def __init__(self, flat: FlatModule, newest: torch.Tensor, most: int) -> None:
        self._trained, self._newest = flat.trained, newest
        self._own = flat.trained_in(newest)
        copies = [torch.empty_like(newest) for _ in range(most)] if most > 1 else []
        self._free = deque((copy, flat.trained_in(copy)) for copy in copies)
        self._kept: deque[tuple[torch.Tensor, list[torch.Tensor]]] = deque()

    def keep(self) -> None:
        """A minibatch goes forward with a copy of the newest weights: autograd goes back with what lies there then."""
        if not self._free:
            return
        copy, views = self._free.popleft()
        copy.copy_(self._newest)
        self._kept.append((copy, views))
        self._compute_with(views)

    def recall(self) -> None:
        """The earliest minibatch goes back with the copy that it went forward with."""
        if self._kept:
            self._compute_with(self._kept[0][1])
        for parameter in self._trained:
            parameter.grad = None

    def release(self) -> None:
        """Its copy may be written over."""
        if self._kept:
            self._free.append(self._kept.popleft())

    def settle(self) -> None:
        """The model is in the vector again."""
        self._compute_with(self._own)

    def _compute_with(self, views: list[torch.Tensor]) -> None:
        for parameter, view in zip(self._trained, views, strict=True):
            parameter.data = view
