"""Samples: convolutions on a part of the minibatch at each partition, and fully connected layers by neurons on all
parts.

Source: Krizhevsky 2014, *One weird trick for parallelizing convolutional neural networks*, scheme b: while all
partitions compute one part, the next one arrives. Here the fully connected layers update once per minibatch, as in the
whole model.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn
from torch.fx.node import Target

from distbelief.errors import UsageError
from distbelief.split.layers import Divided, DroppedShare, Placed, draws
from distbelief.split.observing import name_of
from distbelief.split.registry import rule_of
from distbelief.split.tidying import Shape, samples_of, share_of
from distbelief.split.tracing import Traced
from distbelief.split.ways.following import is_elementwise


def before_dense(traced: Traced) -> set[fx.Node]:
    """Return the nodes that depend on no fully connected layer."""
    nodes: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        dense = node.op == "call_module" and rule_of(traced.layer(node), "columns")
        known = all(
            input_node in nodes or input_node.op in ("placeholder", "get_attr") for input_node in node.all_input_nodes
        )
        if known and not dense:
            nodes.add(node)
    if not any(node.op == "call_module" and any(True for _ in traced.layer(node).parameters()) for node in nodes):
        raise UsageError(
            "--split samples: no layer with weights comes before the fully connected ones; split these by neurons"
        )
    return nodes


def rounds(
    traced: Traced, placed: Mapping[fx.Node, int | Divided], in_parts: Collection[fx.Node], partitions: int
) -> tuple[Traced, Placed]:
    """Return the model with a copy of each node for each part of the minibatch, and the places of copies.

    Copies of `in_parts` belong to the partition of their part, others to the places of their nodes.
    """
    rewritten = _Rounds(traced, partitions)
    for node in traced.graph.nodes:
        rewritten.take(node)
    placed_copies: Placed = {}
    for node, copies in rewritten.copies.items():
        for number, part in enumerate(dict.fromkeys(copies)):
            if node in in_parts:
                placed_copies[part] = number
            elif node in placed:
                placed_copies[part] = placed[node]
    return replace(traced, model=rewritten.model, graph=rewritten.graph, shapes=rewritten.shapes), placed_copies


class _Rounds:
    def __init__(self, traced: Traced, parts: int) -> None:
        self.graph = fx.Graph()
        self.shapes: dict[fx.Node, Shape] = {}
        self.copies: dict[fx.Node, list[fx.Node]] = {}
        """Copies of each node by part; a node that does not depend on samples has the same copy for all."""
        self.model = copy.copy(traced.model)
        vars(self.model)["_modules"] = dict(traced.model._modules)
        self._traced, self._parts = traced, parts
        self._whole: dict[fx.Node, fx.Node] = {}

    def take(self, node: fx.Node) -> None:
        if node.op == "output":
            self.graph.output(fx.map_arg(node.args, self._together)[0])
        elif node.op == "placeholder":
            self.copies[node] = self._parts_of(node)
        elif any(len(set(self.copies[input_node])) > 1 for input_node in node.all_input_nodes):
            self._refuse_together(node)
            self.copies[node] = [self._copy(node, number) for number in range(self._parts)]
        else:
            self.copies[node] = [self._copy(node, None)] * self._parts

    def _parts_of(self, node: fx.Node) -> list[fx.Node]:
        whole = self.graph.placeholder(node.name)
        whole.meta = dict(node.meta)
        shape = self._traced.shapes.get(node)
        if shape is None and node.name != "samples":
            return [whole] * self._parts
        if shape is not None:
            self.shapes[whole] = shape
            if not (shape.growth and shape.growth[0]):
                return [whole] * self._parts
        function = samples_of if shape is None else share_of
        parts = [self.graph.call_function(function, (whole, number, self._parts)) for number in range(self._parts)]
        for number, part in enumerate(parts):
            part.meta.update(path="", flops=0)
            if shape is not None:
                self.shapes[part] = replace(shape, share=(number, self._parts))
        return parts

    def _copy(self, node: fx.Node, number: int | None) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda input_node: self.copies[input_node][number or 0])
        name = node.name if number is None else f"{node.name}_part_{number}"
        copy = self.graph.create_node(node.op, self._target(node, number), args, kwargs, name)
        copy.meta = {**node.meta, "copied from": node.name}
        shape = self._traced.shapes.get(node)
        if number is not None:
            copy.meta["flops"] = node.meta.get("flops", 0) // self._parts
            shape = shape and replace(shape, share=(number, self._parts))
        if shape is not None:
            self.shapes[copy] = shape
        return copy

    def _target(self, node: fx.Node, number: int | None) -> Target:
        """Return a copy's target: for dropout, a module that draws for all samples and takes its part."""
        layer = self._traced.called(node)
        if number is None or not draws(node, layer):
            return node.target
        shape = self._traced.shapes.get(node)
        if type(layer) is not nn.Dropout or shape is None or (shape.fixed[0], shape.growth[0]) != (0, 1):
            raise UsageError(
                f"{node.meta['path'] or 'the model'}: {node.name} draws at random for all samples together: to split "
                "by samples, use nn.Dropout on tensors whose first dimension is the samples"
            )
        target = f"{node.name}_part_{number}"
        self.model._modules[target] = DroppedShare(layer.p, (number, self._parts))
        return target

    def _together(self, node: fx.Node) -> fx.Node:
        parts = self.copies[node]
        if len(set(parts)) == 1:
            return parts[0]
        if node not in self._whole:
            shape = self._traced.shapes.get(node)
            if shape is None or not shape.growth or (shape.fixed[0], shape.growth[0]) != (0, 1):
                raise self._refusal(node)
            samples = next(iter(self.graph.nodes))  # the first placeholder is `samples`
            whole = self.graph.call_function(joined, (parts, samples))
            whole.meta.update(path=node.meta["path"], flops=0)
            self.shapes[whole] = shape
            self._whole[node] = whole
        return self._whole[node]

    def _refuse_together(self, node: fx.Node) -> None:
        """Refuse nodes that visibly depend on several samples."""
        shape = self._traced.shapes.get(node)
        one_dimension = shape is None or sum(more > 0 for more in shape.growth) == 1
        layers = self._traced.layer(node).modules() if node.op == "call_module" else ()
        # arithmetic with the number of samples, or with a number computed from their values
        counts = is_elementwise(self._traced, node) and not all(
            input_node in self._traced.shapes for input_node in node.all_input_nodes
        )
        normed = _normalises(node) or any(_of_all_samples(layer) for layer in layers)
        if not one_dimension or normed or counts or self._is_number(node):
            raise self._refusal(node)

    def _is_number(self, node: fx.Node) -> bool:
        """Return whether a node computes a number from tensors."""
        took = (
            any(input_node in self._traced.shapes for input_node in node.all_input_nodes)
            or node.target is operator.getitem
        )
        return node not in self._traced.shapes and took and not self._holds(node)

    def _holds(self, node: fx.Node) -> bool:
        """Return whether tensors are taken out of a node's value."""
        readers = (user for user in node.users if user.target in (operator.getitem, getattr))
        return any(user in self._traced.shapes or self._holds(user) for user in readers)

    def _refusal(self, node: fx.Node) -> UsageError:
        what = type(self._traced.layer(node)).__name__ if node.op == "call_module" else node.name
        return UsageError(
            f"{node.meta['path'] or 'the model'}: {what} depends on all samples together, and a part has "
            "some of them: split another way, or (for batch norm) normalise by groups or layers"
        )


def _normalises(node: fx.Node) -> bool:
    training = node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
    return node.op == "call_function" and "batch_norm" in name_of(node) and bool(training)


def _of_all_samples(layer: nn.Module) -> bool:
    """Return whether a layer averages over the minibatch, or keeps such an average."""
    if not isinstance(layer, nn.modules.batchnorm._NormBase):
        return False
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and not layer.track_running_stats:
        return False
    return layer.training or layer.running_mean is None


def joined(parts: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
    """Join the outputs of all parts, without copies of samples."""
    whole = torch.cat([*parts])
    return whole if len(whole) == samples else whole[:samples]
