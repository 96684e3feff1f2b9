"""Tidying of a traced graph: one tensor per node, sizes as functions of the number of samples, no writes in place."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target
from torch.utils import _pytree as pytree

from distbelief.errors import UsageError
from distbelief.split.observing import SIZES, NodeValues, name_of


@dataclass(frozen=True)
class Shape:
    """Sides of a tensor as functions of the number of samples, its dtype, and whether a gradient comes back.

    >>> Shape((0, 3), (1, 0), torch.float32, True).bytes(64)
    768
    >>> Shape((0, 3), (1, 0), torch.float32, True, share=(1, 3)).at(64)
    (21, 3)
    """

    fixed: tuple[int, ...]
    growth: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    share: tuple[int, int] = (0, 1)
    """Number of this part of the samples, and number of parts; `samples_of` counts the part's samples."""

    def at(self, samples: int) -> tuple[int, ...]:
        """Return the sides for a number of samples of all parts."""
        count = samples_of(samples, *self.share)
        return tuple(side + count * more for side, more in zip(self.fixed, self.growth, strict=True))

    def elements(self, samples: int) -> int:
        """Return the elements for a number of samples."""
        return math.prod(self.at(samples))

    def bytes(self, samples: int) -> int:
        """Return the bytes for a number of samples."""
        return self.elements(samples) * self.dtype.itemsize

    @property
    def elements_each(self) -> int:
        """Return the elements of one sample; for a part, on average."""
        return round(self.elements(self.share[1]) / self.share[1])

    @property
    def bytes_each(self) -> int:
        """Return the bytes of one sample; for a part, on average."""
        return self.elements_each * self.dtype.itemsize

    @property
    def bytes_more(self) -> float:
        """Return the bytes that one sample adds; for a part, on average."""
        return (self.bytes(1 + self.share[1]) - self.bytes(1)) / self.share[1]


