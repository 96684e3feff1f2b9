"""A replica's pushes: which shards have not acknowledged them, which slots they keep, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from distbelief.core.conversations import pushing
from distbelief.core.effects import Send


class _OwedPush:
    def __init__(self, steps: int, samples: int, sent: dict[str, Send]) -> None:
        self.steps, self.samples, self.sent, self.dropped = steps, samples, sent, False


class Pushes:
    """The pushes of one life of a replica.

    Args:
        incarnation: that life.
        shards: to which each push goes.
        slots: gradient vectors that they lie in, by turns.
    """

    def __init__(self, incarnation: int, shards: Iterable[str], slots: int) -> None:
        self.clock = 0
        """How many were made."""
        self.busy = [0] * slots
        """How many shards still read each slot."""
        self.acknowledged = dict.fromkeys(shards, 0)
        """By shard, the clock of the last one that it acknowledged."""
        self._incarnation = incarnation
        self._waiting: deque[_OwedPush] = deque()
        self._steps = self._samples = self._pushes = 0
        self._dropped: list[tuple[int, int]] = []

    @property
    def waiting(self) -> bool:
        """Whether any is not acknowledged by all."""
        return bool(self._waiting)

    def make(self, slot: int, steps: int, samples: int, sent: dict[str, Send]) -> list[Send]:
        """The next push leaves, in a message to each shard; returns these."""
        self.clock += 1
        self.busy[slot] = len(sent)
        self._waiting.append(_OwedPush(steps, samples, sent))
        return list(sent.values())

    def owed(self, shard: str) -> list[Send]:
        """Those that a shard has not acknowledged."""
        return [push.sent[shard] for push in self._waiting if shard in push.sent]

    def applied(self, shard: str, event: pushing.Pushed) -> None:
        """A shard has applied or dropped a push; one that all have is done. The last of a former life are nobody's any
        more.
        """
        oldest = self.clock - len(self._waiting) + 1
        if event.incarnation != self._incarnation or not oldest <= event.clock <= self.clock:
            return
        push = self._waiting[event.clock - oldest]
        if push.sent.pop(shard, None) is None:
            return
        push.dropped |= event.dropped
        self.acknowledged[shard] = event.clock
        self.busy[event.slot] -= 1
        while self._waiting and not self._waiting[0].sent:
            push = self._waiting.popleft()
            if push.dropped:
                self._dropped.append((self._steps, push.steps))
                continue
            self._steps += push.steps
            self._samples += push.samples
            self._pushes += 1

    def take(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        """What was done since this was last asked: steps, samples, pushes, and of each that was dropped, after how many
        steps, and how many.
        """
        done = self._steps, self._samples, self._pushes, tuple(self._dropped)
        self._steps = self._samples = self._pushes = 0
        self._dropped.clear()
        return done
