"""The pulse of a link: the silence of its peer's host, and how long that may be, by what was seen before.

The kernels of two hosts exchange a sign of life every `BEAT_SECONDS`, however busy the processes are: a long step is no
silence. A network that was silent for a while and came back is given longer the next time.
"""

from __future__ import annotations

BEAT_SECONDS = 1.0
"""Between two signs of life, where nothing else is said."""
LEAST_SECONDS = 30.0
"""Silence that every network is given: TCP, ever slower to retry, is heard up to twice as late as a cut is mended."""
FACTOR = 8.0
"""Silence is a death when it is so many times as long as the longest that ended."""


class Pulse:
    """The silences of one link.

    Args:
        most: seconds that none may last.

    >>> pulse = Pulse(most=120.0)
    >>> [pulse.lost(silence) for silence in (0.9, 29.0, 31.0)]
    [False, False, True]
    >>> pulse = Pulse(most=120.0)
    >>> [pulse.lost(silence) for silence in (9.0, 0.1, 31.0, 71.0, 73.0)], pulse.bound
    ([False, False, False, False, True], 72.0)
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._last = self._longest = 0.0

    @property
    def bound(self) -> float:
        """Seconds that a silence may last."""
        return min(self._most, max(LEAST_SECONDS, FACTOR * self._longest))

    def lost(self, silence: float) -> bool:
        """Return whether a silence of so many seconds is a death. A silence shorter than the last one is a new one."""
        if silence < self._last:
            self._longest = max(self._longest, self._last)
        self._last = silence
        return silence > self.bound
