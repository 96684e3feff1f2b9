"""Split models against whole ones: all partitions in one process, and plain PyTorch on a copy of the model."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from distbelief.errors import UsageError
from distbelief.schedules.pipeline import Crossing, PartitionTask, Pass, Pipeline, pipeline
from distbelief.split.graph import Transfer
from distbelief.split.options import Split
from distbelief.split.plan import apply
from distbelief.split.play import Microbatch, Passes, cut_minibatch, play
from distbelief.split.program import PartitionProgram, build
from distbelief.split.registry import DIVIDING, PLACING
from distbelief.split.tracing import Traced, trace
from distbelief.tasks import Task, resolve
from distbelief.tasks.task import as_data

Loss = Callable[[Any, Any], torch.Tensor]


class Gave(NamedTuple):
    """What left a partition."""

    transfer: Transfer
    microbatch: int
    direction: Pass
    tensor: torch.Tensor


class Recorded(Passes):
    """Passes of a partition, of which everything is noted that leaves it."""

    def __init__(self, program: PartitionProgram, batches: Sequence[Microbatch], gave: list[Gave]) -> None:
        super().__init__(program, batches)
        self._gave = gave

    def give(self, crossing: Crossing) -> torch.Tensor:
        tensor = super().give(crossing)
        transfer = self.program.split.transfers[crossing.boundary]
        self._gave.append(Gave(transfer, crossing.microbatch, crossing.direction, tensor))
        return tensor


def play_programs(
    programs: Sequence[PartitionProgram],
    batches: Sequence[Microbatch],
    gave: list[Gave],
    order: Sequence[PartitionTask] | None = None,
) -> list[Recorded]:
    """One step of all partitions: microbatches forward, then back, or in another order."""
    made = pipeline("gpipe", programs[0].split.graph, len(batches))
    if order is not None:
        made = Pipeline("", made.graph, len(batches), (tuple(order),) * len(programs))
    partitions = [Recorded(program, batches, gave) for program in programs]
    play(partitions, made.actions)
    return partitions


@dataclass
class Played:
    """What all partitions did in one step."""

    programs: list[PartitionProgram]
    loss: float
    outputs: list[Any]
    gave: list[Gave] = field(default_factory=list)

    def messages(self, partition: int) -> list[Gave]:
        """What left a partition, either way."""
        return [one for one in self.gave if partition == (
            one.transfer.source if one.direction is Pass.FORWARD else one.transfer.target
        )]  # fmt: skip

    def bytes(self, partition: int) -> int:
        """How much left a partition."""
        return sum(one.tensor.numel() * one.tensor.itemsize for one in self.messages(partition))

    def floats(self, partition: int, direction: Pass, samples: int) -> list[int]:
        """How many elements a sample left a partition, message by message."""
        return [one.tensor.numel() // samples for one in self.messages(partition) if one.direction is direction]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients, put together from the partitions' pieces."""
        return self._whole(
            (program, [(name, one.grad) for name, one in program.module.named_parameters() if one.grad is not None])
            for program in self.programs
        )

    def buffers(self) -> dict[str, torch.Tensor]:
        """Whole buffers, put together from the partitions' pieces."""
        return self._whole((program, program.module.named_buffers()) for program in self.programs)

    def _whole(
        self, held: Iterable[tuple[PartitionProgram, Iterable[tuple[str, torch.Tensor]]]]
    ) -> dict[str, torch.Tensor]:
        found: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
        for program, tensors in held:
            for name, one in tensors:
                piece = program.pieces[name]
                found.setdefault(name, []).append((piece.start, piece.dimension, one))
        return {
            name: torch.cat([part for *_, part in sorted(parts, key=lambda one: one[0])], parts[0][1])
            if len(parts) > 1
            else parts[0][2]
            for name, parts in found.items()
        }


def play_split(
    model: nn.Module,
    inputs: tuple[Any, ...],
    targets: Any,
    split: Split,
    loss: Loss = nn.functional.cross_entropy,
    microbatches: int = 1,
    order: Sequence[PartitionTask] | None = None,
    traced_with: tuple[Any, ...] | None = None,
    chance: int = 0,
    traced: Traced | None = None,
) -> Played:
    """One step of a split copy of a model, which may have been traced already."""
    traced = traced or trace(copy.deepcopy(model), traced_with or inputs)
    graph = apply(split, traced, loss, targets)
    programs = [build(graph, partition, copy.deepcopy(model)) for partition in range(split.partitions)]
    batches = cut_minibatch(inputs, targets, microbatches, chance)
    played = Played(programs, 0.0, [])
    partitions = play_programs(programs, batches, played.gave, order)
    played.loss = sum(one.loss for one in partitions if one.loss is not None)
    played.outputs = [output for one in partitions for output in one.outputs.values() if output is not None]
    return played


