"""The part of a split model that a partition holds: what crosses to it and from it, and how a user's own loop computes
with it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch

from distbelief.core.effects import Batch, Computed
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.fabric.pinned import device_copies
from distbelief.schedules.pipeline import HomeTask, Pass, depths_of
from distbelief.schedules.pipeline_price import BACKWARD
from distbelief.schedules.pipelines import home_tasks, in_flight
from distbelief.split.graph import SplitGraph, Transfer
from distbelief.split.play import Give, HomeEffect, RunSegment, Take
from distbelief.split.program import HomeProgram

WAYS = (Pass.FORWARD, Pass.BACKWARD)


class HomeSchedule(NamedTuple):
    """Schedule of minibatches through a home."""

    transfers: tuple[Transfer, ...]
    """All that crosses between homes, in an order that all of them know."""
    schedule: str
    microbatches: int
    depth: int
    """Number of homes on a microbatch's way, from this one on to where it turns."""

    def order(self, microbatches: int) -> list[HomeTask]:
        """The home's tasks of a minibatch of so many microbatches."""
        return [*home_tasks(microbatches, in_flight(self.schedule, microbatches, self.depth))]

    def slots(self, batch_size: int) -> list[int]:
        """Bytes of each thing that crosses in a step of at most so many samples."""
        most = -(-batch_size // self.microbatches)
        return [one.shape.bytes(most) for one in self.transfers for _ in range(len(WAYS) * self.microbatches)]

    def sizes(self, samples: int) -> list[int]:
        """The samples of each microbatch: each has one, so that a short minibatch may have fewer of them."""
        count = min(self.microbatches, samples)
        return [samples // count + (number < samples % count) for number in range(count)]

    def share(self, run: RunSegment, program: HomeProgram, samples: Sequence[int]) -> float:
        """Return a segment's share of the work of a step of the whole replica, by the samples of each microbatch."""
        way = 1.0 if run.direction is Pass.FORWARD else BACKWARD
        part = samples[run.microbatch] / sum(samples)
        return part * way * run.segment.flops / (max(program.work, 1) * (1 + BACKWARD))


def home_schedule(graph: SplitGraph, settings: Settings, home: int) -> HomeSchedule:
    """Make the schedule of a job's minibatches through a home of a split model."""
    transfers = tuple(sorted(graph.transfers.values(), key=lambda one: one.number))
    depths = depths_of(graph.partitions, ((one.source, one.target) for one in transfers))
    return HomeSchedule(transfers, settings.pipeline, settings.microbatches, depths[home])


class ModelPart:
    """The part of a split model that one home holds.

    Args:
        program: of the home.
        way: how minibatches go through it.
        batch_size: most samples of a minibatch.
    """

    def __init__(self, program: HomeProgram, way: HomeSchedule, batch_size: int) -> None:
        self.program, self.way = program, way
        self._numbers = {one: number for number, one in enumerate(way.transfers)}
        self.slots = way.slots(batch_size)
        """Bytes of each thing that crosses, at most."""
        self.parameters = [one for one in program.module.parameters() if one.requires_grad]
        self.device = next((one.device for one in self.parameters), torch.device("cpu"))
        self.copies = device_copies(self.device)
        """Between the host and the device where it computes; None where that is the host."""
        self.samples: list[int] = []
        """Samples of each microbatch of the step that is played."""
        for layer in program.layers:
            layer.train()

    def share(self, run: RunSegment) -> float:
        """Return the share of a step's work that a segment is for its microbatch."""
        return self.way.share(run, self.program, self.samples)

    def slot(self, asked: Give | Take) -> int:
        """Return its number among all things that cross in a step."""
        number = len(WAYS) * self._numbers[asked.transfer] + WAYS.index(asked.direction)
        return number * self.way.microbatches + asked.microbatch

    def size(self, asked: Give | Take) -> int:
        """Return the number of bytes that cross."""
        return asked.transfer.shape.bytes(self.samples[asked.microbatch])

    def encode(self, given: Give) -> torch.Tensor:
        """Encode what crosses, where this partition computes.

        Raises:
            UsageError: it has another shape than the samples give it.
        """
        if given.direction is Pass.FORWARD and given.tensor.shape != (expected := self.shape(given)):
            one = given.transfer
            raise UsageError(
                f"{one.path or 'the model'}: {one.value} crosses from partition {one.source} to {one.target} with the "
                f"shape {[*given.tensor.shape]}, and as it was traced {self.samples[given.microbatch]} samples give it "
                f"{[*expected]}: a shape that depends on values cannot cross; name one partition for what makes it and "
                f"for what takes it (--split PATTERN={one.source})"
            )
        return given.tensor

    def shape(self, asked: Give | Take) -> tuple[int, ...]:
        """Return the shape of what crosses."""
        return asked.transfer.shape.at(self.samples[asked.microbatch])

    def decode(self, wanted: Take, data: bytearray) -> torch.Tensor:
        """The tensor that has crossed, of its bytes, where this partition computes."""
        dtype = wanted.transfer.shape.dtype
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        found = flat.reshape(self.shape(wanted))
        return found if self.copies is None else self.copies.arriving(found)


@dataclass(frozen=True)
class AskScript:
    """Is answered by what a user's own loop wants next: a story of this home, to be played, or the end of the step, a
    `Computed`; None where the loop was left.
    """


PartSteps = Generator[HomeEffect | AskScript, Any, Computed | None]
"""One step of a home; what it is answered with depends on what it yields."""


class ScriptedPart(ModelPart):
    """One home's part of each step, as a user's own loop asks for it."""

    def play(self, _: Batch) -> PartSteps:
        """Play what the loop asks for, one story after another, until its step."""
        while not isinstance(asked := (yield AskScript()), Computed | NoneType):
            yield from asked
        return asked
