"""Divisions of layers: how they are described, and modules that stand in for layers at a partition."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from distbelief.split.tidying import Shape, share_of


@dataclass(frozen=True)
class Indices:
    """Indices `start` up to, but not including, `stop` of one dimension of a tensor.

    >>> Indices(1, 2, 5).common(Indices(1, 4, 9))
    Indices(dimension=1, start=4, stop=5)
    """

    dimension: int
    start: int
    stop: int

    def covers(self, shape: Shape) -> bool:
        """Return whether they cover their dimension of a shape."""
        at = self.dimension
        return not shape.growth[at] and self.start <= 0 and self.stop >= shape.fixed[at]

    def of(self, shape: Shape) -> Shape:
        """Return the shape of a tensor's part with these indices."""
        at = self.dimension
        fixed = (*shape.fixed[:at], self.stop - self.start, *shape.fixed[at + 1 :])
        return replace(shape, fixed=fixed, growth=(*shape.growth[:at], 0, *shape.growth[at + 1 :]))

    def clipped(self, shape: Shape) -> Indices:
        """Return the indices that lie within a shape."""
        return replace(self, start=max(self.start, 0), stop=min(self.stop, shape.fixed[self.dimension]))

    def common(self, other: Indices) -> Indices | None:
        """Return the indices that two pieces share, if they divide the same dimension."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Indices(self.dimension, start, stop) if start < stop else None

    def within(self, part: Indices) -> Indices:
        """Return the same indices, counted from the start of a part."""
        return Indices(self.dimension, self.start - part.start, self.stop - part.start)


@dataclass(frozen=True)
class Cut:
    """Dimension and edges of a cut: part i has indices [edges[i], edges[i + 1])."""

    dimension: int
    edges: tuple[int, ...]

    def of(self, partition: int) -> Indices:
        """Return the indices of a partition's part."""
        return Indices(self.dimension, self.edges[partition], self.edges[partition + 1])


def edges(length: int, parts: int) -> tuple[int, ...]:
    """Return the edges of parts of a length, the first ones longer by one if it does not divide.

    >>> edges(10, 4)
    (0, 3, 6, 8, 10)
    """
    each, more = divmod(length, parts)
    return tuple(each * part + min(part, more) for part in range(parts + 1))


@dataclass(frozen=True)
class NodeShare:
    """One partition's part of a node: inputs, tensors and result.

    Missing inputs are brought from partitions that have them.
    """

    needs: tuple[Indices | None, ...] = ()
    """Indices of each input, in the order of arguments: None for a whole input, () if all are whole; indices outside
    are padding."""
    gives: Indices | None = None
    """Indices of the result that it gives; None for a summand of the whole."""
    layer: nn.Module | None = None
    """Smaller layer; None if the layer or function itself computes the part."""
    holds: Mapping[str, Indices | None] = field(default_factory=dict)
    """Tensors of the layer by name: the indices that this partition has, or None for the whole."""
    borrows: tuple[str, ...] = ()
    """Tensors of the layer that another partition has, and that this one needs whole."""
    fill: float = 0.0
    call: Callable[..., object] | None = None


@dataclass(frozen=True)
class Divided:
    """Node divided over all partitions.

    The outputs of its parts follow each other along a dimension, cut at `edges`, or are summed if `gives` is None.
    """

    parts: tuple[NodeShare, ...]
    gives: int | None
    edges: tuple[int, ...] = ()


Placed = dict[fx.Node, int | Divided]


def part_of(layer: nn.Module, holds: Mapping[str, Indices | None], **changed: object) -> nn.Module:
    """Return a layer with the shape of a part, with only the tensors that it holds, left empty.

    >>> part_of(nn.Linear(4, 6), {"weight": Indices(0, 0, 2)}, out_features=2)
    Linear(in_features=4, out_features=2, bias=False)
    """
    parameters = dict(layer.named_parameters(recurse=False))
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    part = copy.deepcopy(layer, memo)
    for name, whole in parameters.items():
        if name not in holds:
            part.register_parameter(name, None)
            continue
        indices = holds[name]
        length = indices.stop - indices.start if indices else whole.shape[0]
        at = indices.dimension if indices else 0
        sides = (*whole.shape[:at], length, *whole.shape[at + 1 :])
        part.register_parameter(name, nn.Parameter(whole.new_empty(sides, device="meta"), whole.requires_grad))
    for name, value in changed.items():
        setattr(part, name, value)
    return part


