"""The player of schedules: it takes one rank through the steps of one vector, over whatever moves the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from distbelief.schedules.schedule import RankStep

V = TypeVar("V")
V_contra = TypeVar("V_contra", contravariant=True)


class Mover(Protocol[V_contra]):
    """Mover of the bytes of one rank, step by step; vectors are whatever it knows them by."""

    def post(self, vector: V_contra, step: RankStep) -> None:
        """Let go what leaves at a step, as it is now, whatever is taken into its place later."""

    def take(self, vector: V_contra, step: RankStep) -> bool:
        """Add or put what is received at a step, in its order, if all of it has come; whether it has.

        It waits for a moment at most, but where it has a thread of its own.
        """
        ...


class SchedulePlayer(Generic[V]):
    """One rank's way through one schedule.

    Args:
        mover: of this rank.
        vector: what is moved.
        steps: of this rank.
    """

    __slots__ = ("_mover", "_steps", "done", "vector")

    def __init__(self, mover: Mover[V], vector: V, steps: Sequence[RankStep]) -> None:
        self._mover, self.vector, self._steps = mover, vector, steps
        self.done = 0
        """Steps that are done."""

    @property
    def step(self) -> RankStep | None:
        """The step at which it is; None where all are done."""
        return self._steps[self.done] if self.done < len(self._steps) else None

    def begin(self) -> bool:
        """The vector holds what this rank brings; whether that was all."""
        if self._steps:
            self._mover.post(self.vector, self._steps[0])
        return self.advance()

    def advance(self) -> bool:
        """Take the steps for which all has come, as many as there are; whether the last is done."""
        steps, count = self._steps, len(self._steps)
        while self.done < count:
            if not self._mover.take(self.vector, steps[self.done]):
                return False
            self.done += 1
            if self.done < count:
                self._mover.post(self.vector, steps[self.done])
        return True


def play(mover: Mover[V], vector: V, steps: Sequence[RankStep]) -> None:
    """Play to the end here, over a mover that rests where it waits."""
    player = SchedulePlayer(mover, vector, steps)
    done = player.begin()
    while not done:
        done = player.advance()
