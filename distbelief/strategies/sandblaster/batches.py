"""Batches of a job, as portions of the training set."""

from __future__ import annotations

from distbelief.core.portions import Portion, WorkUnit
from distbelief.errors import UsageError
from distbelief.strategies.sandblaster.settings import Descent


class BatchWindows:
    """The batches of a job: each is the whole training set, or a window that moves over it, pass after pass.

    Each pass shuffles the training set by the seed, and cuts it into portions. Consecutive windows overlap.

    Args:
        descent: the job's.
        samples: number of samples in the training set.
        portion_size: samples in a portion; the last of a pass may be smaller.

    >>> batches = BatchWindows(Descent(send_every=2), samples=50, portion_size=10)
    >>> [(work_unit.portion.first, work_unit.portion.count) for work_unit in batches.work_units(7)]
    [(0, 2), (2, 2), (4, 1)]
    >>> windows = BatchWindows(Descent(batch_size=40, overlap=0.25, send_every=2), samples=50, portion_size=10)
    >>> [(b.portion.epoch, b.portion.first, b.portion.count, b.part) for b in windows.work_units(1)]
    [(0, 3, 1, 0), (0, 4, 1, 1), (1, 0, 1, 1), (1, 1, 1, 2)]
    """

    def __init__(self, descent: Descent, samples: int, portion_size: int) -> None:
        self._each = descent.send_every
        self.portions = -(-samples // portion_size)
        self._size = min(self.portions, -(-descent.batch_size // portion_size)) if descent.batch_size else 0
        self._shared = max(1, round(self._size * descent.overlap)) if self._size else 0
        if self._size and self._size < 2 * self._shared + 1:
            raise UsageError(
                f"--batch-size {descent.batch_size} is {self._size} portions of {portion_size} (--portion-size); "
                f"{self._shared} are shared with the batch before and as many with the next, so it needs at least one "
                "more"
            )

    @property
    def whole(self) -> bool:
        """True if every batch is the whole training set."""
        return not self._size

    def work_units(self, batch: int) -> list[WorkUnit]:
        """Return the work units of a batch, in order; the same at each call."""
        if self.whole:
            return self._cut(0, self.portions, 0)
        first = batch * (self._size - self._shared)
        edges = (first, first + self._shared, first + self._size - self._shared, first + self._size)
        return [work_unit for part in range(3) for work_unit in self._cut(edges[part], edges[part + 1], part)]

    def _cut(self, start: int, stop: int, part: int) -> list[WorkUnit]:
        """Return portions `start` to `stop`, counted over all passes, as work units that each lie in one pass."""
        cut = []
        while start < stop:
            epoch, first = divmod(start, self.portions)
            count = min(self._each, stop - start, self.portions - first)
            cut.append(WorkUnit(Portion(epoch, first, count), part))
            start += count
        return cut
