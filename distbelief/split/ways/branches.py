"""Branches: what lies side by side between a fork and a join, shared out among the partitions by work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from distbelief.errors import UsageError
from distbelief.split.tracing import Traced
from distbelief.split.ways.stages import work_of


def branches(
    traced: Traced, nodes: Sequence[fx.Node], partitions: int, work: Mapping[str, float] | None = None
) -> dict[fx.Node, int]:
    """The partition of each node: of each fork, the largest branch goes to the partition with the least work, and so
    on.

    What lies on no branch is at partition 0. Two calls of one module may be at two partitions: one has its tensors and
    sends them.

    Args:
        traced: the model.
        nodes: those to place, in order.
        partitions: how many partitions.
        work: by a module's path, what it costs; floating-point operations where it is None.

    Raises:
        UsageError: no fork has as many branches with work as there are partitions.
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
    """Find the forks on the way through, and for each the paths from it to where all have joined."""
    order = {node: number for number, node in enumerate(nodes)}
    last = len(nodes)
    joins: dict[int, int] = {last: last}  # by a node's number, the next node that every path from it goes through
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
    """The first node that every path from some nodes goes through; the nodes themselves count."""
    open_yet = set(numbers)
    while len(open_yet) > 1:
        first = min(open_yet)
        open_yet.remove(first)
        open_yet.add(joins[first])
    return open_yet.pop()


def _components(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> list[list[fx.Node]]:
    """Nodes that hang together, in order."""
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
