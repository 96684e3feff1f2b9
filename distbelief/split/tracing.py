"""Tracing: a model as a graph, by torch.fx, where some modules stay whole, torch.export, or a list of modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from distbelief.errors import UsageError, unknown
from distbelief.split.observing import observe
from distbelief.split.registry import ways_of
from distbelief.split.tidying import Shape, tidy

OURS = Path(__file__).parent
EXAMPLES = 2
"""Samples that a model is traced with."""


def examples(samples: int) -> torch.Tensor:
    """The numbers of the samples that a model is traced with, of so many: a single one is taken again.

    >>> examples(60000), examples(1)
    (tensor([0, 1]), tensor([0, 0]))
    """
    return torch.arange(EXAMPLES) % samples


class TracedBy(Enum):
    """Method by which a model was traced."""

    FX = "torch.fx"
    EXPORT = "torch.export"
    MODULES = "a list of modules"


@dataclass(frozen=True)
class Traced:
    """A model as a graph in which each node gives one tensor, or is followed by those that take its tensors out of it.

    Sizes are functions of the number of samples, so that no number goes from node to node, and nothing is written in
    place.
    """

    model: nn.Module
    """Module with the modules and tensors that the graph names."""
    graph: fx.Graph
    """A placeholder for each leaf of the inputs, `samples` first; `node.meta["path"]` is the module of a node."""
    shapes: Mapping[fx.Node, Shape]
    """Shapes of the nodes that give tensors."""
    method: TracedBy
    aliases: Mapping[str, str]
    """Names of tied tensors, to the first name of each."""
    samples: int
    """Samples that it was traced with, of which each node counts its operations."""
    copied: bool
    """True if it has been copied to be traced, with all its values."""

    @property
    def told(self) -> str:
        """Say what tracing it took, behind what else is said of its partitions; "" where there is nothing to say."""
        return "; each partition copied the whole model in memory to trace it, which takes its values" * self.copied

    @property
    def layers(self) -> list[fx.Node]:
        """The nodes that call a module, in order."""
        return [node for node in self.graph.nodes if node.op == "call_module"]

    def layer(self, node: fx.Node) -> nn.Module:
        """The module that a node calls."""
        return self.model.get_submodule(str(node.target))


def trace(model: nn.Module, inputs: tuple[object, ...], modules: Sequence[str] = ()) -> Traced:
    """The graph of a model, which holds for any number of samples.

    Args:
        model: in the mode (training or not) that is wanted; its parameters may be on the meta device.
        inputs: the arguments of its forward, in the order in which it names them, those that have no place last:
            tensors, or tuples, lists and dicts of them, with samples in dimension 0.
        modules: instead of tracing it, run these submodules one after the other, each on what the one before gives.

    Raises:
        UsageError: it cannot be traced: with the line of the model at which that failed, and the remedy.

    >>> traced = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.zeros(2, 4),))
    >>> [node.meta["path"] for node in traced.layers], traced.shapes[traced.layers[0]].at(5)
    (['0', '1'], (5, 3))
    """
    if not any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in pytree.tree_leaves(inputs)):
        raise UsageError(f"inputs {pytree.tree_map(type, inputs)}: give a tensor with samples in its first dimension")
    failures: list[BaseException] = []
    copies: list[TracedBy] = []
    ways: list[tuple[TracedBy, Callable[[], tuple[nn.Module, fx.Graph]]]] = [
        (TracedBy.FX, lambda: _by_fx(model, inputs)),
        (TracedBy.EXPORT, lambda: _by_export(model, inputs, functional=False)),
        (TracedBy.EXPORT, lambda: _by_export(model, inputs, functional=True)),
    ]
    if modules:
        ways = [(TracedBy.MODULES, lambda: _by_modules(model, modules))]
    for method, make in ways:
        try:
            with _buffers_kept():
                root, graph = make()
                values = observe(root, graph, inputs, functools.partial(copies.append, method))
            tidied, shapes = tidy(graph, inputs, values, root.get_submodule)
        except Exception as error:  # whatever a model's forward raises when it is run by a tracer
            if modules and isinstance(error, UsageError):
                raise
            failures.append(error)
        else:
            return Traced(root, tidied, shapes, method, _aliases(model), values.samples[0], bool(copies))
    raise UsageError(_told(model, failures)) from failures[-1]


def _aliases(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return aliases


class _Tracer(fx.Tracer):
    """Leaves some modules whole, and knows in which module it is."""

    proxy_buffer_attributes = True  # or what a model computes of buffers alone is a constant, and written to them once

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self._leaves = leaves
        self.within: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self._leaves
            or bool(ways_of(m))
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        self.within.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.within.pop()
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["path"] = self.within[-1] if self.within else ""
        return node


def _by_fx(model: nn.Module, inputs: tuple[object, ...]) -> tuple[nn.Module, fx.Graph]:
    """Trace by fx. Modules that cannot be traced become leaves, from the inside out, until the rest can."""
    leaves: set[str] = set()
    while True:
        tracer = _Tracer(leaves)
        try:
            return model, tracer.trace(model, concrete_args=_defaults(model, inputs))
        except Exception:
            if not tracer.within or tracer.within[-1] in leaves:
                raise
            leaves.add(tracer.within[-1])


@contextlib.contextmanager
def _buffers_kept() -> Iterator[None]:
    """Refuse to assign a buffer anew while a model is traced: torch.fx leaves its own proxy in the model, torch.export
    forgets it where it is of a submodule, and a home computes with a copy of a layer.
    """
    plain = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if module._buffers.get(name, value) is not value:
            raise UsageError(f"buffer {name!r} is assigned anew: write it in place, self.{name}.copy_(...)")
        plain(module, name, value)

    nn.Module.__setattr__ = assign  # type: ignore[assignment]  # as torch.fx does with __getattr__ and __call__
    try:
        yield
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]  # its own again


def _defaults(model: nn.Module, inputs: tuple[object, ...]) -> dict[str, object] | None:
    """The arguments of forward that are not given, with their defaults."""
    left = list(inspect.signature(model.forward).parameters.values())[len(inputs) :]
    return {parameter.name: parameter.default for parameter in left if parameter.default is not parameter.empty} or None


def _by_place(model: nn.Module, inputs: tuple[object, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments that have a place, and those that have a name only."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    places = sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )
    count = places if named else len(inputs)
    return inputs[:count], dict(zip(named, inputs[count:], strict=False))


def _by_export(model: nn.Module, inputs: tuple[object, ...], functional: bool) -> tuple[nn.Module, fx.Graph]:
    samples = next(len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim)

    def dynamic(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return None
        # what would hold for one number of samples only is an error, and not taken for such
        return {0: torch.export.Dim.DYNAMIC if len(leaf) == samples else torch.export.Dim.AUTO}

    shapes = pytree.tree_map(dynamic, inputs)
    with warnings.catch_warnings(), _silenced():
        warnings.simplefilter("ignore")  # of what torch itself deprecates, and of what its own layers set
        placed, named = _by_place(model, inputs)
        program = torch.export.export(model, placed, named, dynamic_shapes=shapes, strict=False)
        module = (program.run_decompositions({}) if functional else program).module()
    assert isinstance(module, fx.GraphModule)
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
            continue
        if node.target is torch.ops.aten.copy.default:
            node.target = copied
        stack = node.meta.get("nn_module_stack", {})
        node.meta["path"] = next((path for path, _ in reversed(list(stack.values())) if not path.startswith("_")), "")
    spec = graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]  # export's graphs have one
    output = next(iter(reversed(graph.nodes)))
    output.args = (pytree.tree_unflatten(list(output.args[0]), spec),)
    root = nn.Module()  # what the graph names, without what exporting adds
    for name, held in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set") or torch.is_tensor(held):
            vars(root)[name] = held
    root._modules.pop("_guards_fn", None)
    return root, graph


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep torch from showing, beside its error, the graph of a model that it cannot export."""
    from torch.export import _trace
    from torch.fx.experimental import symbolic_shapes

    loggers = [logger for logger in (_trace.log, symbolic_shapes.log) if not logger.disabled]
    with contextlib.redirect_stderr(io.StringIO()):
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger in loggers:
                logger.disabled = False


