"""The story of one home in a step: what it computes, gives and takes, for any order of forward and backward tasks."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from distbelief.errors import LocalProtocolError, UsageError
from distbelief.schedules.pipeline import HomeTask, Pass
from distbelief.schedules.pipelines import home_tasks
from distbelief.split.graph import Transfer
from distbelief.split.layers import mixed
from distbelief.split.program import HomeProgram, OwnValue, Received, Segment, Source, Supplied


@dataclass(frozen=True)
class RunSegment:
    """A segment is computed when this is answered, with None: the time that it takes passes here."""

    segment: Segment
    microbatch: int
    direction: Pass


@dataclass(frozen=True)
class Give:
    """A tensor leaves: forward from a transfer's source, backward from its target. It is not written any more."""

    transfer: Transfer
    microbatch: int
    direction: Pass
    tensor: torch.Tensor

    @property
    def other(self) -> int:
        """The home that takes it."""
        return self.transfer.target if self.direction is Pass.FORWARD else self.transfer.source


@dataclass(frozen=True)
class Take:
    """Is answered by the tensor that the other end of a transfer gives."""

    transfer: Transfer
    microbatch: int
    direction: Pass

    @property
    def other(self) -> int:
        """The home that gives it."""
        return self.transfer.source if self.direction is Pass.FORWARD else self.transfer.target


HomeEffect = RunSegment | Give | Take
NONE_GIVEN: Mapping[int, torch.Tensor] = {}
Returned = TypeVar("Returned")
HomeSteps = Generator[HomeEffect, torch.Tensor | None, Returned]
"""Story of a home: it yields effects, and returns something."""
HomeStory = HomeSteps["HomeResult"]


@dataclass(frozen=True)
class HomeResult:
    """Result of a step at one home; the gradients are in its parameters."""

    loss: float | None
    """The mean over the minibatch, at the home that computes it."""
    outputs: tuple[Any, ...]
    """The model's output for each microbatch, at the home that has it."""


class Microbatch(NamedTuple):
    """A part of a minibatch, as every home has it."""

    given: Mapping[str, Any]
    """Values that segments name `Supplied`."""
    weight: float
    """Its share of the minibatch's samples."""