def whole_gradients(
    model: nn.Module, inputs: tuple[Any, ...], targets: Any, loss: Loss = nn.functional.cross_entropy
) -> tuple[nn.Module, Any, torch.Tensor]:
    """A copy of a model with its gradients, its output and its loss, in plain PyTorch."""
    whole = copy.deepcopy(model)
    output = whole(*inputs)
    value = loss(output, targets)
    value.backward()
    return whole, output, value


def check_equal(
    model: nn.Module,
    inputs: tuple[Any, ...],
    targets: Any,
    split: Split,
    loss: Loss = nn.functional.cross_entropy,
    atol: float = 1e-12,
    **options: Any,
) -> Played:
    """A split model's outputs, loss, gradients and buffers are the whole one's; bit for bit where `atol` is 0."""
    played = play_split(model, inputs, targets, split, loss, **options)
    check_played(played, whole_gradients(model, inputs, targets, loss), atol, options.get("microbatches", 1) == 1)
    return played


def check_played(played: Played, found: tuple[nn.Module, Any, torch.Tensor], atol: float, once: bool = True) -> None:
    """What all partitions did is what the whole model does; its outputs and buffers too, where that was at once."""
    whole, output, value = found
    assert abs(played.loss - value.item()) <= atol
    if once:
        detached = pytree.tree_map(torch.Tensor.detach, output)
        torch.testing.assert_close(played.outputs[0], detached, atol=atol, rtol=0)
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    got = played.gradients()
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= atol, name
    if once:
        check_buffers(played, whole, atol)


def check_buffers(played: Played, whole: nn.Module, atol: float) -> None:
    """The buffers of a split model are those of a whole one; one that no checkpoint has may lie in the graph."""
    got, expected = played.buffers(), dict(whole.named_buffers())
    assert expected.keys() & whole.state_dict().keys() <= got.keys() <= expected.keys()
    for name, buffer in got.items():
        torch.testing.assert_close(buffer, expected[name], atol=atol, rtol=0)


PARTITIONS = (2, 3, 4)
WAYS = (*PLACING, *DIVIDING)
REFUSED = {
    "stages": "there are . layers with parameters for stages; name at most|has no parameter to train",
    "branches": "the widest fork has . branch|partition . of . has no parameter to train",
    "time": "there is no nn.GRU, nn.LSTM or nn.RNN|and later stacks have 2 layers; split over at most 2",
    "samples": "no layer with weights comes before the fully connected|depends on all samples together"
    "|has no parameter to train",
}
"""Why a model cannot be split so, by way."""
NOTHING = (
    "nothing of .* can be split by|partition . of . has no parameter to train|; split it over (at most|2 or fewer)"
)
"""The same, of each other way."""


class Prepared(NamedTuple):
    """A task in float64, its model traced, and what the whole one gives of some samples."""

    task: Task
    model: nn.Module
    inputs: tuple[Any, ...]
    targets: Any
    whole: tuple[nn.Module, Any, torch.Tensor]
    traced: Traced


@functools.lru_cache(maxsize=1)
def prepared(name: str, samples: int) -> Prepared:
    """A task and so many of its samples; whoever asks for one after the other has it made once."""
    torch.manual_seed(0)
    task = resolve(name)
    model = task.model().double()
    inputs, targets = map(doubled, as_data(task.train()).batch(torch.arange(samples)))
    whole = whole_gradients(model, (inputs,), targets, task.loss)
    return Prepared(task, model, (inputs,), targets, whole, trace(copy.deepcopy(model), (inputs,)))


def doubled(value: Any) -> Any:
    """With numbers of float64."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check_way(name: str, way: str, applies: Sequence[int], samples: int = 3, over: Sequence[int] = PARTITIONS) -> None:
    """Over so many partitions a task is the whole one, and over others it is refused, with the reason."""
    own = prepared(name, samples)
    for partitions in over:
        split = Split(way, partitions)
        if partitions in applies:
            played = play_split(own.model, own.inputs, own.targets, split, own.task.loss, traced=own.traced)
            check_played(played, own.whole, 1e-12)
        else:
            with pytest.raises(UsageError, match=REFUSED.get(way, NOTHING)):
                apply(split, own.traced, own.task.loss, own.targets)


class Skipping(nn.Module):
    """What one layer gives is used by three, at other partitions, and by a size that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = h = self.layers[0](x).view(x.size(0), -1)
        for layer in self.layers[1:]:
            h = torch.relu(layer(h)) + first
        return h.view(first.shape[0], first.shape[1])
