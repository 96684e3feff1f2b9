"""Who predicts which samples: portions of consecutive ones, dealt on demand. Pure."""

from __future__ import annotations

from collections import deque

PORTION_BATCHES = 4
"""Batches of a portion."""
IN_HAND = 2
"""Portions that a split replica has at once: its first partition begins the next before its last has done one."""


class SampleDealing:
    """Deals out portions of `size` samples, which a replica computes in order; those of one that has ended are dealt
    again.

    >>> dealing = SampleDealing(samples=5, size=2)
    >>> dealing.next_for(0), dealing.next_for(1)
    ((0, 2), (2, 4))
    >>> dealing.take_end(0)
    >>> dealing.take_done(1), dealing.next_for(1), dealing.take_done(1), dealing.next_for(1)
    (2, (0, 2), 4, (4, 5))
    """

    def __init__(self, samples: int, size: int) -> None:
        self._left = deque((start, min(start + size, samples)) for start in range(0, samples, size))
        self._dealt: dict[int, deque[tuple[int, int]]] = {}
        self.samples, self.done = samples, 0

    def next_for(self, replica: int) -> tuple[int, int] | None:
        """The samples that a replica computes next, from the first up to the second number; None where none is left."""
        if not self._left:
            return None
        portion = self._left.popleft()
        self._dealt.setdefault(replica, deque()).append(portion)
        return portion

    def take_done(self, replica: int) -> int:
        """A replica has predicted what it was dealt first; returns how many samples are done."""
        start, stop = self._dealt[replica].popleft()
        self.done += stop - start
        return self.done

    def take_end(self, replica: int) -> None:
        """A replica has ended: whatever it had is dealt again, first."""
        for portion in reversed(self._dealt.pop(replica, deque())):
            self._left.appendleft(portion)
