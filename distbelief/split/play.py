"""Computation of a partition's part of a minibatch, with the tensors that its pipeline's actions pass on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from distbelief.errors import LocalProtocolError, UsageError
from distbelief.schedules.pipeline import Action, Crossing, Pass, SegmentTask
from distbelief.split.layers import mixed
from distbelief.split.program import OwnValue, PartitionProgram, Received, Segment, Source, Supplied


class Microbatch(NamedTuple):
    """Part of a minibatch, the same at every partition."""

    supplied: Mapping[str, Any]
    """Values that segments name `Supplied`."""
    weight: float


def cut_minibatch(inputs: tuple[object, ...], targets: object, microbatches: int, chance: int = 0) -> list[Microbatch]:
    """Cut a minibatch into microbatches as equal as possible, the first ones larger.

    `inputs` and `targets` are tensors, or structures of them, with samples in dimension 0. Anything else goes to every
    microbatch whole. Each microbatch needs a sample. `chance`, the number of the step, keys random draws.

    >>> [part.weight for part in cut_minibatch((torch.zeros(5, 2),), torch.zeros(5), 2)]
    [0.6, 0.4]
    """
    leaves, targeted = pytree.tree_leaves(inputs), pytree.tree_leaves(targets)
    samples = next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim)
    if not 1 <= microbatches <= samples:
        raise UsageError(f"{microbatches} microbatches of a minibatch of {samples} samples: each needs a sample")

    def parts(leaf: object) -> Sequence[object]:
        if microbatches == 1 or not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != samples:
            return [leaf] * microbatches
        return leaf.tensor_split(microbatches)

    names = [f"input_{number}" for number in range(len(leaves))]
    names += [f"target_{number}" for number in range(len(targeted))]
    cut = [parts(leaf) for leaf in (*leaves, *targeted)]
    slices: list[Microbatch] = []
    for number in range(microbatches):
        size = samples // microbatches + (number < samples % microbatches)
        values = {name: of[number] for name, of in zip(names, cut, strict=True)}
        key = mixed(chance, number) >> 1
        slices.append(Microbatch({**values, "samples": size, "chance": key}, size / samples))
    return slices


@dataclass
class _Pending:
    """Microbatch that has gone forward through a partition but not yet backward."""

    leaves: dict[Source, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)


class Passes:
    """Forward and backward passes of a minibatch's microbatches through a partition's segments.

    A pipeline's actions are played in order: inputs are taken before they are needed, and outputs given once they
    exist. The minibatch's gradient is added to the parameters' `.grad`.
    """

    def __init__(self, program: PartitionProgram, batches: Sequence[Microbatch]) -> None:
        self.program, self.batches = program, batches
        self.begins: Mapping[int, torch.Tensor] = {}
        """Gradients from outside of the model, by the numbers of its values."""
        self.outputs: dict[int, Any] = {}
        """Model's output for each microbatch, at a partition that has it."""
        self._losses: dict[int, torch.Tensor] = {}
        self._own = program.split.transfers
        results = [result for segment in program.segments for result in segment.gives]
        self._values = {move.number: result.value for result in results for move in result.transfers}
        self._last = max(program.computes, default=-1)
        self._pending = [_Pending() for _ in batches]
        self._arrived: dict[Crossing, torch.Tensor] = {}
        """Gradients that arrived and are not yet used."""
        self._norms = _BatchNorms(program) if len(batches) > 1 else None

    @property
    def loss(self) -> float | None:
        """Return the mean over the minibatch, at the partition that computes it."""
        if self.program.loss is None:
            return None
        return sum(float(loss) * self.batches[number].weight for number, loss in sorted(self._losses.items()))

    def sends(self, crossing: Crossing) -> bool:
        """Return whether a crossing leaves this partition; else it arrives."""
        transfer = self._own[crossing.boundary]
        return self.program.partition == (transfer.source if crossing.direction is Pass.FORWARD else transfer.target)

    def give(self, crossing: Crossing) -> torch.Tensor:
        """Return a tensor that leaves this partition; it is not written to again."""
        transfer, pending = self._own[crossing.boundary], self._pending[crossing.microbatch]
        if crossing.direction is Pass.FORWARD:
            value: torch.Tensor = pending.results[self._values[transfer.number]].detach()
            return value
        leaf = pending.leaves.pop(Received(transfer))
        return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)

    def take(self, crossing: Crossing, tensor: torch.Tensor) -> None:
        """Receive the tensor from a transfer's other end."""
        if crossing.direction is Pass.BACKWARD:
            self._arrived[crossing] = tensor
            return
        transfer = self._own[crossing.boundary]
        leaf = tensor.detach().requires_grad_(transfer.shape.differentiable)
        self._pending[crossing.microbatch].leaves[Received(transfer)] = leaf

    def run(self, task: SegmentTask) -> None:
        """Compute a segment in one direction for a microbatch."""
        segment = self.program.split.segments[task.segment]
        if task.direction is Pass.FORWARD:
            self._forward(segment, task.microbatch)
        else:
            self._backward(segment, task.microbatch)

    def _forward(self, segment: Segment, number: int) -> None:
        pending, batch = self._pending[number], self.batches[number]
        if self._norms:
            self._norms.begin(batch.weight)
        for source in segment.takes:
            if isinstance(source, Supplied):
                pending.leaves[source] = batch.supplied[source.name]
            elif isinstance(source, OwnValue) and source not in pending.leaves:
                pending.leaves[source] = _cut_off(pending.results[source.value])
        results = self.program.computes[segment.number](*[pending.leaves[source] for source in segment.takes])
        pending.results |= zip((result.value for result in segment.gives), results, strict=True)
        if segment.number == self._last:
            self._end_forward(number, pending)

    def _end_forward(self, number: int, pending: _Pending) -> None:
        self.outputs[number] = _read(self.program.outputs, pending)
        if self.program.loss is not None:
            self._losses[number] = pending.results[self.program.loss.value].detach()
        if self._norms and len(self.outputs) == len(self.batches):
            self._norms.end()

    def _backward(self, segment: Segment, number: int) -> None:
        pending = self._pending[number]
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for result in segment.gives:
            tensor = pending.results.pop(result.value)
            total = self.begins.get(result.value)
            if self.program.loss == OwnValue(result.value):
                total = torch.full_like(tensor, self.batches[number].weight)
            # sums begin with the gradient of the last consumer, as in the whole model
            for transfer in reversed(result.transfers):
                if transfer.shape.differentiable:
                    gradient = self._arrived.pop(Crossing(transfer.number, number, Pass.BACKWARD))
                    total = gradient if total is None else total + gradient
            leaf = pending.leaves.pop(OwnValue(result.value), None)
            if isinstance(leaf, torch.Tensor) and leaf.grad is not None:
                total = leaf.grad if total is None else total + leaf.grad
            if total is not None and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                roots.append(tensor)
                gradients.append(total)
        if roots:
            torch.autograd.backward(roots, gradients)


