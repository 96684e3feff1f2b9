"""Convolutions by filters, and convolutions and pooling by regions of the image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from distbelief.errors import UsageError
from distbelief.split.layers import Divided, Indices, NodeShare, edges, part_of
from distbelief.split.registry import LayerCall, register

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def filters(call: LayerCall) -> Divided:
    """Give each partition some filters with their groups' inputs; a group's filters may be divided."""
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


ROWS = 2
"""Dimension of images' rows: samples, channels, rows, columns."""


def regions(call: LayerCall) -> Divided:
    """Give each partition some rows of a convolution's output; one partition owns the filters and sends them."""
    layer = call.layer
    assert isinstance(layer, nn.Conv2d)
    if layer.padding_mode != "zeros":
        raise UsageError(f"{call.path}: padding_mode={layer.padding_mode!r} is not for regions, which need zeros")
    before, aside = _padding(layer, call.path)
    parts = []
    names = [name for name, _ in layer.named_parameters()]
    for partition, bounds, need in _windows(call, layer.kernel_size[0], layer.stride[0], before, layer.dilation[0]):
        holds: dict[str, Indices | None] = dict.fromkeys(names)
        part = part_of(layer, holds, padding=(0, aside))
        owned = partition == call.owner
        parts.append(NodeShare((need,), bounds, part, holds if owned else {}, borrows=() if owned else tuple(names)))
    return Divided(tuple(parts), ROWS, edges(call.gives.fixed[ROWS], call.partitions))


def pooled(call: LayerCall) -> Divided | None:
    """Give each partition some rows of pooling's output; None if windows differ."""
    layer = call.layer
    if not isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
        return None
    size, step, before = (_first(side) for side in (layer.kernel_size, layer.stride, layer.padding))
    spread = _first(layer.dilation) if isinstance(layer, nn.MaxPool2d) else 1
    aside = layer.padding if isinstance(layer.padding, int) else layer.padding[1]
    if isinstance(layer, nn.AvgPool2d) and (before and not layer.count_include_pad):
        return None
    if layer.ceil_mode or call.gives.fixed[ROWS] < call.partitions:
        return None
    fill = float("-inf") if isinstance(layer, nn.MaxPool2d) else 0.0
    parts = [
        NodeShare((need,), bounds, part_of(layer, {}, padding=(0, aside)), fill=fill)
        for _, bounds, need in _windows(call, size, step, before, spread)
    ]
    return Divided(tuple(parts), ROWS, edges(call.gives.fixed[ROWS], call.partitions))


def _windows(call: LayerCall, size: int, step: int, before: int, spread: int) -> Sequence[tuple[int, Indices, Indices]]:
    """Return each partition's rows of the output, and the rows that it needs; those outside are padding."""
    rows = call.gives.fixed[ROWS]
    if rows < call.partitions:
        raise call.refuse("rows", rows)
    windows = []
    for partition, (start, stop) in enumerate(pairwise(edges(rows, call.partitions))):
        need = Indices(ROWS, start * step - before, (stop - 1) * step - before + (size - 1) * spread + 1)
        windows.append((partition, Indices(ROWS, start, stop), need))
    return windows


def _padding(layer: nn.Conv2d, path: str) -> tuple[int, int]:
    if layer.padding == "valid":
        return 0, 0
    if isinstance(layer.padding, str):
        above, aside = ((size - 1) * spread for size, spread in zip(layer.kernel_size, layer.dilation, strict=True))
        if aside % 2:
            raise UsageError(f"{path}: padding='same' of an even kernel differs between its sides; name the padding")
        return above // 2, aside // 2
    above, aside = layer.padding[0], layer.padding[1]
    return above, aside


def _first(value: int | Sequence[int]) -> int:
    return int(value if isinstance(value, int) else value[0])


register(nn.Conv2d, "regions", regions)
