"""Rewriting of a traced graph as a split graph: nodes at partitions, and transfers between them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from distbelief.errors import UsageError
from distbelief.sharding.layout import Piece
from distbelief.split.graph import Holding, SplitGraph, Transfer, TransferKind, Value
from distbelief.split.layers import (
    Borrowing,
    Cut,
    Divided,
    DroppedShare,
    Indices,
    Keyed,
    Loss,
    LossFunction,
    NodeShare,
    draws,
    node_number,
)
from distbelief.split.tidying import Shape
from distbelief.split.tracing import Traced


def arrive(value: torch.Tensor) -> torch.Tensor:
    """Stand for a transfer in the graph."""
    return value


def as_number(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss in the dtype in which all partitions receive it."""
    return loss.detach().double()


class Rewriter:
    """Rewriter of a traced graph, node by node."""

    def __init__(self, traced: Traced, partitions: int) -> None:
        self.split = SplitGraph(traced, partitions)
        self._traced = traced
        self._values: dict[fx.Node, Value] = {}
        self._crossed: dict[tuple[fx.Node, int], fx.Node] = {}
        self._inputs: dict[tuple[int, str], fx.Node] = {}
        self._tensors: dict[str, fx.Node] = {}
        self._names = {id(tensor): name for name, tensor in _tensors(traced.model, remove_duplicate=True)}
        self._model_tensors = dict(_tensors(traced.model, remove_duplicate=False))
        self._persistent = set(traced.model.state_dict())
        for node in traced.graph.nodes:
            self._make_free(node)

    def value(self, node: fx.Node) -> Value:
        """Return the places of a traced node's value."""
        return self._values[node]

    def share_out(self, partitions: Mapping[fx.Node, int]) -> None:
        """Give each tensor of a module that several partitions call to one of these, balanced by size."""
        users: dict[str, set[int]] = {}
        for node, partition in partitions.items():
            if node.op == "call_module":
                for _, tensor in _tensors(self._traced.layer(node), remove_duplicate=True):
                    users.setdefault(self._names[id(tensor)], set()).add(partition)
        held = [0] * self.split.partitions
        shared: dict[str, list[str]] = {}
        for name, at in users.items():
            if len(at) == 1:
                held[min(at)] += self._model_tensors[name].numel()
            elif self._is_held(name):
                shared.setdefault(name.rpartition(".")[0], []).append(name)
        sizes = {path: sum(self._model_tensors[name].numel() for name in names) for path, names in shared.items()}
        for path in sorted(shared, key=lambda path: -sizes[path]):
            partition = min(users[shared[path][0]], key=lambda partition: (held[partition], partition))
            held[partition] += sizes[path]
            for name in shared[path]:
                tensor = self._model_tensors[name]
                self._owns(name, _piece(tensor, None, partition))

    @property
    def nodes(self) -> list[fx.Node]:
        """Return the nodes to place, in order; those made of inputs alone are computed wherever needed."""
        return [node for node in self._traced.graph.nodes if node.op != "output" and node not in self._values]

    def _make_free(self, node: fx.Node) -> None:
        computed = node.op in ("call_function", "call_method") and not draws(node)
        if (
            node.op == "placeholder"
            or (node.op == "get_attr" and self._is_constant(str(node.target)))
            or (computed and all(input_node in self._values for input_node in node.all_input_nodes))
        ):
            self._values[node] = Value(node, free=True)

    def place(self, node: fx.Node, partition: int) -> None:
        """Compute a whole node at one partition."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: self.whole(self._values[value], partition))
        if node.op == "get_attr":
            self._values[node] = Value(node)  # this node is placed at the first partition that needs it
            return
        computed = self._call(node, partition, None, args, kwargs)
        self._values[node] = Value(node, {partition: computed})

    def divide(self, node: fx.Node, divided: Divided) -> None:
        """Compute a node in parts, one at each partition."""
        flows = list(node.all_input_nodes)
        value = Value(node, cut=Cut(divided.gives, divided.edges) if divided.gives is not None else None)
        for partition, part in enumerate(divided.parts):
            self._claim(node, partition, part)
        for partition, part in enumerate(divided.parts):
            needs = dict(zip(flows, part.needs, strict=True)) if part.needs else {}

            def bring(
                input_node: fx.Node,
                partition: int = partition,
                part: NodeShare = part,
                needs: Mapping[fx.Node, Indices | None] = needs,
            ) -> fx.Node:
                need = needs.get(input_node)
                if need is None:
                    return self.whole(self._values[input_node], partition)
                return self._padded(self._values[input_node], partition, need, part.fill)

            args, kwargs = fx.map_arg((node.args, node.kwargs), bring)
            value.parts[partition] = self._call(node, partition, part, args, kwargs)
        self._values[node] = value

    def finish(self, loss: LossFunction | None, targets: object, everywhere: bool = False) -> SplitGraph:
        """End the graph with the output and the loss, whole at one partition; unused tensors go to partition 0."""
        output = next(iter(reversed(self._traced.graph.nodes)))
        results = [self._values[input_node] for input_node in output.all_input_nodes]
        partitions = [value.owner for value in results if value.at and not value.free]
        partition = partitions[-1] if partitions else 0
        (structure,) = fx.map_arg(output.args, lambda input_node: self.whole(self._values[input_node], partition))
        self.split.outputs = {partition: structure}
        if loss is not None:
            leaves, spec = pytree.tree_flatten(targets)
            wanted = [self._input(partition, f"target_{number}") for number in range(len(leaves))]
            self.split.holdings["loss"] = Holding(Loss(loss), "loss", {})
            loss_node = self.split.graph.call_module("loss", (structure, pytree.tree_unflatten(wanted, spec)))
            self.split.loss = self._known(loss_node, partition, "loss", None)
        if everywhere:
            self._hand_out(partition)
        for tensor in self._model_tensors.values():
            first = self._names[id(tensor)]
            if self._is_held(first) and first not in self.split.pieces:
                self._borrow(first, 0)
        self._refuse_idle()
        return self.split

    def _hand_out(self, partition: int) -> None:
        """Give every partition the loss or the output; no gradients flow back from the copies."""
        structure = self.split.outputs[partition]
        if self.split.loss is not None:
            number = self.split.graph.call_function(as_number, (self.split.loss,))
            structure = self._known(number, partition, "loss", Shape((), (), torch.float64, False))
        copies: dict[tuple[fx.Node, int], fx.Node] = {}

        def copied(at: int, node: fx.Node) -> fx.Node:
            if (node, at) not in copies:
                copies[node, at] = self._copied(node, partition, at)
            return copies[node, at]

        for at in range(self.split.partitions):
            (self.split.outputs[at],) = fx.map_arg((structure,), functools.partial(copied, at))

    def _copied(self, node: fx.Node, partition: int, at: int) -> fx.Node:
        """Return a copy of a partition's value, with its own memory, at a partition."""
        shape, path = self.split.shapes.get(node), node.meta["path"]
        if shape is None:
            raise UsageError(
                f"{path or 'the model'}: it returns {node.name}, which is not a computed tensor and so cannot be "
                "sent to the other partitions: return only tensors"
            )
        if at != partition:
            shape = replace(shape, differentiable=False)
            cut = self._known(self.split.graph.call_function(torch.detach, (node,)), partition, path, shape)
            node = self._transfer(cut, at, TransferKind.SEND)
        return self._known(self.split.graph.call_function(torch.clone, (node,)), at, path, shape)

    def _refuse_idle(self) -> None:
        trained = {name for name, tensor in self._model_tensors.items() if tensor.requires_grad}
        for partition in range(self.split.partitions):
            held_here = [
                name for name, held in self.split.pieces.items() if any(piece.partition == partition for piece in held)
            ]
            if not trained & set(held_here):
                raise UsageError(
                    f"partition {partition} of {self.split.partitions} has no parameter to train: split over fewer "
                    "partitions, or otherwise"
                )

    def whole(self, value: Value, partition: int) -> fx.Node:
        """Return the whole value at a partition."""
        if partition not in value.at:
            value.at[partition] = self._bring(value, partition)
        return value.at[partition]

    def _bring(self, value: Value, partition: int) -> fx.Node:
        node = value.node
        if value.free:
            return self._remake(node, partition)
        if node.op == "get_attr":
            return self._borrow(str(node.target), partition)
        shape = self._traced.shapes.get(node)
        if not value.parts:
            owner = value.owner
            if shape is None:
                raise UsageError(
                    f"{node.meta['path'] or 'the model'}: {node.name} is no tensor and is needed at partitions {owner} "
                    f"and {partition}, between which only tensors cross: make it a tensor, compute it where it is "
                    f"used, or give both nodes one partition (--split PATTERN={owner})"
                )
            return self._transfer(value.at[owner], partition, TransferKind.SEND)
        kind = TransferKind.GATHER if value.cut else TransferKind.SUM
        brought = [self._transfer(part, partition, kind) for part in value.parts.values()]
        return self._together(brought, partition, value.cut, shape, kind, node.meta["path"])

    def _padded(self, value: Value, partition: int, need: Indices, fill: float) -> fx.Node:
        shape = self._traced.shapes[value.node]
        there = need.clipped(shape)
        inner = self.range(value, partition, there)
        if there == need:
            return inner
        behind = len(shape.fixed) - 1 - need.dimension
        pads = (*(0, 0) * behind, there.start - need.start, need.stop - there.stop)
        added = self.split.graph.call_function(torch.nn.functional.pad, (inner, pads, "constant", fill))
        return self._known(added, partition, value.node.meta["path"], need.of(shape))

    def range(self, value: Value, partition: int, need: Indices) -> fx.Node:
        """Return some indices of one dimension of a value, at a partition."""
        shape = self._traced.shapes[value.node]
        if need.covers(shape):
            return self.whole(value, partition)
        key = partition, need
        if key not in value.ranges:
            value.ranges[key] = self._range(value, partition, need, shape)
        return value.ranges[key]

    def _range(self, value: Value, partition: int, need: Indices, shape: Shape) -> fx.Node:
        if partition in value.at or value.free or value.node.op == "get_attr":
            return self._slice(self.whole(value, partition), need)
        if not value.parts:
            return self._transfer(self._slice(value.at[value.owner], need), partition, TransferKind.HALO)
        cut = value.cut
        if cut is None or cut.dimension != need.dimension:
            kind = TransferKind.GATHER if cut else TransferKind.SUM
            brought = [self._transfer(self._slice(part, need), partition, kind) for part in value.parts.values()]
            return self._together(brought, partition, cut, need.of(shape), kind, value.node.meta["path"])
        if cut.of(partition) == need and partition in value.parts:
            return value.parts[partition]
        slices: list[fx.Node] = []
        for owner, part in value.parts.items():
            extent = cut.of(owner)
            if both := extent.common(need):
                slices.append(self._transfer(self._slice(part, both.within(extent)), partition, TransferKind.HALO))
        return self._together(slices, partition, cut, need.of(shape), TransferKind.HALO, value.node.meta["path"])

    def _together(
        self,
        brought: Sequence[fx.Node],
        partition: int,
        cut: Cut | None,
        shape: Shape | None,
        kind: TransferKind,
        path: str,
    ) -> fx.Node:
        if len(brought) == 1:
            return brought[0]
        if cut is not None:
            joined = self.split.graph.call_function(torch.cat, (list(brought), cut.dimension))
            joined.meta["kind"] = kind
            return self._known(joined, partition, path, shape)
        joined = brought[0]
        for summand in brought[1:]:
            joined = self._known(
                self.split.graph.call_function(operator.add, (joined, summand)), partition, path, shape
            )
            joined.meta["kind"] = kind
        return joined

    def _slice(self, node: fx.Node, need: Indices) -> fx.Node:
        shape = self.split.shapes[node]
        if need.covers(shape):
            return node
        arguments = (node, need.dimension, need.start, need.stop - need.start)
        key = node, hash(need)
        if key not in self._crossed:
            narrowed = self.split.graph.call_function(torch.narrow, arguments)
            self._crossed[key] = self._known(narrowed, self.split.partition[node], node.meta["path"], need.of(shape))
        return self._crossed[key]

    def _transfer(self, node: fx.Node, partition: int, kind: TransferKind) -> fx.Node:
        if self.split.partition[node] == partition:
            return node
        key = node, partition
        if key not in self._crossed:
            arrived = self.split.graph.call_function(arrive, (node,))
            shape, path = self.split.shapes[node], node.meta["path"]
            number, source = len(self.split.transfers), self.split.partition[node]
            self.split.transfers[arrived] = Transfer(number, source, partition, kind, node.name, path, shape)
            self._crossed[key] = self._known(arrived, partition, path, shape)
        return self._crossed[key]

    def _call(
        self,
        node: fx.Node,
        partition: int,
        part: NodeShare | None,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
    ) -> fx.Node:
        op, target = node.op, node.target
        shape = self._traced.shapes.get(node)
        if part is not None and part.gives is not None and shape is not None:
            shape = part.gives.of(shape)
        if part is not None and part.call is not None:
            op, target = "call_function", part.call
        if op == "call_module":
            target, borrowed = self._holding(node, partition, part)
            args = (*args, *borrowed)
            if isinstance(self.split.holdings[target].layer, DroppedShare):
                args = (*args, self._input(partition, "samples"))
        if draws(node, self._traced.called(node)):
            held = self.split.holdings.get(str(target)) if op == "call_module" else None
            keyed = Keyed(held.layer if held else None, op, target, node_number(node))
            op, target = "call_module", f"{node.name}@{partition}:keyed"
            args = (self._input(partition, "chance"), *args)
            pieces = _inside(held.pieces) if held else {}
            self.split.holdings[target] = Holding(keyed, node.meta["path"], pieces)
        call = self.split.graph.create_node(op, target, args, kwargs)
        call.meta["flops"] = round(node.meta["flops"] * self._share(node, part))
        return self._known(call, partition, node.meta["path"], shape)

    def _share(self, node: fx.Node, part: NodeShare | None) -> float:
        """Return a part's share of a node's operations: its share of the output, or an equal one for a summand."""
        whole = self._traced.shapes.get(node)
        if part is None or whole is None:
            return 1.0
        if part.gives is None:
            return 1 / self.split.partitions
        return (part.gives.stop - part.gives.start) / whole.fixed[part.gives.dimension]

    def _holding(self, node: fx.Node, partition: int, part: NodeShare | None) -> tuple[str, list[fx.Node]]:
        """Return the module that computes a layer or a part at a partition, and the tensors that it borrows there."""
        path = str(node.target)
        layer = self._traced.layer(node)
        pieces, borrowed = dict[str, tuple[str, Piece]](), list[str]()
        for name, tensor in _tensors(layer, remove_duplicate=False):
            first = self._names[id(tensor)]
            if not self._is_held(first):
                continue
            if part is not None and name not in part.holds:
                borrowed += [name] * (name in part.borrows)
                continue
            piece = _piece(tensor, part.holds[name] if part is not None else None, partition)
            if self._owns(first, piece):
                pieces[name] = first, piece
            elif part is None or part.holds[name] is None:
                borrowed.append(name)
            else:
                raise UsageError(
                    f"{path}.{name} is also {first}, which is divided differently ({self.split.pieces[first]}): split "
                    "both alike, or leave one of them whole"
                )
        key = f"{node.name}@{partition}"
        computing = part.layer if part is not None and part.layer is not None else layer
        holding = Holding(computing, path, pieces)
        if borrowed:
            holding = Holding(Borrowing(holding.layer, tuple(borrowed)), path, _inside(pieces))
        self.split.holdings.setdefault(key, holding)
        names = dict(_tensors(layer, remove_duplicate=False))
        return key, [self._borrow(self._names[id(names[name])], partition) for name in borrowed]

    def _claim(self, node: fx.Node, partition: int, part: NodeShare) -> None:
        """Give a partition the tensors that its part of a layer holds, before other partitions borrow them."""
        for name, indices in part.holds.items():
            tensor = dict(_tensors(self._traced.layer(node), remove_duplicate=False)).get(name)
            if tensor is not None and self._is_held(first := self._names[id(tensor)]):
                self._owns(first, _piece(tensor, indices, partition))

    def _owns(self, name: str, piece: Piece) -> bool:
        """Return whether a partition has a piece of a tensor; it gets the piece if no other overlaps it."""
        held = self.split.pieces.setdefault(name, [])
        if piece in held:
            return True
        if any(other.partition == piece.partition or other.dimension != piece.dimension for other in held):
            return False
        if any(other.start < piece.stop and piece.start < other.stop for other in held):
            return False
        held.append(piece)
        held.sort(key=lambda held_piece: held_piece.start)
        return True

    def _borrow(self, name: str, partition: int) -> fx.Node:
        """Return a tensor of the model at a partition, which becomes its owner if it has none."""
        tensor = self._model_tensors[name]
        name = self._names[id(tensor)]
        if name not in self._tensors:
            held = self.split.pieces.setdefault(name, [])
            if not held:
                held.append(_piece(tensor, None, partition))
            if len(held) > 1:
                raise UsageError(
                    f"{name} is needed whole at partition {partition}, but it is held in pieces by partitions "
                    f"{[piece.partition for piece in held]}: split its users the same way"
                )
            piece_node = self.split.graph.get_attr(name)
            shape = Shape(tuple(tensor.shape), (0,) * tensor.ndim, tensor.dtype, tensor.requires_grad)
            self._tensors[name] = self._known(piece_node, held[0].partition, name.rpartition(".")[0], shape)
            self._to_front(piece_node)
        return self._transfer(self._tensors[name], partition, TransferKind.TENSOR)

    def _to_front(self, node: fx.Node) -> None:
        first = next(iter(self.split.graph.nodes))
        if first is not node:
            first.prepend(node)

    def _remake(self, node: fx.Node, partition: int) -> fx.Node:
        if node.op == "placeholder":
            copy = self._input(partition, node.name)
            if node in self._traced.shapes:
                self.split.shapes[copy] = self._traced.shapes[node]
            return copy
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: self.whole(self._values[value], partition))
        copy = self.split.graph.create_node(node.op, node.target, args, kwargs)
        return self._known(copy, partition, node.meta["path"], self._traced.shapes.get(node))

    def _input(self, partition: int, name: str) -> fx.Node:
        if (partition, name) not in self._inputs:
            placeholder = self.split.graph.placeholder(f"{name}_at_{partition}")
            placeholder.meta["input"] = name
            self._inputs[partition, name] = self._known(placeholder, partition, "", None)
            self._to_front(placeholder)
        return self._inputs[partition, name]

    def _known(self, node: fx.Node, partition: int, path: str, shape: Shape | None) -> fx.Node:
        node.meta["path"] = path
        node.meta.setdefault("flops", 0)
        self.split.partition[node] = partition
        if shape is not None:
            self.split.shapes[node] = shape
        return node

    def _is_held(self, name: str) -> bool:
        return name in self._persistent

    def _is_constant(self, name: str) -> bool:
        tensor = self._model_tensors.get(name)
        return tensor is None or not self._is_held(self._names[id(tensor)])


def _piece(tensor: torch.Tensor, indices: Indices | None, partition: int) -> Piece:
    if indices is None:
        return Piece(0, 0, tensor.shape[0] if tensor.ndim else 1, partition)
    return Piece(indices.dimension, indices.start, indices.stop, partition)


def _inside(pieces: Mapping[str, tuple[str, Piece]]) -> dict[str, tuple[str, Piece]]:
    return {f"inner.{name}": held for name, held in pieces.items()}


def _tensors(module: nn.Module, remove_duplicate: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)
