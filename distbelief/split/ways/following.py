"""Following: operations that work on parts as on the whole: elementwise, pooling, flattening, channels' batch norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import fx, nn

from distbelief.split.layers import Cut, Divided, DroppedShare, Indices, NodeShare, draws
from distbelief.split.observing import name_of
from distbelief.split.registry import LayerCall
from distbelief.split.tidying import Shape
from distbelief.split.tracing import Traced
from distbelief.split.ways.convolutions import ROWS, pooled

_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Identity, nn.Threshold,
    nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Dropout, DroppedShare,
)  # fmt: skip
_ELEMENTWISE_FUNCTIONS = frozenset({
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "softplus",
    "softsign", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "threshold", "add", "sub", "mul", "truediv",
    "div", "true_divide", "neg", "exp", "log", "log1p", "abs", "sqrt", "rsqrt", "square", "pow", "clamp", "clone",
    "contiguous", "float", "double", "half", "detach", "maximum", "minimum",
})  # fmt: skip
_POOLING = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.LPPool1d, nn.LPPool2d,
)  # fmt: skip
_POOLING_FUNCTIONS = frozenset({
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d",
})  # fmt: skip
_FLATTENING_FUNCTIONS = frozenset(("flatten", "view", "reshape"))
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _is(traced: Traced, node: fx.Node, kinds: tuple[type, ...], names: frozenset[str]) -> bool:
    if node not in traced.shapes:
        return False
    if node.op == "call_module":
        return type(traced.layer(node)) in kinds
    return node.op in ("call_function", "call_method") and name_of(node) in names


def is_elementwise(traced: Traced, node: fx.Node) -> bool:
    """Return whether each output element depends only on the same elements of the inputs."""
    return _is(traced, node, _ELEMENTWISE, _ELEMENTWISE_FUNCTIONS)


def follow(traced: Traced, node: fx.Node, cuts: Sequence[Cut | None]) -> Divided | None:
    """Return how a node computes on parts of its inputs; None if it needs a whole one."""
    cut = next(known for known in cuts if known is not None)
    takes = [traced.shapes[input_node] for input_node in node.all_input_nodes if input_node in traced.shapes]
    if node not in traced.shapes or len(takes) != len(node.all_input_nodes):
        return None
    gives = traced.shapes[node]
    if is_elementwise(traced, node):
        return _elementwise(traced, node, cut, takes, gives)
    if len(takes) == 1 and cut.dimension == ROWS and node.op == "call_module":
        partitions = len(cut.edges) - 1
        return pooled(LayerCall(traced.layer(node), node.meta["path"], (takes[0],), gives, partitions, 0))
    if len(takes) != 1 or cut.dimension != 1:
        return None
    if _is(traced, node, _POOLING, _POOLING_FUNCTIONS):
        return _alike(cut) if len(gives.fixed) > 2 else None
    if _is(traced, node, (nn.Flatten,), _FLATTENING_FUNCTIONS):
        return _flat(cut, takes[0], gives)
    if node.op == "call_module" and type(layer := traced.layer(node)) in _BATCH_NORMS:
        return _batch_norm(layer, cut)
    return None


def _alike(cut: Cut, make: Callable[[Indices], nn.Module] | None = None) -> Divided:
    parts = [Indices(cut.dimension, *bounds) for bounds in pairwise(cut.edges)]
    shares = tuple(NodeShare((indices,), indices, make(indices) if make else None) for indices in parts)
    return Divided(shares, cut.dimension, cut.edges)


def _elementwise(traced: Traced, node: fx.Node, cut: Cut, takes: Sequence[Shape], gives: Shape) -> Divided | None:
    """Cut an elementwise node; dimensions count from the last, and broadcast inputs stay whole."""
    behind = next(len(shape.fixed) - cut.dimension for shape in takes if _side(shape, cut.dimension) == cut.edges[-1])
    at = len(gives.fixed) - behind
    layer = traced.called(node)
    if draws(node, layer):
        if not isinstance(layer, nn.Dropout):
            return None
        share = layer.share if isinstance(layer, DroppedShare) else (0, 1)
        return _alike(cut, lambda indices: DroppedShare(layer.p, share, indices, cut.edges[-1]))
    parts = []
    for start, stop in pairwise(cut.edges):
        needs = []
        for shape in takes:
            dimension = len(shape.fixed) - behind
            broadcast = dimension < 0 or (shape.growth[dimension] == 0 and shape.fixed[dimension] == 1)
            needs.append(None if broadcast else Indices(dimension, start, stop))
        parts.append(NodeShare(tuple(needs), Indices(at, start, stop)))
    return Divided(tuple(parts), at, cut.edges)


def _side(shape: Shape, dimension: int) -> int:
    return shape.fixed[dimension] if dimension < len(shape.fixed) and not shape.growth[dimension] else -1


def _flat(cut: Cut, takes: Shape, gives: Shape) -> Divided | None:
    """Flatten all but the samples, so that each channel becomes a run."""
    each = math.prod(takes.fixed[2:])
    same = len(gives.fixed) == 2 and not any(takes.growth[1:]) and gives.growth[0] == takes.growth[0]
    if not same or gives.fixed[1] != takes.fixed[1] * each:
        return None
    bounds = tuple(edge * each for edge in cut.edges)
    parts = [
        NodeShare((Indices(1, *side),), Indices(1, *run), call=flatten)
        for side, run in zip(pairwise(cut.edges), pairwise(bounds), strict=True)
    ]
    return Divided(tuple(parts), 1, bounds)


def flatten(value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Flatten all dimensions but the first, whatever sizes the node names."""
    return value.flatten(1)


def _batch_norm(layer: nn.Module, cut: Cut) -> Divided:
    assert isinstance(layer, _BATCH_NORMS)
    parts = []
    for partition, (start, stop) in enumerate(pairwise(cut.edges)):
        features = Indices(1, start, stop)
        part = type(layer)(
            stop - start, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, dtype=_dtype(layer)
        )
        names = ("weight", "bias", "running_mean", "running_var")
        holds: dict[str, Indices | None] = {name: Indices(0, start, stop) for name in names}
        if partition == 0:  # each partition counts batches, but the state has only one count
            holds["num_batches_tracked"] = None
        parts.append(NodeShare((features,), features, part, holds))
    return Divided(tuple(parts), 1, cut.edges)


def _dtype(layer: nn.Module) -> torch.dtype | None:
    return next((t.dtype for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()), None)
