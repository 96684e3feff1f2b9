"""Stages: runs of consecutive layers, one for each partition, as equal in work as they can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import fx

from distbelief.errors import UsageError
from distbelief.split.tracing import Traced

TOUCHED = 4
"""Operations that an element of a result counts as, beside those that compute it."""


def stages(
    traced: Traced, nodes: Sequence[fx.Node], partitions: int, work: Mapping[str, float] | None = None
) -> dict[fx.Node, int]:
    """The partition of each node: runs of layers, so that the most work of a partition is least, then what crosses.

    A run begins with a layer that has parameters, and what has none stays with the layer before it.

    Args:
        traced: the model.
        nodes: those to place, in order.
        partitions: how many partitions.
        work: by a module's path, what it costs, in any unit; floating-point operations where it is None.

    Raises:
        UsageError: there are more partitions than layers with parameters.
    """
    units: list[list[fx.Node]] = [[]]
    trained = False
    for node in nodes:
        has = _has_parameters(traced, node)
        if has and trained:
            units.append([])
        trained = trained or has
        units[-1].append(node)
    if len(units) < partitions:
        raise UsageError(
            f"--partitions {partitions}: there are {len(units)} layers with parameters to make stages of; name at most "
            f"{len(units)}"
        )
    cost = [sum(work_of(traced, node, work) for node in unit) for unit in units]
    bounds = _balanced(cost, _crossing(traced, units), partitions)
    return {
        node: partition
        for partition, (start, stop) in enumerate(pairwise(bounds))
        for unit in units[start:stop]
        for node in unit
    }


def _has_parameters(traced: Traced, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return False
    if node.op == "call_module":
        return any(True for _ in traced.layer(node).parameters())
    return any(input_node.op == "get_attr" for input_node in node.all_input_nodes)


def work_of(traced: Traced, node: fx.Node, work: Mapping[str, float] | None) -> float:
    """Return what a node costs: as it is given, or its operations and what it touches, for one sample more or less."""
    if work is not None:
        return work.get(node.meta["path"], 0.0) if node.op == "call_module" else 0.0
    shape = traced.shapes.get(node)
    return float(node.meta["flops"] + (TOUCHED * shape.elements(1) if shape else 0))


def _crossing(traced: Traced, units: Sequence[Sequence[fx.Node]]) -> list[int]:
    """Bytes of a sample that cross a cut before each unit."""
    number = {node: place for place, unit in enumerate(units) for node in unit}
    crossing = [0] * (len(units) + 1)
    for node, place in number.items():
        if node in traced.shapes and node.op != "get_attr":
            last = max((number.get(user, place) for user in node.users), default=place)
            for cut in range(place + 1, last + 1):
                crossing[cut] += traced.shapes[node].bytes(1)
    return crossing


def _balanced(cost: Sequence[float], crossing: Sequence[int], parts: int) -> list[int]:
    """Return where to cut, so that the largest sum of a part is least, and then the sum of what crosses."""
    total = [0.0, *accumulate(cost)]
    count = len(cost)
    best: list[tuple[float, int, tuple[int, ...]]] = [(total[stop], 0, (0, stop)) for stop in range(count + 1)]
    for part in range(2, parts + 1):
        best = [
            min(
                (
                    (max(most, total[stop] - total[cut]), crossed + crossing[cut], (*bounds, stop))
                    for cut in range(part - 1, stop)
                    for most, crossed, bounds in (best[cut],)
                ),
                default=(float("inf"), 0, ()),
            )
            for stop in range(count + 1)
        ]
    return list(best[count][2])
