"""Observing: what flows along each node of a graph, by runs on two numbers of samples, without values if possible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

Values = dict[fx.Node, object]


@dataclass(frozen=True)
class NodeValues:
    """Values that each node gave for two numbers of samples."""

    samples: tuple[int, int]
    values: tuple[Values, Values]
    flops: dict[fx.Node, int]
    """Floating-point operations of each node's forward, at the first number of samples."""
    real: bool
    """True if tensors had values, on which numbers may depend."""


def observe(
    model: nn.Module, graph: fx.Graph, inputs: tuple[object, ...], copying: Callable[[], None] = lambda: None
) -> NodeValues:
    """Run a graph on as many samples as there are, and on one more.

    Args:
        model: where the modules and tensors are that the graph names.
        graph: its graph.
        inputs: of the model.
        copying: is called before the model is copied with all its values, which is where it does not run without.

    Raises:
        Exception: whatever the model raises; among others where its graph holds for one number of samples only.
    """
    try:
        return _observe(model, graph, inputs, _fake)
    except Exception:  # what depends on values has none to depend on
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise
        copying()
        return _observe(model, graph, inputs, _real)


Copied = tuple[nn.Module, tuple[object, ...], AbstractContextManager[object]]
"""A model, its inputs, and what they are computed in."""
Copy = Callable[[nn.Module, tuple[object, ...]], Copied]


def _observe(model: nn.Module, graph: fx.Graph, inputs: tuple[object, ...], make: Copy) -> NodeValues:
    count = next(len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    runs: list[Values] = []
    flops: dict[fx.Node, int] = {}
    for samples in (count, count + 1):
        held, example, mode = make(model, _resized(inputs, count, samples))
        with mode:
            recorder = _Recorder(held, graph, flops)
            recorder.run(*_arguments(graph, example), enable_io_processing=False)
        runs.append(recorder.seen)
    return NodeValues((count, count + 1), (runs[0], runs[1]), flops, make is _real)


def _arguments(graph: fx.Graph, inputs: tuple[object, ...]) -> list[object]:
    """Return what the placeholders are given: each an argument, or each a leaf of the arguments."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    leaves = (
        list(inputs)
        if isinstance(graph._codegen, fx.graph.CodeGen) and not hasattr(graph._codegen, "pytree_info")
        else pytree.tree_leaves(inputs)
    )
    return leaves + [node.args[0] for node in placeholders[len(leaves) :]]


class _Recorder(fx.Interpreter):
    """Keeps what every node gives, and counts what it computes."""

    def __init__(self, model: nn.Module, graph: fx.Graph, flops: dict[fx.Node, int]) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self.seen: Values = {}
        self._flops = flops

    def run_node(self, n: fx.Node) -> object:
        with FlopCounterMode(display=False) as counter:
            self.seen[n] = super().run_node(n)
        self._flops.setdefault(n, counter.get_total_flops())
        return self.seen[n]


def _resized(inputs: tuple[object, ...], count: int, samples: int) -> tuple[object, ...]:
    def resize(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != count or samples == count:
            return leaf
        return torch.cat([leaf, leaf[: samples - count]])

    resized: tuple[object, ...] = pytree.tree_map(resize, inputs)
    return resized


def _fake(model: nn.Module, inputs: tuple[object, ...]) -> Copied:
    """A copy of a model and its inputs that has shapes and no values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer)

    def fake(leaf: object) -> object:
        return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    fakes: tuple[object, ...] = pytree.tree_map(fake, inputs)
    return copy.deepcopy(model, memo), fakes, mode


def _real(model: nn.Module, inputs: tuple[object, ...]) -> Copied:
    """A copy with values, whose buffers may change."""
    return copy.deepcopy(model), inputs, torch.random.fork_rng(devices=[])
