"""A split: which way each part of a model is split, over how many partitions; and the split graph of a model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from distbelief.errors import UsageError, unknown
from distbelief.split.graph import Rewriter, SplitGraph
from distbelief.split.layers import Divided
from distbelief.split.tracing import Traced
from distbelief.split.ways.stages import stages

WAYS = ("stages",)


@dataclass(frozen=True)
class Split:
    """How a model is split over the partitions of a replica.

    Raises:
        UsageError: a way that is unknown; fewer than two partitions.

    >>> Split("stages", partitions=2)
    Split(way='stages', partitions=2)
    """

    way: str
    """The way, for the whole model."""
    partitions: int = 2

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise unknown("way to split", self.way, WAYS)
        if self.partitions < 2:
            raise UsageError(f"partitions={self.partitions}: a model is split over 2 or more")


Loss = Callable[[Any, Any], torch.Tensor]


def apply(
    split: Split, traced: Traced, loss: Loss | None, targets: Any, work: Mapping[str, float] | None = None
) -> SplitGraph:
    """The split graph of a model.

    Args:
        split: how.
        traced: the model.
        loss: of its output and the targets; None for the output alone.
        targets: an example of what the loss takes.
        work: by a module's path, what it costs; floating-point operations where it is None.

    Raises:
        UsageError: the model cannot be split so: with the reason.
    """
    rewriter = Rewriter(traced, split.partitions)
    nodes = rewriter.nodes
    placed: dict[fx.Node, int | Divided] = {**stages(traced, nodes, split.partitions, work)}
    for node in nodes:
        where = placed.get(node)
        if node.target is operator.getitem and node.args[0] not in traced.shapes:
            where = rewriter.value(node.all_input_nodes[0]).owner
        if isinstance(where, Divided):
            rewriter.divide(node, where)
        else:
            rewriter.place(node, where or 0)
    return rewriter.finish(loss, targets)
