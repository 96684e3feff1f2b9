"""Programs of a split model: the segments of all partitions, and the part of the model that one partition holds."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument, map_aggregate

from distbelief.errors import LocalProtocolError
from distbelief.schedules.pipeline import Boundary, PartitionSegment, SegmentGraph
from distbelief.sharding.layout import Piece
from distbelief.split.graph import SplitGraph, Transfer
from distbelief.split.tidying import Shape


@dataclass(frozen=True)
class Supplied:
    """Argument of a minibatch that every partition has: `input_0`, `target_0`, `samples`, `chance`."""

    name: str


@dataclass(frozen=True)
class OwnValue:
    """Argument from an earlier segment of the same partition."""

    value: int


@dataclass(frozen=True)
class Received:
    """Argument from another partition."""

    transfer: Transfer


Source = Supplied | OwnValue | Received


@dataclass(frozen=True)
class Result:
    """Value of a segment that another place needs."""

    value: int
    """Number at this partition, by which later segments name it."""
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Segment:
    """Part of a split model that one partition computes without waiting.

    It begins at a transfer that no earlier segment needed, or after a value that leaves.
    """

    number: int
    partition: int
    takes: tuple[Source, ...]
    gives: tuple[Result, ...]
    flops: int
    """Floating-point operations of its forward for the traced samples."""
    elements: int
    nodes: int
    paths: tuple[str, ...]

    @property
    def received(self) -> list[Transfer]:
        """Return the transfers that it takes."""
        return [take.transfer for take in self.takes if isinstance(take, Received)]

    @property
    def sent(self) -> list[Transfer]:
        """Return the transfers of its results."""
        return [transfer for result in self.gives for transfer in result.transfers]


@dataclass(frozen=True)
class SplitProgram:
    """Computation and transfers of a split model, without tensors."""

    partitions: int
    segments: tuple[Segment, ...]
    """Segments of all partitions, each after those whose transfers it takes."""
    transfers: tuple[Transfer, ...]
    """Transfers by number; each has the same number as its boundary."""

    @functools.cached_property
    def graph(self) -> SegmentGraph:
        """Return the graph for schedules; a boundary's bytes per sample are those that one more sample adds."""
        return SegmentGraph(
            tuple(
                PartitionSegment(
                    ", ".join(segment.paths) or f"segment {segment.number}",
                    segment.partition,
                    tuple(move.number for move in segment.received),
                    tuple(move.number for move in segment.sent),
                )
                for segment in self.segments
            ),
            tuple(
                Boundary(move.value, move.source, move.target, round(move.shape.bytes_more), move.shape.differentiable)
                for move in self.transfers
            ),
        )

    @functools.cached_property
    def work(self) -> int:
        """Return the floating-point operations of a forward pass of all partitions, for the traced samples."""
        return sum(segment.flops for segment in self.segments)


@dataclass(frozen=True)
class PartitionProgram:
    """Computation and tensors of one partition."""

    partition: int
    split: SplitProgram
    module: nn.Module
    """Parameters and buffers of this partition, under the names of the whole model."""
    pieces: Mapping[str, Piece]
    computes: Mapping[int, Callable[..., tuple[Any, ...]]]
    """Function of each segment by number, from its arguments to its results."""
    loss: OwnValue | None
    outputs: object
    """Values of the model's output, in its structure, at a partition that has it; else None."""
    layers: tuple[nn.Module, ...]

    @property
    def segments(self) -> list[Segment]:
        """Return the segments of this partition in order."""
        return [segment for segment in self.split.segments if segment.partition == self.partition]


def program_of(split: SplitGraph) -> SplitProgram:
    """Return the segments of all partitions of a split model."""
    runs, nodes = _Runs(split), split.nodes
    left = [
        runs.of([node for node in nodes if split.partition[node] == partition]) for partition in range(split.partitions)
    ]
    segments: list[Segment] = []
    sent: set[Transfer] = set()
    while any(left):
        before = len(segments)
        for partition, waiting in enumerate(left):
            while waiting:
                segment = runs.segment(len(segments), partition, waiting[0])
                if not sent.issuperset(segment.received):
                    break
                sent.update(segment.sent)
                segments.append(segment)
                del waiting[0]
        if len(segments) == before:
            raise LocalProtocolError(
                f"partitions wait for each other before {[wait[0][0].meta['path'] for wait in left]}"
            )
    return SplitProgram(split.partitions, tuple(segments), tuple(split.transfers.values()))


