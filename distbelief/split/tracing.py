"""Traces of models as graphs by torch.fx; modules that cannot be traced stay whole."""

from __future__ import annotations

import contextlib
import inspect
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from distbelief.errors import UsageError, unknown
from distbelief.split.observing import NodeValues
from distbelief.split.registry import ways_of
from distbelief.split.tidying import Shape, tidy

OURS = Path(__file__).parent
EXAMPLES = 2


def examples(samples: int) -> torch.Tensor:
    """Return the numbers of the samples for tracing; a single sample repeats."""
    return torch.arange(EXAMPLES) % samples


@dataclass(frozen=True)
class Traced:
    """Model as a graph whose nodes give one tensor each, or are followed by nodes that take tensors out of them.

    Sizes are functions of the number of samples, so that no number passes between nodes, and no node writes in place.
    """

    model: nn.Module
    graph: fx.Graph
    """Graph with a placeholder for each input leaf, `samples` first; `node.meta["path"]` is a node's module."""
    shapes: Mapping[fx.Node, Shape]
    listed: bool
    """True if consecutive modules were named, to run one after the other."""
    aliases: Mapping[str, str]
    """Map from each tied tensor's other names to its first name."""
    samples: int
    copied: bool
    """True if tracing copied the model with all its values."""

    @property
    def told(self) -> str:
        """Return a note on the cost of tracing, to append to another note; "" without one."""
        return "; each partition copied the whole model in memory, as tracing needed its values" * self.copied

    @property
    def layers(self) -> list[fx.Node]:
        """Return the nodes that call a module, in order."""
        return [node for node in self.graph.nodes if node.op == "call_module"]

    def layer(self, node: fx.Node) -> nn.Module:
        """Return the module that a node calls."""
        return self.model.get_submodule(str(node.target))

    def called(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls, if it calls one."""
        return self.layer(node) if node.op == "call_module" else None


def trace(model: nn.Module, inputs: tuple[object, ...], modules: Sequence[str] = ()) -> Traced:
    """Return the graph of a model, valid for any number of samples.

    Args:
        model: model in the intended mode (training or not); parameters may be on the meta device.
        inputs: arguments of its forward in order, keyword-only ones last: tensors, or tuples, lists and dicts of them,
            with samples in dimension 0.
        modules: submodules to run one after the other instead of the forward.

    Raises:
        UsageError: it cannot be traced; the message names the line of the model that failed, and the remedy.

    >>> traced = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.zeros(2, 4),))
    >>> [node.meta["path"] for node in traced.layers], traced.shapes[traced.layers[0]].at(5)
    (['0', '1'], (5, 3))
    """
    if not any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in pytree.tree_leaves(inputs)):
        raise UsageError(f"inputs {pytree.tree_map(type, inputs)}: give a tensor with samples in its first dimension")
    if modules:
        known = dict(model.named_modules())
        for name in modules:
            if name not in known:
                raise unknown("module", name, known)
    leaves, real = set(modules), False
    while True:
        tracer = _Tracer(leaves, NodeValues(model, inputs, real), modules)
        try:
            with _buffers_kept():
                graph, shapes = tidy(tracer.trace(model), tracer.values, model.get_submodule)
        except Exception as error:  # a model's forward may raise anything under a tracer
            if tracer.uncomputed and not real and not any(tensor.is_meta for tensor in _tensors(model)):
                real = True  # some nodes depend on values, which fake tensors lack
            elif tracer.within and tracer.within[-1] not in leaves and not tracer.uncomputed:
                leaves.add(tracer.within[-1])
            else:
                raise UsageError(_told(model, error)) from error
        else:
            return Traced(model, graph, shapes, bool(modules), _aliases(model), tracer.values.samples, real)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _aliases(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return aliases


FACTORIES = (torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.linspace, torch.eye, torch.rand,
             torch.randn, torch.randint)  # fmt: skip
"""Functions that create tensors from numbers alone; torch.fx sees them only if they are wrapped."""


class _Proxy(fx.Proxy):
    """Stand-in that may be a number of the model, if it is the same for any samples, and can be written to."""

    def __index__(self) -> int:
        return int(self._known())

    def __len__(self) -> int:
        first, second = map(len, self._values().of(self.node))
        if first != second:
            raise fx.proxy.TraceError("the number of samples has no len(): take it by size(0) or shape[0]")
        return first

    def __setitem__(self, index: object, value: object) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def _values(self) -> NodeValues:
        assert isinstance(self.tracer, _Tracer)
        return self.tracer.values

    def _known(self) -> Any:
        values = self._values()
        if values.is_tensor(self.node) or self.node in values.varying:
            raise fx.proxy.TraceError(f"{self.node.name} depends on values, or on the number of samples")
        return values.of(self.node)[0]


# torch.fx runs the forward with stand-ins for tensors, and records their operations. Computing each node at once lets
# its number steer the forward if it is the same for any samples, which torch.fx alone would refuse. Modules of torch
# and those that a way divides stay whole; so does a module in which tracing fails.
class _Tracer(fx.Tracer):
    """Tracer that computes each node when it is created."""

    proxy_buffer_attributes = True  # otherwise computations on buffers alone would become constants

    def __init__(self, leaves: set[str], values: NodeValues, modules: Sequence[str]) -> None:
        super().__init__(autowrap_functions=FACTORIES)
        self._autowrap_search.append(torch)
        self._leaves, self._modules = leaves, modules
        self.values = values
        self.within: list[str] = []
        """Modules that are being traced; after a failure, the failing one is last."""
        self.uncomputed = False
        self._computing = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self._leaves
            or bool(ways_of(m))
            or super().is_leaf_module(m, module_qualified_name)
        )

    def create_args_for_root(
        self, root_fn: Callable[..., object], is_module: bool, concrete_args: object = None
    ) -> tuple[Callable[[], object], list[object]]:
        leaves, spec = pytree.tree_flatten(self.values.inputs)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[number] = self.create_proxy("placeholder", f"input_{number}", (), {})
        placed, named = _by_place(root_fn, pytree.tree_unflatten(leaves, spec))

        def run() -> object:
            if not self._modules:
                return root_fn(self.root, *placed, **named)
            value = placed[0]
            for name in self._modules:
                value = self.root.get_submodule(name)(value)
            return value

        return run, []

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self._computing:
            return forward(*args, **kwargs)
        self.within.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.within.pop()
        return result

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]) -> object:
        return attr_val if self._computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        node.meta["path"] = self.within[-1] if self.within else ""
        if kind != "output":
            self._computing = self.uncomputed = True
            self.values.compute(node)
            self._computing = self.uncomputed = False
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        assert isinstance(obj, _Proxy)
        return bool(obj._known())

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        if self.values.is_tensor(obj.node):
            return super().iter(obj)
        return (obj[number] for number in range(len(obj)))  # type: ignore[index]  # every stand-in can be indexed


@contextlib.contextmanager
def _buffers_kept() -> Iterator[None]:
    """Refuse the assignment of a new buffer during tracing.

    torch.fx would leave its proxy in the model, and a partition would compute with a copy of the layer.
    """
    plain = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if module._buffers.get(name, value) is not value:
            raise UsageError(f"buffer {name!r} is replaced by assignment: write it in place, self.{name}.copy_(...)")
        plain(module, name, value)

    nn.Module.__setattr__ = assign  # type: ignore[assignment]  # as torch.fx does with __getattr__ and __call__
    try:
        yield
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]  # restores the original


def _by_place(
    forward: Callable[..., object], inputs: tuple[object, ...]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the positional arguments after the module itself, and the keyword-only ones."""
    parameters = inspect.signature(forward).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    places = sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )
    count = places - 1 if named else len(inputs)
    return inputs[:count], dict(zip(named, inputs[count:], strict=False))


def _told(model: nn.Module, failure: BaseException) -> str:
    """Return an error message: the failing line of the model's own code, the reason and the remedy."""
    kind, where = type(model).__name__, ""
    for frame in traceback.extract_tb(failure.__traceback__):
        path = Path(frame.filename)
        if not path.is_relative_to(OURS) and not {"torch", "<string>"} & set(path.parts):
            where = f" at {frame.filename}:{frame.lineno}: {frame.line}"
    reason = str(failure).strip().split("\n")[0]
    if isinstance(failure, UsageError):  # this error's message already names the remedy
        return f"{kind} cannot be traced{where}: {reason}"
    return (
        f"{kind} cannot be traced{where} ({type(failure).__name__}: {reason}); put code that depends on values, "
        "or on the number of samples, into its own module, or name consecutive modules (Split(..., modules=[...]))"
    )