def cut_minibatch(inputs: tuple[object, ...], targets: object, microbatches: int, chance: int = 0) -> list[Microbatch]:
    """A minibatch in microbatches, as equal as can be, the first ones longer.

    Args:
        inputs: the arguments of the model: tensors, or structures of them, with samples in dimension 0.
        targets: as the loss takes them.
        microbatches: 1 or more.
        chance: number of the step; what draws at random is keyed by it.

    Raises:
        UsageError: there are more microbatches than samples.

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
    """A microbatch that went forward through a home and not yet back."""

    leaves: dict[Source, Any] = field(default_factory=dict)
    """Values that segments took, cut off from what computed them."""
    results: dict[int, Any] = field(default_factory=dict)
    """Results of segments, by their numbers."""


class Passes:
    """Takes microbatches forward and back through a home's segments.

    Args:
        program: of the home.
    """

    def __init__(self, program: HomeProgram) -> None:
        self.program = program
        self._pending: dict[int, _Pending] = {}

    def forward(self, number: int, batch: Microbatch) -> HomeSteps[tuple[Any, Any]]:
        """Takes a microbatch through all segments, in order; returns loss and output where this home has them."""
        pending = self._pending[number] = _Pending()
        for segment in self.program.segments:
            for source in segment.takes:
                if source not in pending.leaves:
                    pending.leaves[source] = yield from self._taken(source, number, batch, pending)
            yield RunSegment(segment, number, Pass.FORWARD)
            results = segment.compute(*[pending.leaves[source] for source in segment.takes])
            for result, tensor in zip(segment.gives, results, strict=True):
                pending.results[result.value] = tensor
                for transfer in result.transfers:
                    yield Give(transfer, number, Pass.FORWARD, tensor.detach())
        loss = self.program.loss and pending.results[self.program.loss.value].detach()
        return loss, self._outputs(pending)

    def _taken(self, source: Source, number: int, batch: Microbatch, pending: _Pending) -> HomeSteps[Any]:
        match source:
            case Supplied(name):
                return batch.given[name]
            case OwnValue(value):
                return _cut_off(pending.results[value])
            case Received(transfer):
                tensor = yield Take(transfer, number, Pass.FORWARD)
                if tensor is None:
                    raise LocalProtocolError(f"{transfer} of microbatch {number} was answered by nothing")
                return tensor.detach().requires_grad_(transfer.shape.differentiable)

    def _outputs(self, pending: _Pending) -> object:
        def read(structure: object) -> object:
            if isinstance(structure, OwnValue):
                return pending.results[structure.value].detach()
            if isinstance(structure, Supplied | Received):
                return pending.leaves[structure].detach()
            if isinstance(structure, tuple):
                return tuple(read(part) for part in structure)
            if isinstance(structure, dict):
                return {key: read(part) for key, part in structure.items()}
            return structure

        return read(self.program.outputs)

    def backward(
        self, number: int, batch: Microbatch, begins: Mapping[int, torch.Tensor] = NONE_GIVEN
    ) -> HomeSteps[None]:
        """Take the gradient of a microbatch's share of the loss back through all segments; `begins` has that of values
        of which nobody else knows it, by their numbers.
        """
        pending = self._pending.pop(number)
        for segment in reversed(self.program.segments):
            roots: list[torch.Tensor] = []
            gradients: list[torch.Tensor] = []
            for result in segment.gives:
                tensor = pending.results.pop(result.value)
                if not (isinstance(tensor, torch.Tensor) and tensor.requires_grad):
                    continue
                begin = begins.get(result.value)
                if self.program.loss == OwnValue(result.value):
                    begin = torch.full_like(tensor, batch.weight)
                gradient = yield from self._gradient(result.value, begin, number, pending, result.transfers)
                if gradient is not None:
                    roots.append(tensor)
                    gradients.append(gradient)
            yield RunSegment(segment, number, Pass.BACKWARD)
            if roots:
                torch.autograd.backward(roots, gradients)
            first = [take for take in segment.takes if isinstance(take, Received) and self._begins(take, segment)]
            for source in first:
                leaf = pending.leaves.pop(source)
                if source.transfer.shape.differentiable:
                    gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                    yield Give(source.transfer, number, Pass.BACKWARD, gradient)

    def _gradient(
        self,
        value: int,
        total: torch.Tensor | None,
        number: int,
        pending: _Pending,
        transfers: Sequence[Transfer],
    ) -> HomeSteps[torch.Tensor | None]:
        """The gradient of a result, from a given one on: that of the last user comes first, as without a split."""
        for transfer in reversed(transfers):
            if transfer.shape.differentiable:
                gradient = yield Take(transfer, number, Pass.BACKWARD)
                total = gradient if total is None or gradient is None else total + gradient
        leaf = pending.leaves.pop(OwnValue(value), None)
        if leaf is not None and leaf.grad is not None:
            total = leaf.grad if total is None else total + leaf.grad
        return total

    def _begins(self, source: Source, segment: Segment) -> bool:
        """Return whether no earlier segment takes something."""
        return not any(source in earlier.takes for earlier in self.program.segments[: segment.number])


def _cut_off(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


class _BatchNorms:
    """The batch norms of a home, whose running statistics move in a step as far as for one minibatch.

    A microbatch with a share w of the samples moves them by 1 - (1 - m)^w, so that what is left of the old is (1 - m)
    after all of them.
    """

    def __init__(self, program: HomeProgram) -> None:
        parts = [part for layer in program.layers for part in layer.modules()]
        self._norms = [
            (part, part.momentum, part.num_batches_tracked)
            for part in dict.fromkeys(parts)
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.training and part.track_running_stats
        ]
        self._seen = [int(count) for *_, count in self._norms if count is not None]

    def begin(self, weight: float) -> None:
        """A microbatch goes forward next."""
        for (part, momentum, _), seen in zip(self._norms, self._seen, strict=True):
            moved = 1 / (seen + 1) if momentum is None else momentum
            part.momentum = 1 - (1 - moved) ** weight

    def end(self) -> None:
        """All have gone forward: it was one minibatch."""
        for (part, momentum, count), seen in zip(self._norms, self._seen, strict=True):
            part.momentum = momentum
            if count is not None:
                count.fill_(seen + 1)


def step(
    program: HomeProgram,
    batches: Sequence[Microbatch],
    order: Sequence[HomeTask] | None = None,
) -> HomeStory:
    """One step of one home: every microbatch goes through it forward and back, in the order of the tasks.

    The gradient of the minibatch is added to what the parameters' `.grad` hold.

    Args:
        program: of the home.
        batches: the minibatch, as `cut_minibatch` makes it; the same at every home.
        order: the home's of a `Pipeline`; all microbatches forward, then all back, where it is None.
    """
    order = [*home_tasks(len(batches), len(batches))] if order is None else order
    passes = Passes(program)
    norms = _BatchNorms(program) if len(batches) > 1 else None
    loss: float | None = None
    outputs: dict[int, object] = {}
    for direction, number in order:
        batch = batches[number]
        if direction is Pass.BACKWARD:
            yield from passes.backward(number, batch)
            continue
        if norms:
            norms.begin(batch.weight)
        leaf_values, outputs[number] = yield from passes.forward(number, batch)
        if leaf_values is not None:
            loss = (loss or 0.0) + float(leaf_values) * batch.weight
    if norms:
        norms.end()
    return HomeResult(loss, tuple(outputs[number] for number in sorted(outputs)))
