"""A replica's pushes: which shards have not acknowledged them, which slots they keep, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from distbelief.core.effects import Send


class _OwedPush:
    def __init__(self, slot: int, steps: int, samples: int, sent: dict[str, Send]) -> None:
        self.slot, self.steps, self.samples, self.dropped = slot, steps, samples, False
        self.sent = sent
        """Messages that are not acknowledged, by their receivers."""


# A push is done when every shard has acknowledged it, and counts for the coordinator only then: a minibatch whose push
# reached some shards is dealt again if the replica dies. Pushes are done in their order, whatever order
# acknowledgements come in: a report is a count of steps, which the coordinator takes for the first of those it dealt.
#
# Shards and partitions acknowledge alike, but a slot is free once the shards have read it.
class Pushes:
    """The pushes of one life of a replica.

    Args:
        incarnation: that life.
        shards: to which each push goes.
        slots: number of gradient vectors that pushes lie in.
        reports: whether the lead of the replica is told of each push that is done.
    """

    def __init__(self, incarnation: int, shards: Iterable[str], slots: int, reports: bool = False) -> None:
        self.clock = 0
        """Number of pushes that were made."""
        self.busy = [0] * slots
        """Number of shards that still read each slot."""
        self.acknowledged = dict.fromkeys(shards, 0)
        """Clock of the last push that each shard acknowledged."""
        self._incarnation = incarnation
        self._waiting: deque[_OwedPush] = deque()
        self._steps = self._samples = self._pushes = 0
        self._dropped: list[tuple[int, int]] = []
        """Steps that are to be made again: how many were done before them, and how many they are."""
        self._lacking = False
        """True where a push was dropped since steps were last done."""
        self._reports, self._finished = reports, list[tuple[int, bool]]()

    @property
    def waiting(self) -> bool:
        """True while any push is not acknowledged by all."""
        return bool(self._waiting)

    def make(self, slot: int, steps: int, samples: int, sent: dict[str, Send], parts: Mapping[str, Send]) -> list[Send]:
        """Make the next push: `sent` are its messages to shards, `parts` those to partitions; returns all of them."""
        self.clock += 1
        self.busy[slot] = len(sent)
        self._waiting.append(_OwedPush(slot, steps, samples, {**sent, **parts}))
        return [*sent.values(), *parts.values()]

    def owed(self, shard: str) -> list[Send]:
        """Return the messages that a shard has not acknowledged."""
        return [push.sent[shard] for push in self._waiting if shard in push.sent]

    def applied(self, who: str, incarnation: int, clock: int, dropped: bool) -> int | None:
        """Note that a shard or a partition has applied or dropped a push; returns its slot once no shard reads it."""
        # an acknowledgement of a former life's push, or a second one, is of no push that is owed here
        waiting, newest = self._waiting, self.clock
        oldest = newest - len(waiting) + 1
        if incarnation != self._incarnation or not oldest <= clock <= newest:
            return None
        push = waiting[clock - oldest]
        if push.sent.pop(who, None) is None:
            return None
        slot = push.slot
        push.dropped |= dropped
        if who in self.acknowledged:
            self.acknowledged[who] = clock
            self.busy[slot] -= 1
        while waiting and not waiting[0].sent:
            push = waiting.popleft()
            if self._reports:
                self._finished.append((newest - len(waiting), push.dropped))
            self._lacking |= push.dropped
            self._pushes += not push.dropped
            self._done(push.steps, push.samples)
        return None if self.busy[slot] else slot

    def close(self, steps: int, samples: int) -> None:
        """Count steps as done once all pushes that were made are."""
        if self._waiting:
            self._waiting[-1].steps += steps
            self._waiting[-1].samples += samples
        else:
            self._done(steps, samples)

    def _done(self, steps: int, samples: int) -> None:
        """Count steps whose pushes are done, or to be made again where one of these was dropped."""
        if not steps:
            return
        if self._lacking:
            self._dropped.append((self._steps, steps))
        else:
            self._steps += steps
            self._samples += samples
        self._lacking = False

    def pass_over(self, steps: int, samples: int) -> None:
        """Count steps as done that no push holds, while none is on its way."""
        self._steps += steps
        self._samples += samples

    def made(self, samples: int) -> None:
        """Count a step whose gradient is applied already, as a push that all shards have acknowledged."""
        self.clock += 1
        self._pushes += 1
        self.pass_over(1, samples)

    def finished(self) -> list[tuple[int, bool]]:
        """Return the pushes that are done since the last call, and whether each was dropped, for the lead."""
        done, self._finished = self._finished, []
        return done

    def take(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        """Return steps, samples, pushes since the last call; of each dropped push the steps before, and its own."""
        done = self._steps, self._samples, self._pushes, tuple(self._dropped)
        self._steps = self._samples = self._pushes = 0
        self._dropped.clear()
        return done
