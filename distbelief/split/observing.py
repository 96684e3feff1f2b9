"""Values of a graph's nodes for two numbers of samples, computed from shapes alone if possible."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode


class SampleRun(fx.Interpreter):
    """Computation of nodes on a copy of a model, with a number of samples."""

    def __init__(self, model: nn.Module, inputs: tuple[object, ...], real: bool) -> None:
        self._mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        super().__init__(self._copied(model), garbage_collect_values=False, graph=fx.Graph())
        self._constants = model
        self._inputs = iter([leaf if real else self._fake(leaf) for leaf in tensors_of(inputs)])

    def _copied(self, model: nn.Module) -> nn.Module:
        memo: dict[int, object] = {}
        if self._mode is not None:
            for parameter in model.parameters():
                memo[id(parameter)] = nn.Parameter(self._fake(parameter.detach()), parameter.requires_grad)
            for buffer in model.buffers():
                memo[id(buffer)] = self._fake(buffer)
        return copy.deepcopy(model, memo)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._mode is not None
        return self._mode.from_tensor(tensor)

    def fetch_attr(self, target: str) -> Any:
        """Return an attribute of the model; tensors added by tracing are on the original model."""
        held = hasattr(self.module, target.partition(".")[0])
        return super().fetch_attr(target) if held else getattr(self._constants, target)

    def compute(self, node: fx.Node) -> None:
        """Compute a node from the values before it; placeholders take the input tensors in order."""
        if node.op == "placeholder":
            self.env[node] = next(self._inputs)
            return
        with torch.random.fork_rng(devices=[]) if self._mode is None else self._mode:
            self.env[node] = self.run_node(node)


@dataclass
class NodeValues:
    """Values of each node with a number of samples, and with one more."""

    model: nn.Module
    inputs: tuple[object, ...]
    real: bool
    flops: dict[fx.Node, int] = field(default_factory=dict)
    """Floating-point operations of each node's forward, with the first number of samples."""
    varying: set[fx.Node] = field(default_factory=set)
    """Nodes whose numbers depend on the number of samples, or on values."""

    def __post_init__(self) -> None:
        self.samples = next(len(leaf) for leaf in tensors_of(self.inputs) if leaf.ndim)
        more = pytree.tree_map(self._with_one_more, self.inputs)
        self.runs = SampleRun(self.model, self.inputs, self.real), SampleRun(self.model, more, self.real)

    def _with_one_more(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != self.samples:
            return leaf
        return torch.cat([leaf, leaf[:1]])

    def compute(self, node: fx.Node) -> None:
        """Compute a node, and raise its error; without values some nodes cannot be computed."""
        first, second = self.runs
        with FlopCounterMode(display=False) as counter:
            first.compute(node)
        self.flops[node] = counter.get_total_flops()
        second.compute(node)
        if self.varies(node):
            self.varying.add(node)

    def of(self, node: fx.Node) -> tuple[Any, Any]:
        """Return both values of a node."""
        first, second = self.runs
        return first.env[node], second.env[node]

    def is_tensor(self, node: fx.Node) -> bool:
        """Return whether a node gives a tensor."""
        return isinstance(self.runs[0].env[node], torch.Tensor)

    def varies(self, node: fx.Node) -> bool:
        """Return whether a number may differ with other samples."""
        first, second = self.of(node)
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(first)):
            return False
        source = node.args[0] if node.target is operator.getitem else node
        if isinstance(source, fx.Node) and name_of(source) in SIZES:
            return bool(first != second)  # a tensor's sides are linear in the number of samples
        return bool(first != second) or any(
            input_node in self.varying or self.is_tensor(input_node) for input_node in node.all_input_nodes
        )


def tensors_of(inputs: tuple[object, ...]) -> list[torch.Tensor]:
    """Return the tensors of some inputs in order."""
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


SIZES = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "len", "__len__", "getattr",
})  # fmt: skip
"""Functions whose numbers depend on a tensor's shape or type, and not on its values."""


def name_of(node: fx.Node) -> str:
    """Return the name of a node's function or method, without overloads."""
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]
