"""Neurons: fully connected layers by outputs (columns) or inputs (rows), in pairs if that saves a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx, nn

from distbelief.split.layers import Divided, Indices, NodeShare, edges, part_of
from distbelief.split.registry import LayerCall, register
from distbelief.split.tracing import Traced
from distbelief.split.ways.following import is_elementwise

SMALL = 0.02
"""Share of all parameters below which a layer without a partner stays whole at partition 0."""


def columns(call: LayerCall) -> Divided:
    """Give each partition some neurons; all need the whole input."""
    layer = _linear(call)
    if layer.out_features < call.partitions:
        raise call.refuse("neurons", layer.out_features)
    names = dict.fromkeys((name for name, _ in layer.named_parameters()), 0)
    last = len(call.gives.fixed) - 1
    return call.sections(last, lambda *_: None, names, lambda start, stop: {"out_features": stop - start})


def rows(call: LayerCall) -> Divided:
    """Give each partition the weights of some inputs; the outputs are summed."""
    layer = _linear(call)
    if layer.in_features < call.partitions:
        raise call.refuse("inputs", layer.in_features)
    bounds, last = edges(layer.in_features, call.partitions), len(call.takes[0].fixed) - 1
    parts = []
    for partition, (start, stop) in enumerate(pairwise(bounds)):
        holds: dict[str, Indices | None] = {"weight": Indices(1, start, stop)}
        if partition == 0 and layer.bias is not None:  # the sum needs the bias once
            holds["bias"] = None
        part = part_of(layer, holds, in_features=stop - start)
        parts.append(NodeShare((Indices(last, start, stop),), None, part, holds))
    return Divided(tuple(parts), None)


def _linear(call: LayerCall) -> nn.Linear:
    assert isinstance(call.layer, nn.Linear)
    return call.layer


def pairs(traced: Traced, nodes: Sequence[fx.Node]) -> dict[fx.Node, str | int]:
    """Choose columns or rows for each layer, or (an int) the partition where it stays whole.

    Rows take the output of columns in place if only elementwise operations lie between: one transfer instead of two.
    """
    partitions: dict[fx.Node, str | int] = {}
    total = sum(parameter.numel() for parameter in traced.model.parameters())
    for node in nodes:
        if node in partitions:
            continue
        partner = _partner(traced, node)
        elements = sum(parameter.numel() for parameter in traced.layer(node).parameters())
        if partner in nodes and partner not in partitions:
            partitions[node], partitions[partner] = "columns", "rows"
        else:
            partitions[node] = "columns" if elements >= SMALL * total else 0
    return partitions


def _partner(traced: Traced, node: fx.Node) -> fx.Node:
    """Return the next node that is not elementwise, if nothing else uses the values between."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if not is_elementwise(traced, node) or len(node.all_input_nodes) > 1:
            break
    return node


register(nn.Linear, "columns", columns)
register(nn.Linear, "rows", rows)
register(nn.Linear, "groups", columns)
