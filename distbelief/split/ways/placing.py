"""Ways that place whole nodes: stages of consecutive layers, and branches between a fork and a join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import fx

from distbelief.errors import UsageError
from distbelief.split.tracing import Traced

TOUCHED = 4
"""Operations that count for each output element besides its own."""


def stages(
    traced: Traced, nodes: Sequence[fx.Node], partitions: int, work: Mapping[str, float] | None = None
) -> dict[fx.Node, int]:
    """Place consecutive layers so that the largest work of a partition is least, and then the transfers.

    A run begins with a layer with parameters; others stay with the layer before them.
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
            f"--partitions {partitions}: there are {len(units)} layers with parameters for stages; name at most "
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
    """Return a node's cost: the named one, or its operations and output elements for one sample."""
    if work is not None:
        return work.get(node.meta["path"], 0.0) if node.op == "call_module" else 0.0
    shape = traced.shapes.get(node)
    return float(node.meta["flops"] + (TOUCHED * shape.elements(1) if shape else 0))


def _crossing(traced: Traced, units: Sequence[Sequence[fx.Node]]) -> list[int]:
    """Return the bytes of a sample that cross a cut before each unit."""
    number = {node: place for place, unit in enumerate(units) for node in unit}
    crossing = [0] * (len(units) + 1)
    for node, place in number.items():
        if node in traced.shapes and node.op != "get_attr":
            last = max((number.get(user, place) for user in node.users), default=place)
            for cut in range(place + 1, last + 1):
                crossing[cut] += traced.shapes[node].bytes(1)
    return crossing


def _balanced(cost: Sequence[float], crossing: Sequence[int], parts: int) -> list[int]:
    """Return cuts that minimise the largest sum of a part, and then the transfers."""
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


def branches(
    traced: Traced, nodes: Sequence[fx.Node], partitions: int, work: Mapping[str, float] | None = None
) -> dict[fx.Node, int]:
    """Place each fork's branches, the largest first, at the partition with the least work.

    Other nodes are at partition 0. If two partitions call one module, one has its tensors and sends them.
    """
    inside = set(nodes)
    placed: dict[fx.Node, int] = dict.fromkeys(nodes, 0)
    widest = 1
    for paths in _forks(nodes, inside):
        cost = [sum(work_of(traced, node, work) for node in path) for path in paths]
        load = [0.0] * partitions
        for number in sorted(range(len(paths)), key=lambda path: (-cost[path], path)):
            partition = min(range(partitions), key=lambda candidate: (load[candidate], candidate))
            load[partition] += cost[number]
            placed |= dict.fromkeys(paths[number], partition)
        widest = max(widest, sum(seconds > 0 for seconds in cost))
    if widest < partitions:
        raise UsageError(
            f"--partitions {partitions}: the widest fork has {widest} branch{'es' * (widest > 1)}; split over "
            "fewer, or another way"
        )
    return placed


def _forks(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> list[list[list[fx.Node]]]:
    """Return the forks in order, each as its paths up to the join of all."""
    order = {node: number for number, node in enumerate(nodes)}
    last = len(nodes)
    joins: dict[int, int] = {last: last}  # the next node that lies on every path from each node
    for number in reversed(range(last)):
        after = {order.get(user, last) for user in nodes[number].users} or {last}
        joins[number] = _common(after, joins)
    starts = {number for number, node in enumerate(nodes) if not inside & set(node.all_input_nodes)}
    at, end = -1, _common(starts, joins)
    forks: list[list[list[fx.Node]]] = []
    while at < last:
        paths = _components(list(nodes[at + 1 : end]), inside)
        if len(paths) > 1:
            forks.append(paths)
        if end >= last:
            break
        at, end = end, joins[end]
    return forks


def _common(numbers: set[int], joins: Mapping[int, int]) -> int:
    """Return the first node on every path from some nodes, themselves included."""
    open_yet = set(numbers)
    while len(open_yet) > 1:
        first = min(open_yet)
        open_yet.remove(first)
        open_yet.add(joins[first])
    return open_yet.pop()


def _components(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> list[list[fx.Node]]:
    """Return connected nodes as groups, in order."""
    group: dict[fx.Node, list[fx.Node]] = {}
    among = set(nodes) & inside
    for node in nodes:
        joined = [node]
        for input_node in node.all_input_nodes:
            if input_node in among and group[input_node] is not joined:
                first = group[input_node]
                joined = [*first, *(other for other in joined if other not in first)]
        for input_node in joined:
            group[input_node] = joined
    return list({id(component): component for component in group.values()}.values())
