"""The part of a split model that a partition holds, and what crosses to it and from it."""

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
    """Transfers between homes, in the same order at all of them."""
    schedule: str
    microbatches: int
    depth: int
    """Number of homes on a microbatch's way, from this one on to where it turns."""

    def order(self, microbatches: int) -> list[HomeTask]:
        """Return the home's tasks of a minibatch of so many microbatches."""
        return [*home_tasks(microbatches, in_flight(self.schedule, microbatches, self.depth))]

    def slots(self, batch_size: int) -> list[int]:
        """Return the bytes of each thing that crosses in a step of at most so many samples."""
        most = -(-batch_size // self.microbatches)
        return [transfer.shape.bytes(most) for transfer in self.transfers for _ in range(len(WAYS) * self.microbatches)]

    def sizes(self, samples: int) -> list[int]:
        """Return the samples of each microbatch."""
        count = min(self.microbatches, samples)  # none is empty: a short minibatch may have fewer
        return [samples // count + (number < samples % count) for number in range(count)]

    def share(self, run: RunSegment, program: HomeProgram, samples: Sequence[int]) -> float:
        """Return a segment's share of the work of a step of the whole replica, by the samples of each microbatch."""
        way = 1.0 if run.direction is Pass.FORWARD else BACKWARD
        part = samples[run.microbatch] / sum(samples)
        return part * way * run.segment.flops / (max(program.work, 1) * (1 + BACKWARD))


def home_schedule(graph: SplitGraph, settings: Settings, home: int) -> HomeSchedule:
    """Make the schedule of a job's minibatches through a home of a split model."""
    transfers = tuple(sorted(graph.transfers.values(), key=lambda transfer: transfer.number))
    depths = depths_of(graph.partitions, ((transfer.source, transfer.target) for transfer in transfers))
    return HomeSchedule(transfers, settings.pipeline, settings.microbatches, depths[home])


class ModelPart:
    """The part of a split model that one home holds.

    Args:
        program: of the home.
        way: schedule of minibatches through it.
        batch_size: most samples of a minibatch.
    """

    def __init__(self, program: HomeProgram, way: HomeSchedule, batch_size: int) -> None:
        self.program, self.way = program, way
        self._numbers = {transfer: number for number, transfer in enumerate(way.transfers)}
        self.slots = way.slots(batch_size)
        """Most bytes of each thing that crosses."""
        self.parameters = [parameter for parameter in program.module.parameters() if parameter.requires_grad]
        self.device = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        self.copies = device_copies(self.device)
        """Between the host and the device where it computes; None where that is the host."""
        self.samples: list[int] = []
        """Samples of each microbatch of the step that is played."""
        for layer in program.layers:
            layer.train()

    def share(self, run: RunSegment) -> float:
        """Return the share of a step's work that a segment is for its microbatch."""
        return self.way.share(run, self.program, self.samples)

    def slot(self, crossing: Give | Take) -> int:
        """Return its number among all things that cross in a step."""
        number = len(WAYS) * self._numbers[crossing.transfer] + WAYS.index(crossing.direction)
        return number * self.way.microbatches + crossing.microbatch

    def size(self, crossing: Give | Take) -> int:
        """Return the number of bytes that cross."""
        return crossing.transfer.shape.bytes(self.samples[crossing.microbatch])

    def encode(self, give: Give) -> torch.Tensor:
        """Encode what crosses, where this partition computes.

        Raises:
            UsageError: it has another shape than the samples give it.
        """
        # the taker builds its tensor from the traced shape, and would not notice another
        if give.direction is Pass.FORWARD and give.tensor.shape != (expected := self.shape(give)):
            transfer = give.transfer
            raise UsageError(
                f"{transfer.path or 'the model'}: {transfer.value} crosses from partition {transfer.source} to "
                f"{transfer.target} with the shape {[*give.tensor.shape]}, and as it was traced "
                f"{self.samples[give.microbatch]} samples give it {[*expected]}: a shape that depends on values cannot "
                "cross; name one partition for what makes it and for what takes it "
                f"(--split PATTERN={transfer.source})"
            )
        return give.tensor

    def shape(self, crossing: Give | Take) -> tuple[int, ...]:
        """Return the shape of what crosses."""
        return crossing.transfer.shape.at(self.samples[crossing.microbatch])

    def decode(self, take: Take, data: bytearray) -> torch.Tensor:
        """Make the tensor that has crossed, from its bytes, where this partition computes."""
        dtype = take.transfer.shape.dtype
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(self.shape(take)).to(self.device)


@dataclass(frozen=True)
class AskScript:
    """Question to a user's own loop, answered by a story of this home, the step's end (`Computed`), or None."""


PartSteps = Generator[HomeEffect | AskScript, Any, Computed | None]
"""One step of a home; what it is answered with depends on what it yields."""


class ScriptedPart(ModelPart):
    """One home's part of each step, as a user's own loop asks for it."""

    def play(self, _: Batch) -> PartSteps:
        """Play what the loop asks for, one story after another, until its step."""
        while not isinstance(answer := (yield AskScript()), Computed | NoneType):
            yield from answer
        return answer
