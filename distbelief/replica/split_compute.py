"""A split replica's step at one partition: it runs its segments, and gives and takes the tensors that cross."""

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
from distbelief.schedules.pipeline import Action, Crossing, Pass, SegmentTask, pipeline
from distbelief.schedules.pipeline_price import BACKWARD
from distbelief.split.graph import Transfer
from distbelief.split.play import Microbatch, Passes
from distbelief.split.program import PartitionProgram, SplitProgram

PART = 1 << 20
"""Most bytes of a tensor in one message."""


class Part:
    """One partition's part of a split replica. This one computes nothing: tensors that cross have only lengths."""

    copies: DeviceCopies | None = None
    """Copies between the host and its device; None without a device."""
    scripted = False
    """True if a user's own loop chooses what is computed next."""

    def __init__(self, split: SplitProgram, partition: int, settings: Settings, batch_size: int) -> None:
        self.split, self.partition, self.batch_size = split, partition, batch_size
        self._algorithm, self._microbatches = settings.pipeline, settings.microbatches
        self.samples: list[int] = []
        """Samples of each microbatch of the present step."""
        self._actions = functools.lru_cache(maxsize=2)(self._actions_of)

    @property
    def slots(self) -> Sequence[int]:
        """Most bytes of each tensor that crosses in a step; none where nothing is computed."""
        return ()

    def begin(self, _: Batch) -> None:
        raise NotImplementedError  # a script begins the steps of its part

    def end(self) -> Computed:
        raise NotImplementedError  # a script ends the steps of its part

    def cut(self, samples: int) -> list[int]:
        """Cut a minibatch of so many samples, and return the samples of each microbatch."""
        count = min(self._microbatches, samples)  # a short minibatch has fewer, so that none is empty
        self.samples = [samples // count + (number < samples % count) for number in range(count)]
        return self.samples

    def actions(self, direction: Pass | None = None) -> Sequence[Action]:
        """Return the actions of the present step, in one direction, or in both where it is None."""
        return self._actions(len(self.samples), direction)

    def _actions_of(self, microbatches: int, direction: Pass | None) -> list[Action]:
        actions = pipeline(self._algorithm, self.split.graph, microbatches).actions_of(self.partition)
        return [action for action in actions if direction is None or action.direction is direction]

    def share(self, task: SegmentTask) -> float:
        """Return the share of a segment and microbatch in the whole replica's work of a step."""
        way = 1.0 if task.direction is Pass.FORWARD else BACKWARD
        part = self.samples[task.microbatch] / sum(self.samples)
        return part * way * self.split.segments[task.segment].flops / (max(self.split.work, 1) * (1 + BACKWARD))

    def slot(self, crossing: Crossing) -> int:
        """Return the number of a crossing in a step."""
        number = 2 * crossing.boundary + (crossing.direction is Pass.BACKWARD)
        return number * self._microbatches + crossing.microbatch

    def transfer(self, crossing: Crossing) -> Transfer:
        """Return the transfer of a crossing."""
        return self.split.transfers[crossing.boundary]

    def ends(self, crossing: Crossing) -> tuple[int, int]:
        """Return the giving and the taking partition."""
        return self.split.graph.boundaries[crossing.boundary].ends(crossing.direction)

    def size(self, crossing: Crossing) -> int:
        """Return the bytes of a crossing."""
        return self.transfer(crossing).shape.bytes(self.samples[crossing.microbatch])

    def shape(self, crossing: Crossing) -> tuple[int, ...]:
        """Return the shape of a crossing tensor."""
        return self.transfer(crossing).shape.at(self.samples[crossing.microbatch])

    def run(self, task: SegmentTask) -> None:
        """Compute a segment."""

    def give(self, _: Crossing) -> torch.Tensor | None:
        """Return the tensor that leaves; None where nothing is computed."""
        return None

    def take(self, crossing: Crossing, tensor: torch.Tensor) -> None:
        """Take a tensor that has come."""

    def decode(self, crossing: Crossing, _: bytearray) -> torch.Tensor:
        """Make a tensor from its bytes, where this partition computes."""
        return torch.empty(0, dtype=self.transfer(crossing).shape.dtype)


class ModelPart(Part):
    """Part that computes its partition of a model."""

    def __init__(self, program: PartitionProgram, settings: Settings, batch_size: int) -> None:
        super().__init__(program.split, program.partition, settings, batch_size)
        self.program = program
        self.passes = Passes(program, [])
        """Passes of the present step."""
        self.parameters = [parameter for parameter in program.module.parameters() if parameter.requires_grad]
        self.device = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        self.copies = device_copies(self.device)
        for layer in program.layers:
            layer.train()

    @property
    def slots(self) -> Sequence[int]:
        return slots_of(self.split, self._microbatches, self.batch_size)

    def compute(self, batches: Sequence[Microbatch]) -> Passes:
        """Begin a step of these microbatches."""
        self.passes = Passes(self.program, batches)
        return self.passes

    def run(self, task: SegmentTask) -> None:
        self.passes.run(task)

    def give(self, crossing: Crossing) -> torch.Tensor:
        """Return the tensor that leaves; refuse one of another shape than the trace's."""
        tensor = self.passes.give(crossing)
        # the taker builds its tensor by the traced shape, and would not notice a different one
        if crossing.direction is Pass.FORWARD and tensor.shape != (expected := self.shape(crossing)):
            transfer = self.transfer(crossing)
            raise UsageError(
                f"{transfer.path or 'the model'}: {transfer.value} has the shape {[*tensor.shape]} where it crosses "
                f"from partition {transfer.source} to {transfer.target}, but the trace has {[*expected]} for "
                f"{self.samples[crossing.microbatch]} samples: a tensor whose shape depends on values cannot cross; "
                f"compute and use it in one partition (--split PATTERN={transfer.source})"
            )
        return tensor

    def take(self, crossing: Crossing, tensor: torch.Tensor) -> None:
        self.passes.take(crossing, tensor)

    def decode(self, crossing: Crossing, data: bytearray) -> torch.Tensor:
        dtype = self.transfer(crossing).shape.dtype
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(self.shape(crossing)).to(self.device)


class ScriptedPart(ModelPart):
    """Part for a user's own loop, which chooses what is computed next."""

    scripted = True


def slots_of(split: SplitProgram, microbatches: int, batch_size: int) -> list[int]:
    """Return the most bytes of each tensor that crosses, in a step of so many samples."""
    most = -(-batch_size // microbatches)
    return [transfer.shape.bytes(most) for transfer in split.transfers for _ in range(2 * microbatches)]


class CrossingKey(NamedTuple):
    """Key of a tensor that crosses between two partitions."""

    generation: int
    step: int
    """Step of the replica in that generation."""
    transfer: int
    microbatch: int
    backward: bool


# A step is two nested generators. `compute` owns the step: its number, its beginning and end for the others, and the
# choice of actions, by the part or by a script. `_play` owns the actions: it plays them in the order of the pipeline,
# and waits through the replica's story where a tensor cannot cross yet.
#
# On one host tensors cross in memory that the partitions share, and a message only wakes a sleeping one. Otherwise they
# are sent in parts, and kept by key until they are taken: another partition may be a step ahead, or already in the
# job's next generation, and sends nothing twice.
class SplitCompute:
    """Steps of one partition.

    `crossings` is memory shared with the other partitions, where all are on one host. Without it tensors are sent.
    """

    def __init__(self, siblings: Siblings, part: Part, crossings: Crossings | None = None) -> None:
        self.siblings, self._part, self._crossings = siblings, part, crossings
        self._generation = self._step = 0
        self._worked = False
        """True once a segment of this step was computed."""
        self._here: dict[CrossingKey, bytearray] = {}
        """Bytes of tensors that have come and are not taken."""
        self._coming: dict[CrossingKey, list[bytes]] = {}
        """Parts of tensors that have not wholly come."""
        self._waits_for: Crossing | None = None

    def begin(self, generation: int) -> list[Send]:
        """Begin a generation of the job, and drop the tensors of earlier ones."""
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
        """Describe the crossing that this partition waits for; "" for none."""
        if self._waits_for is None:
            return ""
        path, (source, target) = self._part.transfer(self._waits_for).path, self._part.ends(self._waits_for)
        if source == self._part.partition:
            return f"for {self.siblings.role_of(target)} to begin the step"
        forward = self._waits_for.direction is Pass.FORWARD
        what = f"what {path} needs" if forward else f"the gradient of what {path} needed"
        return f"for {what} from {self.siblings.role_of(source)}"

    def compute(self, batch: Batch, wait: Callable[[], Steps[None]]) -> Steps[Computed | None]:
        """Compute this partition's part of a step; returns None where its script has left the loop."""
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
        """Play actions in order; raises `UsageError` where the other end of a crossing has left its loop."""
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
        """Give a tensor, and return the messages for it; None while its slot is still in use."""
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
        """Yield the messages of a tensor, in parts, each made when it is sent."""
        to, key = self.siblings.role_of(self._part.ends(crossing)[1]), self._key(crossing)
        sent = data.cpu().contiguous().reshape(-1).view(torch.uint8)
        parts = [sent[start : start + PART] for start in range(0, len(sent), PART)] or [sent]
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            yield Send(to, Boundary(*key, left, part.numpy().tobytes()), Phantom(len(part)))

    def _taken(self, crossing: Crossing) -> Iterable[Send] | None:
        """Take a tensor; None where it has not come. Refuses one whose giver has ended the step without it."""
        if self._crossings is None:
            if (data := self._here.pop(self._key(crossing), None)) is None:
                return None
            self._part.take(crossing, self._part.decode(crossing, data))
            return ()
        # Read whether the giver has ended the step before its slot: in the other order it could give and end in
        # between, and would seem never to give.
        slot, dtype = self._part.slot(crossing), self._part.transfer(crossing).shape.dtype
        source, _ = self._part.ends(crossing)
        while True:
            over = self._crossings.ended(source)
            if (value := self._crossings.take(slot, dtype, self._part.shape(crossing))) is not None:
                self._part.take(crossing, value)
                return ()
            if over:
                raise apart(self.siblings.role, self.siblings.role_of(source))
            if not self._crossings.ended(source):  # otherwise the giver ended before it could see that this one sleeps
                return None

    def _key(self, crossing: Crossing) -> CrossingKey:
        backward = crossing.direction is Pass.BACKWARD
        return CrossingKey(self._generation, self._step, crossing.boundary, crossing.microbatch, backward)

    def arrive(self, message: Boundary) -> None:
        """Take a part of a tensor; one of an earlier generation is dropped."""
        key = CrossingKey(message.generation, message.step, message.transfer, message.microbatch, message.backward)
        if key.generation < self._generation:
            return
        parts = self._coming.setdefault(key, [])
        parts.append(message.data)
        if not message.left:
            self._here[key] = bytearray().join(self._coming.pop(key))


def apart(role: str, other: str) -> UsageError:
    """Make the error of a partition that waits for a step which another never makes."""
    return UsageError(
        f"the script of {other} has ended a minibatch, or has left the loop, while that of {role} waits for it: all "
        "partitions of a replica must do the same in each minibatch; move code for one of them out of the loop"
    )
