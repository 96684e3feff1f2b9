"""A split replica's step at one partition: it runs its segments, gives what crosses to others, and takes what comes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from distbelief.core.conversations.partitioning import Boundary, Crossed
from distbelief.core.effects import Batch, Compute, Computed, Phantom, Send, Steps, Work
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.fabric.crossings import Crossings
from distbelief.fabric.pinned import DeviceCopies, device_copies
from distbelief.replica.siblings import Siblings
from distbelief.schedules.pipeline import Action, Crossing, Pass, SegmentTask
from distbelief.schedules.pipeline_price import BACKWARD
from distbelief.schedules.pipelines import pipeline
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
        return slots_of(self.split, self._microbatches, self.batch_size)

    def compute(self, batches: Sequence[Microbatch]) -> Passes:
        """Compute these microbatches in the step that begins."""
        self.passes = Passes(self.program, batches)
        return self.passes

    def run(self, task: SegmentTask) -> None:
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
        self.passes.take(crossing, tensor)

    def decode(self, crossing: Crossing, data: bytearray) -> torch.Tensor:
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


PART = 1 << 20
"""Most bytes of what crosses in one message."""


class CrossingKey(NamedTuple):
    """Key of something that crosses between two partitions."""

    generation: int
    """Generation of the job."""
    step: int
    """Step of the replica, since then."""
    transfer: int
    microbatch: int
    backward: bool


# A step is two generators, one in the other. `compute` owns the step: its number, when it begins and ends for the
# others, and whose word says what is computed, the part's own or that of a script. `_play` owns its actions: it plays
# them in the order of the pipeline, and lets the replica's story go on where one cannot cross yet.
#
# On one host what crosses lies in memory that the partitions share, and a message only wakes a sleeping one. Otherwise
# it is sent in parts and kept by its key until it is asked for: another partition may be a step ahead, or already in
# the job's next generation, and sends nothing twice.
class SplitCompute:
    """One partition's steps.

    Args:
        siblings: the other partitions.
        part: the part of the replica that this one computes.
        crossings: memory that it shares with the others, where they are on one host; else what crosses is sent.
    """

    def __init__(self, siblings: Siblings, part: Part, crossings: Crossings | None = None) -> None:
        self.siblings, self._part, self._crossings = siblings, part, crossings
        self._generation = self._step = 0
        self._worked = False
        """True once something was computed in this step."""
        self._here: dict[CrossingKey, bytearray] = {}
        """Bytes that are here and not taken."""
        self._coming: dict[CrossingKey, list[bytes]] = {}
        """Parts of what is not all here."""
        self._waits_for: Crossing | None = None

    def begin(self, generation: int) -> list[Send]:
        """Begin a generation of the job; what is left of those before is dropped."""
        self._generation, self._step, self._waits_for = generation, 0, None
        self._here = {key: data for key, data in self._here.items() if key.generation >= generation}
        self._coming = {key: parts for key, parts in self._coming.items() if key.generation >= generation}
        return self._begin_step()

    def _begin_step(self) -> list[Send]:
        if self._crossings is None:
            return []
        return [self._wake(partition) for partition in self._crossings.begin(self.siblings.moment(self._step))]

    def _wake(self, partition: int) -> Send:
        return Send(self.siblings.role_of(partition), Crossed())

    def waits(self) -> str:
        """Say what it waits for; "" where for nothing."""
        if self._waits_for is None:
            return ""
        path, (source, target) = self._part.transfer(self._waits_for).path, self._part.ends(self._waits_for)
        if source == self._part.partition:
            return f"for {self.siblings.role_of(target)} to begin the step"
        forward = self._waits_for.direction is Pass.FORWARD
        what = f"what {path} needs" if forward else f"the gradient of what {path} needed"
        return f"for {what} from {self.siblings.role_of(source)}"

    def compute(self, batch: Batch, wait: Callable[[], Steps[None]]) -> Steps[Computed | None]:
        """Compute this partition's part of a step; returns None where a script has left its loop."""
        self._step += 1
        self._worked = False
        yield from self._begin_step()
        computed: Computed | None
        if self._part.scripted:
            while isinstance(answer := (yield Compute(batch)), Sequence):
                yield from self._play(answer, wait)
            computed = answer
        else:
            self._part.begin(batch)
            yield from self._play(self._part.actions(), wait)
            computed = self._part.end()
        if self._crossings is not None:
            for partition in self._crossings.end():
                yield self._wake(partition)
        return computed

    def _play(self, actions: Sequence[Action], wait: Callable[[], Steps[None]]) -> Steps[None]:
        """Play actions in order.

        Raises:
            UsageError: something will never cross: the other's script has left the loop, and this one's waits for it.
        """
        for action in actions:
            if isinstance(action, SegmentTask):
                yield Work(self._part.share(action), not self._worked)
                self._worked = True
                self._part.run(action)
                continue
            source, target = self._part.ends(action)
            gives = source == self._part.partition
            data = self._part.give(action) if gives else None
            while (sends := self._given(action, data) if gives else self._taken(action)) is None:
                if (other := self.siblings.role_of(target if gives else source)) in self.siblings.left:
                    raise apart(self.siblings.role, other)
                self._waits_for = action
                yield from wait()
            self._waits_for = None
            yield from sends

    def _given(self, crossing: Crossing, data: torch.Tensor | None) -> Iterable[Send] | None:
        """Give something, and return what to send; None where the other, who has not begun the step, reads the last."""
        _, target = self._part.ends(crossing)
        if data is None:
            phantom = Phantom(self._part.size(crossing))
            return [Send(self.siblings.role_of(target), Boundary(*self._key(crossing), 0, b""), phantom)]
        if self._crossings is None:
            return self._sent(crossing, data)
        if not self._crossings.give(self._part.slot(crossing), target, data):
            return None
        return [self._wake(target)] if self._crossings.sleeps(target) else []

    def _sent(self, crossing: Crossing, data: torch.Tensor) -> Iterable[Send]:
        """Messages of what crosses, in parts, each made when it is sent."""
        to, key = self.siblings.role_of(self._part.ends(crossing)[1]), self._key(crossing)
        sent = data.cpu().contiguous().reshape(-1).view(torch.uint8)
        parts = [sent[start : start + PART] for start in range(0, len(sent), PART)] or [sent]
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            yield Send(to, Boundary(*key, left, part.numpy().tobytes()), Phantom(len(part)))

    def _taken(self, crossing: Crossing) -> Iterable[Send] | None:
        """Take something; None where it is not here yet.

        Raises:
            UsageError: the other has ended the step, and never gives it.
        """
        if self._crossings is None:
            if (data := self._here.pop(self._key(crossing), None)) is None:
                return None
            self._part.take(crossing, self._part.decode(crossing, data))
            return ()
        # Ask whether the other has ended the step before looking at its slot: in the other order it could give and end
        # in between, and would pass for one that never gives.
        slot, dtype = self._part.slot(crossing), self._part.transfer(crossing).shape.dtype
        source, _ = self._part.ends(crossing)
        while True:
            over = self._crossings.ended(source)
            if (value := self._crossings.take(slot, dtype, self._part.shape(crossing))) is not None:
                self._part.take(crossing, value)
                return ()
            if over:
                raise apart(self.siblings.role, self.siblings.role_of(source))
            if not self._crossings.ended(source):  # it may have, before it could know that this one sleeps
                return None

    def _key(self, crossing: Crossing) -> CrossingKey:
        backward = crossing.direction is Pass.BACKWARD
        return CrossingKey(self._generation, self._step, crossing.boundary, crossing.microbatch, backward)

    def arrive(self, message: Boundary) -> None:
        """Take a part of something that crosses to this partition; what is of a generation before is dropped."""
        key = CrossingKey(message.generation, message.step, message.transfer, message.microbatch, message.backward)
        if key.generation < self._generation:
            return
        parts = self._coming.setdefault(key, [])
        parts.append(message.data)
        if not message.left:
            self._here[key] = bytearray().join(self._coming.pop(key))


def apart(role: str, other: str) -> UsageError:
    """Make the error of a partition whose step another never makes."""
    return UsageError(
        f"the script of {other} has gone on from a minibatch, or has left the loop, and that of {role} waits for it "
        "there: all partitions of a replica do the same with a minibatch; leave what only one does out of the loop"
    )
