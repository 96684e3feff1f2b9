"""How a partition of a split replica computes its part of a step: it runs what it can, gives others what crosses to
them, and takes what crosses to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

from distbelief.core.conversations.partitioning import Boundary
from distbelief.core.effects import Batch, Computed, Effect, Phantom, Send, Work
from distbelief.replica.siblings import Siblings, Steps
from distbelief.schedules.pipeline import Pass
from distbelief.split.play import Give, HomeEffect, RunSegment, Take

PART = 1 << 20
"""Most bytes of what crosses in one message."""


class SplitPart(Protocol):
    """The part of a split model that a partition holds."""

    def play(self, batch: Batch) -> Generator[HomeEffect, Any, Computed]:
        """Its part of a step: the gradient of a minibatch, left where the vectors take it from; the loss, where it has
        that.
        """
        ...

    def share(self, run: RunSegment) -> float:
        """Of the work of a step, that of a segment."""
        ...

    def encode(self, given: Give) -> bytes | Phantom:
        """What crosses, as bytes; only how many these are, where nothing is computed."""
        ...

    def decode(self, wanted: Take, data: bytes) -> Any:
        """What has crossed."""
        ...


class Crossing(NamedTuple):
    """Something that crosses between two partitions."""

    generation: int
    """Of the job."""
    step: int
    """Of the replica, since then."""
    transfer: int
    microbatch: int
    backward: bool


class SplitCompute:
    """One partition's steps.

    Args:
        siblings: with whom it makes them.
        part: what it computes.
    """

    def __init__(self, siblings: Siblings, part: SplitPart) -> None:
        self.siblings, self._part = siblings, part
        self._generation = self._step = 0
        self._here: dict[Crossing, bytes] = {}
        self._coming: dict[Crossing, list[bytes]] = {}
        self._wanted: Take | None = None

    def begin(self, generation: int) -> None:
        """The replica begins, in a generation of the job; what is left of another is dropped."""
        self._generation, self._step, self._wanted = generation, 0, None
        self._here = {one: data for one, data in self._here.items() if one.generation >= generation}
        self._coming = {one: parts for one, parts in self._coming.items() if one.generation >= generation}

    def waits(self) -> str:
        """What it waits for, in words; "" where for nothing."""
        if self._wanted is None:
            return ""
        transfer, way = self._wanted.transfer, self._wanted.direction
        home = transfer.source if way is Pass.FORWARD else transfer.target
        what = f"what {transfer.path} needs" if way is Pass.FORWARD else f"the gradient of what {transfer.path} needed"
        return f"for {what} from {self.siblings.role_of(home)}"

    def compute(self, batch: Batch, wait: Callable[[], Steps]) -> Generator[Effect, Any, Computed]:
        """Its part of a step; `wait` is for the next arrival."""
        self._step += 1
        play, answer, begins = self._part.play(batch), None, True
        while True:
            try:
                asked = play.send(answer)
            except StopIteration as end:
                computed: Computed = end.value
                return computed
            answer = None
            match asked:
                case RunSegment():
                    yield Work(self._part.share(asked), begins)
                    begins = False
                case Give():
                    yield from self._give(asked)
                case Take():
                    answer = yield from self._take(asked, wait)

    def _crossing(self, asked: Give | Take) -> Crossing:
        backward = asked.direction is Pass.BACKWARD
        return Crossing(self._generation, self._step, asked.transfer.number, asked.microbatch, backward)

    def _give(self, given: Give) -> list[Send]:
        transfer, data, crossing = given.transfer, self._part.encode(given), self._crossing(given)
        to = self.siblings.role_of(transfer.target if given.direction is Pass.FORWARD else transfer.source)
        if isinstance(data, Phantom):
            return [Send(to, Boundary(*crossing, 0, b""), data)]
        parts = [data[start : start + PART] for start in range(0, len(data), PART)] or [data]
        return [
            Send(to, Boundary(*crossing, len(parts) - 1 - i, part), Phantom(len(part))) for i, part in enumerate(parts)
        ]

    def _take(self, wanted: Take, wait: Callable[[], Steps]) -> Generator[Effect, Any, Any]:
        self._wanted, crossing = wanted, self._crossing(wanted)
        while crossing not in self._here:
            yield from wait()
        self._wanted = None
        return self._part.decode(wanted, self._here.pop(crossing))

    def arrive(self, told: Boundary) -> None:
        """Something that crosses to this partition is here, or a part of it; what is of the past is dropped."""
        crossing = Crossing(told.generation, told.step, told.transfer, told.microbatch, told.backward)
        if crossing.generation < self._generation:
            return
        parts = self._coming.setdefault(crossing, [])
        parts.append(told.data)
        if not told.left:
            self._here[crossing] = b"".join(self._coming.pop(crossing))
