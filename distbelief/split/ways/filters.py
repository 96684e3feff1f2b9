"""Filters: convolutions by the maps that they give; of one with groups, each partition has some groups, or part of
one.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from distbelief.errors import UsageError
from distbelief.split.layers import Divided, Indices, NodeShare, edges, part_of
from distbelief.split.registry import LayerCall, register

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def filters(call: LayerCall) -> Divided:
    """Each partition has some filters and gives their maps; it needs the maps that they look at.

    Raises:
        UsageError: there are fewer filters than partitions, or groups that cannot be shared out among them.
    """
    layer = call.layer
    assert isinstance(layer, CONVOLUTIONS)
    bounds = _bounds(call, layer)
    each, looks = layer.out_channels // layer.groups, layer.in_channels // layer.groups
    parts = []
    for start, stop in pairwise(bounds):
        first, last = start // each, (stop - 1) // each
        groups = last - first + 1
        takes = Indices(1, first * looks, (last + 1) * looks)
        outputs = Indices(0, start, stop)
        holds = {name: outputs for name, _ in layer.named_parameters()}
        part = part_of(layer, holds, in_channels=groups * looks, out_channels=stop - start, groups=groups)
        parts.append(NodeShare((takes,), Indices(1, start, stop), part, holds))
    return Divided(tuple(parts), 1, bounds)


def _bounds(call: LayerCall, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    if layer.out_channels < call.partitions:
        raise call.refuse("filters", layer.out_channels)
    each = layer.out_channels // layer.groups
    if call.partitions <= layer.groups:
        return tuple(group * each for group in edges(layer.groups, call.partitions))
    if call.partitions % layer.groups or each < call.partitions // layer.groups:
        raise UsageError(
            f"--partitions {call.partitions}: {call.path} has {layer.groups} groups of {each} filters; split it over "
            f"{layer.groups} or fewer, or over a multiple of that"
        )
    inside = edges(each, call.partitions // layer.groups)
    return (*(group * each + cut for group in range(layer.groups) for cut in inside[:-1]), layer.out_channels)


for kind in CONVOLUTIONS:
    register(kind, "filters", filters)
    register(kind, "groups", filters)
