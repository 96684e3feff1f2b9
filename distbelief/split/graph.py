"""The split graph: each node has one partition, and the only thing that crosses from partition to partition is a
transfer.

A value is *whole* at one partition, or *cut* along a dimension into a part for each partition, or left as *summands*,
one at each partition. What a partition needs of a value is brought there: slices at their owners, a transfer each, and
a `cat` or an `add` where they arrive. So a gather is transfers and a cat, a sum is transfers and additions, a halo is
slices, transfers and a cat; the adjoint of each follows from the one rule that a transfer's gradient goes back to its
source and is added there. Inputs and targets are at every partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

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
    """A parameter or buffer that another partition owns."""


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes from one partition to another; where it is differentiable, its gradient comes back."""

    number: int
    source: int
    target: int
    kind: TransferKind
    value: str
    """The node of the split graph that gives it."""
    path: str
    """The module that gives it."""
    shape: Shape

    def __hash__(self) -> int:
        return self.number  # which is its own: it is looked up many times in a step


@dataclass(frozen=True)
class Holding:
    """A module that computes at a partition, and which piece of which of the model's tensors each of its tensors is."""

    layer: nn.Module
    path: str
    pieces: Mapping[str, tuple[str, Piece]]


@dataclass
class SplitGraph:
    """A model's graph, rewritten for its partitions."""

    traced: Traced
    partitions: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    partition: dict[fx.Node, int] = field(default_factory=dict)
    shapes: dict[fx.Node, Shape] = field(default_factory=dict)
    transfers: dict[fx.Node, Transfer] = field(default_factory=dict)
    """Transfers by the node at which each arrives."""
    holdings: dict[str, Holding] = field(default_factory=dict)
    """Holdings by the target of the nodes that call each."""
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """Pieces of each tensor, by its first name."""
    outputs: dict[int, Argument] = field(default_factory=dict)
    """Outputs of the model by partition: a structure of nodes, each whole there. One partition has it, or all."""
    loss: fx.Node | None = None
    text: str = ""
    """The split as on a command line."""

    def constant(self, name: str) -> torch.Tensor:
        """A tensor that each partition has, and that is no part of the state."""
        attribute: object = self.traced.model
        for part in name.split("."):
            attribute = getattr(attribute, part)
        assert isinstance(attribute, torch.Tensor)
        return attribute

    @property
    def nodes(self) -> list[fx.Node]:
        """In the order in which they can be computed: first what waits for no transfer, then what waits for one."""
        depth: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            before = [depth[input_node] + (node in self.transfers) for input_node in node.all_input_nodes]
            depth[node] = max(before, default=0)
        return sorted(depth, key=lambda node: depth[node])


@dataclass
class Value:
    """Places of a value."""

    node: fx.Node
    """Node of the traced graph."""
    at: dict[int, fx.Node] = field(default_factory=dict)
    """Whole copies, by partition; the first is its owner's."""
    parts: dict[int, fx.Node] = field(default_factory=dict)
    """Nodes by partition, where it is cut or left as summands."""
    cut: Cut | None = None
    free: bool = False
    """Any partition makes it itself, from what every partition has."""
    ranges: dict[tuple[int, Indices], fx.Node] = field(default_factory=dict)

    @property
    def owner(self) -> int:
        """The partition that has it whole."""
        return next(iter(self.at))
