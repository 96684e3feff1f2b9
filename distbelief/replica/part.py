"""The part of a split replica that a partition is, and what crosses to it and from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from distbelief.core.effects import Batch, Computed
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.fabric.pinned import DeviceCopies, device_copies
from distbelief.schedules.pipeline import Action, Crossing, Pass, SegmentTask, pipeline
from distbelief.schedules.pipeline_price import BACKWARD
from distbelief.split.graph import Transfer
from distbelief.split.play import Microbatch, Passes
from distbelief.split.program import PartitionProgram, SplitProgram


class Part:
    """Part of a split replica: what its partition does in each step, and which bytes cross.

    By itself it computes nothing: what crosses has its length, and no values.

    Args:
        split: programs of all partitions.
        partition: number of this one.
        settings: of the job.
        batch_size: most samples of a minibatch.
    """

    copies: DeviceCopies | None = None
    """Between the host and the device where it computes; None where that is the host, or nothing is computed."""
    scripted = False
    """True if a user's own loop says what of a step is computed next."""

    def __init__(self, split: SplitProgram, partition: int, settings: Settings, batch_size: int) -> None:
        self.split, self.partition, self.batch_size = split, partition, batch_size
        self._algorithm, self._microbatches = settings.pipeline, settings.microbatches
        self.samples: list[int] = []
        """Samples of each microbatch of the step that is played."""
        self._actions = functools.lru_cache(maxsize=2)(self._actions_of)

    @property
    def slots(self) -> Sequence[int]:
        """Most bytes of each thing that may cross in a step; none where nothing is computed."""
        return ()

    def begin(self, _: Batch) -> None:
        """Begin a step."""
        raise NotImplementedError  # of a scripted part the script begins it

    def end(self) -> Computed:
        """End a step."""
        raise NotImplementedError  # of a scripted part the script ends it

    def cut(self, samples: int) -> list[int]:
        """Cut a minibatch of so many samples, and return those of each microbatch."""
        count = min(self._microbatches, samples)  # none is empty: a short minibatch may have fewer
        self.samples = [samples // count + (number < samples % count) for number in range(count)]
        return self.samples

    def actions(self, direction: Pass | None = None) -> Sequence[Action]:
        """Return what is computed, given and taken in the step that was cut: one way, or both where it is None."""
        return self._actions(len(self.samples), direction)

    def _actions_of(self, microbatches: int, direction: Pass | None) -> list[Action]:
        made = pipeline(self._algorithm, self.split.graph, microbatches)
        actions = made.actions_of(self.partition)
        return [action for action in actions if direction is None or action.direction is direction]

    def share(self, task: SegmentTask) -> float:
        """Return a segment's share of the work of a step of the whole replica, by the samples of its microbatch."""
        way = 1.0 if task.direction is Pass.FORWARD else BACKWARD
        part = self.samples[task.microbatch] / sum(self.samples)
        return part * way * self.split.segments[task.segment].flops / (max(self.split.work, 1) * (1 + BACKWARD))

    def slot(self, crossing: Crossing) -> int:
        """Return its number among all things that cross in a step."""
        number = 2 * crossing.boundary + (crossing.direction is Pass.BACKWARD)
        return number * self._microbatches + crossing.microbatch

    def transfer(self, crossing: Crossing) -> Transfer:
        """Return what crosses."""
        return self.split.transfers[crossing.boundary]

    def ends(self, crossing: Crossing) -> tuple[int, int]:
        """Return the partition that gives it, and the one that takes it."""
        return self.split.graph.boundaries[crossing.boundary].ends(crossing.direction)

    def size(self, crossing: Crossing) -> int:
        """Return the number of bytes that cross."""
        return self.transfer(crossing).shape.bytes(self.samples[crossing.microbatch])

    def shape(self, crossing: Crossing) -> tuple[int, ...]:
        """Return the shape of what crosses."""
        return self.transfer(crossing).shape.at(self.samples[crossing.microbatch])

    def run(self, task: SegmentTask) -> None:
        """Compute a segment."""

    def give(self, _: Crossing) -> torch.Tensor | None:
        """Return what leaves; None where nothing is computed."""
        return None

    def take(self, crossing: Crossing, tensor: torch.Tensor) -> None:
        """Take what has come."""

    def decode(self, crossing: Crossing, _: bytearray) -> torch.Tensor:
        """Make the tensor that has come, from its bytes."""
        return torch.empty(0, dtype=self.transfer(crossing).shape.dtype)


class ModelPart(Part):
    """Part that computes what a partition has of a model.

    Args:
        program: of the partition.
        settings: of the job.
        batch_size: most samples of a minibatch.
    """

    def __init__(self, program: PartitionProgram, settings: Settings, batch_size: int) -> None:
        super().__init__(program.split, program.partition, settings, batch_size)
        self.program = program
        self.passes = Passes(program, [])
        """Passes of the step that is played."""
        self.parameters = [parameter for parameter in program.module.parameters() if parameter.requires_grad]
        self.device = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        self.copies = device_copies(self.device)
        for layer in program.layers:
            layer.train()

    @property
    def slots(self) -> Sequence[int]:
        """Most bytes of each thing that may cross in a step: each way, and for each microbatch."""
        return slots_of(self.split, self._microbatches, self.batch_size)

    def compute(self, batches: Sequence[Microbatch]) -> Passes:
        """Compute these microbatches in the step that begins."""
        self.passes = Passes(self.program, batches)
        return self.passes

    def run(self, task: SegmentTask) -> None:
        """Compute a segment."""
        self.passes.run(task)

    def give(self, crossing: Crossing) -> torch.Tensor:
        """Return what leaves.

        Raises:
            UsageError: it has another shape than the samples give it.
        """
        tensor = self.passes.give(crossing)
        # the taker builds its tensor from the traced shape, and would not notice another
        if crossing.direction is Pass.FORWARD and tensor.shape != (expected := self.shape(crossing)):
            transfer = self.transfer(crossing)
            raise UsageError(
                f"{transfer.path or 'the model'}: {transfer.value} crosses from partition {transfer.source} to "
                f"{transfer.target} with the shape {[*tensor.shape]}, and as it was traced "
                f"{self.samples[crossing.microbatch]} samples give it {[*expected]}: a shape that depends on values "
                "cannot cross; name one partition for what makes it and for what takes it "
                f"(--split PATTERN={transfer.source})"
            )
        return tensor

    def take(self, crossing: Crossing, tensor: torch.Tensor) -> None:
        """Take what has come."""
        self.passes.take(crossing, tensor)

    def decode(self, crossing: Crossing, data: bytearray) -> torch.Tensor:
        """Make the tensor that has come, from its bytes, where this partition computes."""
        dtype = self.transfer(crossing).shape.dtype
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(self.shape(crossing)).to(self.device)


class ScriptedPart(ModelPart):
    """Part of which a user's own loop says what it computes next."""

    scripted = True


def slots_of(split: SplitProgram, microbatches: int, batch_size: int) -> list[int]:
    """Return the bytes of each thing that crosses in a step of at most so many samples."""
    most = -(-batch_size // microbatches)
    return [transfer.shape.bytes(most) for transfer in split.transfers for _ in range(2 * microbatches)]
