"""Split graph: each node has one partition, and only transfers cross between partitions.

A value is *whole* at one partition, *cut* along a dimension into a part for each partition, or left as *summands*, one
at each. A partition gets the part of a value that it needs by slices at the owners, a transfer for each, and a `cat` or
`add` on arrival. So a gather is transfers and a cat, a sum is transfers and additions, and a halo is slices, transfers
and a cat. All adjoints follow from one rule: a transfer's gradient goes back to its source and is added there. Every
partition has the inputs and targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

import torch
from torch import fx, nn
from torch.fx.node import Argument

from distbelief.sharding.layout import Piece
from distbelief.split.layers import Cut, Indices
from distbelief.split.tidying import Shape
from distbelief.split.tracing import Traced


class TransferKind(Enum):
    """Kind of transfer, for prices and drawings."""

    SEND = "send"
    GATHER = "gather"
    SUM = "sum"
    HALO = "halo"
    TENSOR = "tensor"
    """A parameter or buffer of another partition."""


@dataclass(frozen=True)
class Transfer:
    """Tensor from one partition to another; if it is differentiable, its gradient comes back."""

    number: int
    source: int
    target: int
    kind: TransferKind
    value: str
    path: str
    shape: Shape

    def __hash__(self) -> int:
        return self.number  # unique, and cheap: a step looks transfers up often


@dataclass(frozen=True)
class Holding:
    """Module of a partition, and the piece of the model that each of its tensors holds."""

    layer: nn.Module
    path: str
    pieces: Mapping[str, tuple[str, Piece]]


@dataclass
class SplitGraph:
    """Graph of a model, rewritten for its partitions."""

    traced: Traced
    partitions: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    partition: dict[fx.Node, int] = field(default_factory=dict)
    shapes: dict[fx.Node, Shape] = field(default_factory=dict)
    transfers: dict[fx.Node, Transfer] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    outputs: dict[int, Argument] = field(default_factory=dict)
    """Model's output by partition, as a structure of whole nodes; one partition has it, or all."""
    loss: fx.Node | None = None
    text: str = ""

    def constant(self, name: str) -> torch.Tensor:
        """Return a tensor that every partition has, outside of the state."""
        tensor = attrgetter(name)(self.traced.model)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    @property
    def nodes(self) -> list[fx.Node]:
        """Return the nodes in order of computation: first those that wait for no transfer, then for one, and so on."""
        depth: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            before = [depth[input_node] + (node in self.transfers) for input_node in node.all_input_nodes]
            depth[node] = max(before, default=0)
        return sorted(depth, key=lambda node: depth[node])


@dataclass
class Value:
    """Places of a value."""

    node: fx.Node
    at: dict[int, fx.Node] = field(default_factory=dict)
    """Whole copies by partition; the first is the owner's."""
    parts: dict[int, fx.Node] = field(default_factory=dict)
    cut: Cut | None = None
    free: bool = False
    """True if every partition can compute it from inputs."""
    ranges: dict[tuple[int, Indices], fx.Node] = field(default_factory=dict)

    @property
    def owner(self) -> int:
        """Return the partition that first has it whole."""
        return next(iter(self.at))