def copied(into: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value as it is when it is written over another; torch's own has no derivative."""
    return value.to(into.dtype).expand(into.shape)


def _by_modules(model: nn.Module, modules: Sequence[str]) -> tuple[nn.Module, fx.Graph]:
    names = dict(model.named_modules())
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name in modules:
        if name not in names:
            raise unknown("module", name, names)
        value = graph.call_module(name, (value,))
        value.meta["path"] = name
    graph.output(value)
    return model, graph


def _told(model: nn.Module, failures: Sequence[BaseException]) -> str:
    """Return where in the model's own code the last method failed that came to it, why, and what to do."""
    kind = type(model).__name__
    failure, where = failures[-1], ""
    for error in failures:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not Path(frame.filename).is_relative_to(OURS)
            and not {"torch", "<string>"} & set(Path(frame.filename).parts)
        ]
        if frames:
            failure, where = error, f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    reason = str(failure).strip().split("\n")[0]
    if isinstance(failure, UsageError):  # it says what to do
        return f"{kind} cannot be traced{where}: {reason}"
    return (
        f"{kind} cannot be traced{where} ({type(failure).__name__}: {reason}); put what depends on values, or on "
        "the number of samples, into a module of its own, or name the modules that follow each other "
        "(Split(..., modules=[...]))"
    )