class Borrowing(nn.Module):
    """Layer that takes some of its tensors as further arguments."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = inner
        self._names = names

    def forward(self, *args: torch.Tensor) -> object:
        """Compute the layer with those tensors."""
        values, pieces = args[: -len(self._names)], args[-len(self._names) :]
        return torch.func.functional_call(self.inner, dict(zip(self._names, pieces, strict=True)), values)


LossFunction = Callable[[Any, Any], torch.Tensor]


class Loss(nn.Module):
    """Loss function as a module."""

    def __init__(self, loss: LossFunction) -> None:
        super().__init__()
        self._loss = loss

    def forward(self, output: object, targets: object) -> torch.Tensor:
        """Return the mean over the samples."""
        return self._loss(output, targets)


class Keyed(nn.Module):
    """Random layer or function whose numbers depend only on step, microbatch and node."""

    def __init__(self, inner: nn.Module | None, op: str, target: Any, number: int) -> None:
        super().__init__()
        self.inner = inner
        self._op, self._target, self._number = op, target, number

    def forward(self, chance: int, *args: Any, **kwargs: object) -> object:
        """Compute the node with the seed of a step and microbatch."""
        # not torch.manual_seed, which asks every backend, as in `tasks.order`
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            generator.manual_seed(mixed(chance, self._number))
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        if self._op == "call_method":
            return getattr(args[0], self._target)(*args[1:], **kwargs)
        return self._target(*args, **kwargs)


class DroppedShare(nn.Dropout):
    """Dropout on a part of the samples and indices: each partition draws for the whole tensor and takes its part."""

    def __init__(
        self, rate: float, share: tuple[int, int] = (0, 1), indices: Indices | None = None, whole: int = 0
    ) -> None:
        super().__init__(rate)
        self.share, self.indices, self.whole = share, indices, whole

    def forward(self, value: torch.Tensor, samples: int) -> torch.Tensor:  # type: ignore[override]  # it also needs the samples of all parts
        """Return the part with some elements zero and the others scaled; the first dimension counts samples."""
        if not self.training:
            return value
        number, parts = self.share
        sides = [samples if parts > 1 else len(value), *value.shape[1:]]
        if self.indices is not None:
            sides[self.indices.dimension] = self.whole
        kept = share_of(value.new_empty(sides).bernoulli_(1 - self.p).div_(1 - self.p), number, parts)
        if self.indices is not None:
            kept = kept.narrow(self.indices.dimension, self.indices.start, self.indices.stop - self.indices.start)
        return value * kept


def mixed(chance: int, number: int) -> int:
    """Return the seed of a node in a microbatch of a step."""
    value = (chance * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value >> 1


def node_number(node: fx.Node) -> int:
    """Return the number that keys a node's draws, the same for all splits of the graph."""
    return zlib.crc32(str(node.meta.get("copied from", node.name)).encode())


_DRAWING = ("dropout", "rand", "bernoulli", "multinomial", "normal", "rrelu", "poisson")


def draws(node: fx.Node, layer: nn.Module | None = None) -> bool:
    """Return whether a node draws at random."""
    if layer is not None:
        return any(_draws(part) for part in layer.modules() if part.training)
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    if name.startswith(("layer_norm", "batch_norm", "group_norm", "norm")):
        return False
    if "scaled_dot_product_attention" in name:
        return bool(node.kwargs.get("dropout_p", 0) or (len(node.args) > 4 and node.args[4]))
    return name.startswith(_DRAWING) or "dropout" in name


def _draws(part: nn.Module) -> bool:
    rate = getattr(part, "dropout", 0.0)
    return (
        (isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0)
        or isinstance(part, nn.RReLU)
        or (isinstance(rate, float) and rate > 0)
    )
