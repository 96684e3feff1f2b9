"""Who predicts which samples: portions of consecutive ones, dealt on demand. Pure."""

from __future__ import annotations

from collections import deque


class SampleDealing:
    """Deals out portions of `size` samples; those of a process that has ended are dealt again.

    >>> dealing = SampleDealing(samples=5, size=2)
    >>> dealing.next_for(0), dealing.next_for(1)
    ((0, 2), (2, 4))
    >>> dealing.take_end(0)
    >>> dealing.take_done(1), dealing.next_for(1), dealing.take_done(1), dealing.next_for(1)
    (2, (0, 2), 4, (4, 5))
    """

    def __init__(self, samples: int, size: int) -> None:
        self._left = deque((start, min(start + size, samples)) for start in range(0, samples, size))
        self._dealt: dict[int, tuple[int, int]] = {}
        self.samples, self.done = samples, 0

    def next_for(self, process: int) -> tuple[int, int] | None:
        """The samples that a process computes next, from the first up to the second number; None where none is left."""
        if not self._left:
            return None
        portion = self._dealt[process] = self._left.popleft()
        return portion

    def take_done(self, process: int) -> int:
        """A process has predicted what it was dealt; returns how many samples are done."""
        start, stop = self._dealt.pop(process)
        self.done += stop - start
        return self.done

    def take_end(self, process: int) -> None:
        """A process has ended: whatever it had is dealt again, first."""
        if (portion := self._dealt.pop(process, None)) is not None:
            self._left.appendleft(portion)