def samples_of(samples: int, number: int, parts: int) -> int:
    """Return the samples of one part; parts are as equal as possible, the first ones larger.

    If there are fewer samples than parts, the last parts get a copy of one, as a layer may refuse none.

    >>> [samples_of(8, number, 3) for number in range(3)], [samples_of(2, number, 3) for number in range(3)]
    ([3, 3, 2], [1, 1, 1])
    """
    return max(samples // parts + (number < samples % parts), min(samples, 1))


def share_of(value: torch.Tensor, number: int, parts: int) -> torch.Tensor:
    """Return the samples of a part."""
    part = value.tensor_split(parts)[number]
    return part if len(part) else value[-1:]


def size(samples: int, growth: int, fixed: int) -> int:
    """Return a side of a tensor for a number of samples."""
    return samples * growth + fixed


class InCopy:
    """Function that writes in place, applied to a copy."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function, self.__name__ = function, function.__name__

    def __call__(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = value.clone()
        self._function(copied, *args, **kwargs)
        return copied


_IN_PLACE = frozenset({
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul, operator.ipow, operator.setitem,
})  # fmt: skip


def tidy(
    graph: fx.Graph, observed: NodeValues, layer: Callable[[str], nn.Module]
) -> tuple[fx.Graph, dict[fx.Node, Shape]]:
    """Return the rewritten graph, and the shape of each of its tensors."""
    tidied = _Tidied(observed, layer)
    for node in graph.nodes:
        tidied.take(node)
    tidied.drop_unused()
    tidied.graph.lint()
    return tidied.graph, tidied.shapes


class _Tidied:
    def __init__(self, observed: NodeValues, layer: Callable[[str], nn.Module]) -> None:
        self.graph = fx.Graph()
        self.shapes: dict[fx.Node, Shape] = {}
        self._observed = observed
        self._layer = layer
        self._new: dict[fx.Node, Any] = {}
        self._order: dict[fx.Node, int] = {}
        self._writes: set[fx.Node] = set()
        """Nodes that write to a parameter or buffer and return it; further writes go through them."""
        self._samples = self.graph.placeholder("samples")
        self._samples.meta["path"] = ""

    def take(self, node: fx.Node) -> None:
        self._order[node] = len(self._order)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda input_node: self._new[input_node])
        if node.op == "output":
            self.graph.output(args[0])
            return
        values = self._observed.of(node)
        if node.op == "placeholder":
            new = self.graph.placeholder(str(node.target))
            new.meta["path"] = ""
            self._new[node] = self._taken_out(new, values)
        elif (
            node.target is operator.getitem
            and isinstance(args[0], tuple | list | dict)
            and not node.all_input_nodes[1:]
        ):
            held: Any = args[0]
            self._new[node] = held[args[1]]
        elif node.target is not operator.setitem and not any(
            isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(values[0])
        ):
            self._new[node] = self._number(node, values, args, kwargs)
        elif (into := self._written(node)) is None:
            self._new[node] = self._made(node, node.op, node.target, args, kwargs, values)
        elif self._new[into].op == "get_attr" or self._new[into] in self._writes:
            self._new[node] = self._made(node, node.op, node.target, args, kwargs, values)
            self._writes.add(self._new[node])
        else:
            self._replace(node, into, args, kwargs, values)

    def drop_unused(self) -> None:
        """Erase nodes that the output does not need and that keep no state."""
        for node in reversed(list(self.graph.nodes)):
            keeps = node.op == "call_module" and any(True for _ in self._layer(str(node.target)).buffers())
            writes = node in self._writes
            if not node.users and node.op not in ("placeholder", "output") and not keeps and not writes:
                self.graph.erase_node(node)
                self.shapes.pop(node, None)

    def _made(
        self,
        node: fx.Node,
        op: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        values: tuple[object, object],
    ) -> Any:
        new = self.graph.create_node(op, target, args, kwargs, name=node.name)
        path = str(target) if op == "call_module" else node.meta.get("path", "")
        new.meta.update(path=path, flops=self._observed.flops.get(node, 0))
        return self._taken_out(new, values)

    def _taken_out(self, new: fx.Node, values: tuple[Any, Any]) -> Any:
        """Return the node, or a structure of new nodes that each take one tensor out of its value."""
        value, other = values
        if isinstance(value, torch.Tensor):
            fixed, growth = [], []
            for first, second in zip(value.shape, other.shape, strict=True):
                growth.append(int(second) - int(first))
                fixed.append(int(first) - growth[-1] * self._observed.samples)
            self.shapes[new] = Shape(tuple(fixed), tuple(growth), value.dtype, value.requires_grad)
            return new
        if isinstance(value, tuple | list):
            return tuple(self._item(new, key, (value[key], other[key])) for key in range(len(value)))
        if isinstance(value, dict):
            return {key: self._item(new, key, (value[key], other[key])) for key in value}
        return self._constant(value, other)

    def _item(self, new: fx.Node, key: Argument, values: tuple[object, object]) -> Any:
        leaves = pytree.tree_leaves(values[0])
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        # with real tensors, a computed number may depend on their values
        numbers = self._observed.real and any(isinstance(leaf, int | float) for leaf in leaves)
        if not tensors and not numbers:
            return self._constant(*values)
        item = self.graph.call_function(operator.getitem, (new, key))
        item.meta.update(path=new.meta["path"], flops=0)
        return self._taken_out(item, values) if tensors else item

    def _number(
        self, node: fx.Node, values: tuple[object, object], args: tuple[Argument, ...], kwargs: dict[str, Argument]
    ) -> Any:
        """Return a constant number, a side of a tensor, or a node that computes the number."""
        side = name_of(node) in SIZES and any(map(self._observed.is_tensor, node.all_input_nodes))
        if node.op != "get_attr" and (side or node not in self._observed.varying):
            return self._constant(*values)
        new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        new.meta["path"], new.meta["flops"] = node.meta.get("path", ""), 0
        return new

    def _constant(self, value: Any, other: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(self._constant(*pair) for pair in zip(value, other, strict=True))
        if isinstance(value, dict):
            return {key: self._constant(value[key], other[key]) for key in value}
        if value == other or not isinstance(value, int):
            return value
        growth = other - value
        fixed = value - growth * self._observed.samples
        if (growth, fixed) == (1, 0):
            return self._samples
        new = self.graph.call_function(size, (self._samples, growth, fixed))
        new.meta["path"], new.meta["flops"] = "", 0
        return new

    def _written(self, node: fx.Node) -> fx.Node | None:
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if first is None:
            return None
        if node.op == "call_module":
            writes = bool(getattr(self._layer(str(node.target)), "inplace", False))
        elif node.op == "call_method":
            method = str(node.target)
            writes = method.endswith("_") and not method.endswith("__")
        else:
            name = getattr(node.target, "__name__", "")
            writes = node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or _inplace(node)
        return first if writes else None

    def _replace(
        self,
        node: fx.Node,
        into: fx.Node,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        values: tuple[object, object],
    ) -> None:
        """Compute a write out of place, and let the result replace the written value from here on."""
        old = self._new[into]
        self._refuse_views(node, into)
        if node.op == "call_module":
            new = self._made(node, node.op, node.target, args, kwargs, values)
        elif "inplace" in kwargs:
            new = self._made(node, node.op, node.target, args, {**kwargs, "inplace": False}, values)
        else:
            target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            new = self._made(node, "call_function", InCopy(target), args, kwargs, self._observed.of(into))
        for key, held in list(self._new.items()):
            if held is old:
                self._new[key] = new
        self._new[node] = new

    def _refuse_views(self, node: fx.Node, into: fx.Node) -> None:
        old = self._new[into]
        written, _ = self._observed.of(into)
        if not isinstance(written, torch.Tensor):
            return
        storage = written.untyped_storage()._cdata
        for view in self._order:
            other, _ = self._observed.of(view)
            shares = isinstance(other, torch.Tensor) and other.untyped_storage()._cdata == storage
            if view is node or not shares or self._new.get(view) is old:
                continue
            if any(user not in self._order for user in view.users):
                raise UsageError(
                    f"{node.meta.get('path') or 'the model'}: {node.format_node()} writes in place to a "
                    f"tensor whose view {view.name} is used later: write it out of place"
                )


def _inplace(node: fx.Node) -> bool:
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]  # a function
    except (TypeError, ValueError):
        return False
    return bool(bound.arguments.get("inplace", False))