def _read(structure: object, pending: _Pending) -> object:
    if isinstance(structure, OwnValue):
        return pending.results[structure.value].detach()
    if isinstance(structure, Supplied | Received):
        return pending.leaves[structure].detach()
    if isinstance(structure, tuple):
        return tuple(_read(part, pending) for part in structure)
    if isinstance(structure, dict):
        return {key: _read(part, pending) for key, part in structure.items()}
    return structure


def _cut_off(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


class _BatchNorms:
    """Batch norms of a partition, whose running statistics move in a step as for one minibatch.

    A microbatch with a share w of the samples moves them by 1 - (1 - m)^w, so that all together keep 1 - m of the old
    statistics.
    """

    def __init__(self, program: PartitionProgram) -> None:
        parts = [part for layer in program.layers for part in layer.modules()]
        self._norms = [
            (part, part.momentum, part.num_batches_tracked)
            for part in dict.fromkeys(parts)
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.training and part.track_running_stats
        ]
        self._seen = [int(count) for *_, count in self._norms if count is not None]

    def begin(self, weight: float) -> None:
        for (part, momentum, _), seen in zip(self._norms, self._seen, strict=True):
            moved = 1 / (seen + 1) if momentum is None else momentum
            part.momentum = 1 - (1 - moved) ** weight

    def end(self) -> None:
        for (part, momentum, count), seen in zip(self._norms, self._seen, strict=True):
            part.momentum = momentum
            if count is not None:
                count.fill_(seen + 1)


def play(partitions: Sequence[Passes], actions: Sequence[Iterable[Action]]) -> None:
    """Play all partitions of a split model in this process in turn, for oracles and measurements."""
    left = [deque(waiting) for waiting in actions]
    lines: dict[Crossing, torch.Tensor] = {}
    while any(left):
        before = sum(map(len, left))
        for passes, waiting in zip(partitions, left, strict=True):
            while waiting and _played(passes, waiting[0], lines):
                waiting.popleft()
        if sum(map(len, left)) == before:
            raise LocalProtocolError(
                f"all partitions wait for each other: {[waiting[0] for waiting in left if waiting]}"
            )


def _played(passes: Passes, action: Action, lines: dict[Crossing, torch.Tensor]) -> bool:
    if isinstance(action, SegmentTask):
        passes.run(action)
    elif passes.sends(action):
        lines[action] = passes.give(action)
    elif action in lines:
        passes.take(action, lines.pop(action))
    else:
        return False
    return True