def build(split: SplitGraph, partition: int, model: nn.Module, device: torch.device | None = None) -> PartitionProgram:
    """Return the program of one partition, on the model's whole tensors and on copies of pieces.

    Only this partition's part of the model moves to the device, if one is named; other parts may be on the meta device.
    """
    return _Builder(split, partition, model, device).program()


LIGHT = frozenset({torch.narrow, operator.getitem})
"""Functions that only take a value apart; each stays in the segment that computes the value."""


def elements(nodes: Iterable[fx.Node], shapes: Mapping[fx.Node, Shape]) -> int:
    """Count the elements of nodes' outputs for one sample, without nodes that only take a value apart."""
    node_shapes = (
        shapes[node] for node in nodes if node in shapes and node.op != "get_attr" and node.target not in LIGHT
    )
    return sum(shape.elements_each for shape in node_shapes)


class _Runs:
    """Division of partitions' nodes into runs, each of which is a segment."""

    def __init__(self, split: SplitGraph) -> None:
        self._split = split
        self._numbers = {node: number for number, node in enumerate(split.graph.nodes)}
        self._leaving: dict[fx.Node, list[Transfer]] = {}
        for node, transfer in split.transfers.items():
            self._leaving.setdefault(node.all_input_nodes[0], []).append(transfer)
        self._wanted: set[fx.Node] = set()
        fx.map_arg((*split.outputs.values(), split.loss), self._wanted.add)

    def of(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        runs: list[list[fx.Node]] = [[]]
        arrived: set[fx.Node] = set()
        left = False
        for node in nodes:
            if node.op == "placeholder" or node in self._split.transfers:
                continue
            waits = {input_node for input_node in node.all_input_nodes if input_node in self._split.transfers} - arrived
            light = node.op == "get_attr" or node.target in LIGHT
            if runs[-1] and (waits or (left and not light)):
                runs.append([])
                left = False
            arrived |= waits
            runs[-1].append(node)
            left = left or node in self._leaving
        return [run for run in runs if run]

    def taken(self, run: Sequence[fx.Node]) -> list[fx.Node]:
        inside = set(run)
        inputs = (input_node for node in run for input_node in node.all_input_nodes)
        return list(dict.fromkeys(input_node for input_node in inputs if input_node not in inside))

    def given(self, run: Sequence[fx.Node]) -> list[fx.Node]:
        inside = set(run)
        return [
            node
            for node in run
            if node in self._wanted or any(user not in inside and user in self._split.partition for user in node.users)
        ]

    def segment(self, number: int, partition: int, run: Sequence[fx.Node]) -> Segment:
        results = (Result(self._numbers[node], tuple(self._leaving.get(node, ()))) for node in self.given(run))
        return Segment(
            number,
            partition,
            tuple(map(self.source, self.taken(run))),
            tuple(results),
            sum(node.meta["flops"] for node in run),
            elements(run, self._split.shapes),
            len(run),
            tuple(dict.fromkeys(node.meta["path"] for node in run if node.op == "call_module")),
        )

    def source(self, node: fx.Node) -> Source:
        if node.op == "placeholder":
            return Supplied(node.meta["input"])
        if node in self._split.transfers:
            return Received(self._split.transfers[node])
        return OwnValue(self._numbers[node])


class _Builder:
    def __init__(self, split: SplitGraph, partition: int, model: nn.Module, device: torch.device | None) -> None:
        self._split, self._partition = split, partition
        self._whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._elsewhere = {tensor.device for tensor in self._whole.values()} - {device}
        self._device = device if self._elsewhere else None
        """Target of moved tensors; None if they stay."""
        self._there: dict[int, torch.Tensor] = {}
        """Moved tensors, by the ids of the originals."""
        self._nodes = [node for node in split.nodes if split.partition[node] == partition]
        self._pieces = {
            name: piece for name, held in split.pieces.items() for piece in held if piece.partition == partition
        }
        self._tensors = {name: self._cut(name, piece) for name, piece in self._pieces.items()}
        called = dict.fromkeys(str(node.target) for node in self._nodes if node.op == "call_module")
        self._layers = {key: self._filled(key) for key in called}

    def program(self) -> PartitionProgram:
        split, partition, runs = self._split, self._partition, _Runs(self._split)
        whole = program_of(split)
        numbers = [segment.number for segment in whole.segments if segment.partition == partition]
        loss = None if split.loss is None or split.partition[split.loss] != partition else runs.source(split.loss)
        return PartitionProgram(
            partition,
            whole,
            self._tree(),
            self._pieces,
            {
                number: self._compiled(run, runs.taken(run), runs.given(run))
                for number, run in zip(numbers, runs.of(self._nodes), strict=True)
            },
            loss if isinstance(loss, OwnValue) else None,
            mapped(split.outputs.get(partition), runs.source),
            tuple(self._layers.values()),
        )

    def _compiled(
        self, run: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> Callable[..., tuple[Any, ...]]:
        graph = fx.Graph()
        copies = {source: graph.placeholder(f"take_{number}") for number, source in enumerate(inputs)}
        for node in run:
            copied = copies[node] = graph.node_copy(node, copies.__getitem__)
            if self._device is not None:  # tracing may have recorded the device
                copied.args = map_aggregate(copied.args, self._device_of)
                copied.kwargs = map_aggregate(copied.kwargs, self._device_of)
        graph.output(tuple(copies[node] for node in outputs))
        root = {str(node.target): self._attribute(node) for node in run if node.op in ("call_module", "get_attr")}
        names = {target: f"part_{number}" for number, target in enumerate(root)}
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = names[str(node.target)]
        module = fx.GraphModule({names[target]: held for target, held in root.items()}, graph)
        compute: Callable[..., tuple[Any, ...]] = module.forward
        return compute

    def _attribute(self, node: fx.Node) -> object:
        name = str(node.target)
        if node.op == "call_module":
            return self._layers[name]
        return self._tensors[name] if name in self._tensors else self._moved(self._split.constant(name))

    def _cut(self, name: str, piece: Piece) -> torch.Tensor:
        whole = self._whole[name]
        if not whole.ndim or piece.stop - piece.start == whole.shape[piece.dimension]:
            return self._moved(whole)
        part = whole.detach().narrow(piece.dimension, piece.start, piece.stop - piece.start)
        part = part.clone() if self._device is None else part.to(self._device)
        return nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device is None:
            return tensor
        if (there := self._there.get(id(tensor))) is None:
            there = tensor.detach().to(self._device)
            if isinstance(tensor, nn.Parameter) and torch._has_compatible_shallow_copy_type(tensor, there):
                tensor.data, there = there, tensor  # as in Module.to, the object stays the same, with its hooks
            elif isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, tensor.requires_grad)
            self._there[id(tensor)] = there
        return there

    def _device_of(self, argument: Argument) -> Argument:
        return self._device if isinstance(argument, torch.device) and argument in self._elsewhere else argument

    def _filled(self, key: str) -> nn.Module:
        """Return a module on this partition's tensors; borrowed ones have no values."""
        holding = self._split.holdings[key]
        layer = plain(holding.layer)
        tensors = [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            if name in holding.pieces:
                _assign(layer, name, self._tensors[holding.pieces[name][0]])
            elif isinstance(tensor, nn.Parameter):
                _assign(layer, name, nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad))
            else:
                _assign(layer, name, self._moved(tensor))
        return layer

    def _tree(self) -> nn.Module:
        root = nn.Module()
        for name, tensor in self._tensors.items():
            parent, (*path, leaf) = root, name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                parent.register_parameter(leaf, tensor)
            else:
                parent.register_buffer(leaf, tensor)
        return root


def _assign(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(layer.get_submodule(path), leaf, tensor)


def plain(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer on the same tensors that never writes in place."""
    tensors = [*layer.parameters(), *layer.buffers()]
    copied = copy.deepcopy(layer, {id(tensor): tensor for tensor in tensors})
    for part in copied.modules():
        if getattr(part, "inplace", False):
            vars(part)["inplace"] = False
    return copied


def mapped(structure: object, to: Callable[[fx.Node], object]) -> object:
    """Return a structure of nodes with each node replaced."""
    if isinstance(structure, fx.Node):
        return to(structure)
    if isinstance(structure, tuple | list):
        return tuple(mapped(part, to) for part in structure)
    if isinstance(structure, dict):
        return {key: mapped(part, to) for key, part in structure.items()}
    return structure
