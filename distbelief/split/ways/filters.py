"""Filters: convolutions by the maps that they give; of one with groups, each partition has some groups, or part of
one.
"""

from __future__ import annotations

from torch import nn

from distbelief.errors import UsageError
from distbelief.split.layers import Divided, edges
from distbelief.split.registry import LayerCall, register

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def filters(call: LayerCall) -> Divided:
    """Each partition has some filters and gives their maps; it needs the maps that they look at.

    Raises:
        UsageError: there are fewer filters than partitions, or groups that cannot be shared out among them.
    """
    layer = call.layer
    assert isinstance(layer, CONVOLUTIONS)
    each, looks = layer.out_channels // layer.groups, layer.in_channels // layer.groups

    def seen(start: int, stop: int) -> tuple[int, int, int]:
        return 1, start // each * looks, ((stop - 1) // each + 1) * looks

    def changed(start: int, stop: int) -> dict[str, int]:
        groups = (stop - 1) // each - start // each + 1
        return {"in_channels": groups * looks, "out_channels": stop - start, "groups": groups}

    names = dict.fromkeys((name for name, _ in layer.named_parameters()), 0)
    return call.sections(1, seen, names, changed, _bounds(call, layer))


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
