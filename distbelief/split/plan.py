"""Planning: the split graph of a model, from the ways that a user names for its parts."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from distbelief.errors import UsageError, unknown
from distbelief.split.graph import Rewriter, SplitGraph
from distbelief.split.layers import Divided, LossFunction, Placed
from distbelief.split.options import Split, blamed_on_task, fits
from distbelief.split.registry import DIVIDING, LayerCall, rule_of, ways_of
from distbelief.split.tracing import Traced
from distbelief.split.ways import filters, regions
from distbelief.split.ways.branches import branches
from distbelief.split.ways.following import follow
from distbelief.split.ways.neurons import pairs
from distbelief.split.ways.samples import before_dense, rounds
from distbelief.split.ways.stages import stages
from distbelief.split.ways.time import unrolled

PLACERS = {"stages": stages, "branches": branches}
"""The ways that say at which partition each node is."""
RULES = (filters, regions)
"""Files whose layers are registered when they are imported."""


def apply(
    split: Split,
    traced: Traced,
    loss: LossFunction | None,
    targets: object,
    work: Mapping[str, float] | None = None,
    everywhere: bool = False,
) -> SplitGraph:
    """The split graph of a model.

    Args:
        split: how; not `auto`, for which `choosing.choose` finds a way.
        traced: the model.
        loss: of its output and the targets; None for the output alone.
        targets: an example of what the loss takes.
        work: by a module's path, what it costs; floating-point operations where it is None.
        everywhere: whether each partition is given the loss, or the output where there is none.

    Raises:
        UsageError: the model cannot be split so: with the reason.
    """
    with blamed_on_task(split.own):
        _check_patterns(split, traced)
        traced, placed = _unrolled(split, traced)
        sampled = _by_samples(split, traced)
        nodes = [
            node for node in Rewriter(traced, split.partitions).nodes if node not in placed and node not in sampled
        ]
        placed |= _placed(split, traced, nodes, work)
        if sampled:
            traced, placed = rounds(traced, placed, sampled, split.partitions)
        rewriter = Rewriter(traced, split.partitions)
        rewriter.share_out({node: partition for node, partition in placed.items() if isinstance(partition, int)})
        for node in rewriter.nodes:
            where = placed.get(node)
            if node.target is operator.getitem and node.args[0] not in traced.shapes:
                where = rewriter.value(node.all_input_nodes[0]).owner
            if where is None:
                where = _followed(traced, rewriter, node)
            if isinstance(where, Divided):
                rewriter.divide(node, where)
            else:
                rewriter.place(node, where)
        graph = rewriter.finish(loss, targets, everywhere)
        graph.text = split.text
        return graph


def _check_patterns(split: Split, traced: Traced) -> None:
    paths = dict.fromkeys(node.meta["path"] for node in traced.graph.nodes if node.op != "output")
    known = {".".join(path.split(".")[: count + 1]) for path in paths if path for count in range(path.count(".") + 1)}
    for pattern in () if isinstance(split.ways, str) else split.ways:
        if not any(fits(pattern, path) for path in known):
            raise unknown("module in the split, no name fits", pattern, known)


def _unrolled(split: Split, traced: Traced) -> tuple[Traced, Placed]:
    """The model with its recurrent stacks unrolled, where they are split by time."""
    nodes = [node for node in traced.graph.nodes if split.of(node.meta.get("path", "")) == "time"]
    if not nodes:
        return traced, {}
    rewritten, partitions = unrolled(traced, nodes, split.partitions, split.chunks)
    return rewritten, {**partitions}


def _by_samples(split: Split, traced: Traced) -> set[fx.Node]:
    """Return what each partition computes for its part of the samples."""
    if split.ways == "samples":
        return before_dense(traced)
    return {node for node in traced.graph.nodes if split.of(node.meta.get("path", "")) == "samples"}


def _placed(split: Split, traced: Traced, nodes: list[fx.Node], work: Mapping[str, float] | None) -> Placed:
    """Return where what the user named is computed."""
    placed: Placed = {}
    named: dict[str, list[fx.Node]] = {}
    for node in nodes:
        way = split.of(node.meta["path"])
        if isinstance(way, int):
            placed[node] = way
        elif way is not None:
            named.setdefault(way, []).append(node)
    dense = named.pop("samples", [])
    if any(node.op == "call_module" and rule_of(traced.layer(node), "columns") for node in dense):
        named["neurons"] = dense
    for way, named_nodes in named.items():
        if way in PLACERS:
            placed |= PLACERS[way](traced, named_nodes, split.partitions, work)
        elif way != "time":
            placed |= _divided(split, traced, way, named_nodes)
    return placed


def _divided(split: Split, traced: Traced, way: str, nodes: list[fx.Node]) -> Placed:
    """Return what a way divides of some nodes; the others follow."""
    layers = [node for node in nodes if node.op == "call_module"]
    divisions: dict[fx.Node, str | int] = dict.fromkeys(layers, way)
    if way == "neurons":
        able = [node for node in layers if rule_of(traced.layer(node), "columns") and not _is_tied(traced, node)]
        divisions = pairs(traced, able)
    placed: Placed = {}
    held = [0] * split.partitions
    for node in layers:
        chosen = divisions.get(node, way)
        if isinstance(chosen, int):
            placed[node] = chosen
            continue
        layer = traced.layer(node)
        rule = rule_of(layer, chosen)
        if rule is not None and not (isinstance(split.ways, str) and _is_tied(traced, node)):
            owner = min(range(split.partitions), key=lambda partition: (held[partition], partition))
            takes = tuple(traced.shapes[input_node] for input_node in node.all_input_nodes)
            call = LayerCall(layer, str(node.target), takes, traced.shapes[node], split.partitions, owner)
            divided = placed[node] = rule(call)
            if any(part.borrows for part in divided.parts):
                held[owner] += sum(parameter.numel() for parameter in layer.parameters())
    if not placed:
        paths = [str(node.target) for node in layers if any(True for _ in traced.layer(node).parameters())]
        known = {name for node in layers for name in ways_of(traced.layer(node))}
        raise UsageError(
            f"nothing of {', '.join(paths) or 'the model'} can be split by {way} ({DIVIDING[way]}); it can be split by "
            f"{', '.join(sorted(known | {'stages'}))}"
        )
    return placed


def _is_tied(traced: Traced, node: fx.Node) -> bool:
    """Return whether a layer shares a tensor with another: then it stays whole, unless it is named."""
    names = {f"{node.target}.{name}" for name, _ in traced.layer(node).named_parameters()}
    return bool(names & (traced.aliases.keys() | set(traced.aliases.values())))


def _followed(traced: Traced, rewriter: Rewriter, node: fx.Node) -> int | Divided:
    """Return where a node that nobody placed is computed: on parts, where its inputs are cut; else where they are."""
    values = [rewriter.value(input_node) for input_node in node.all_input_nodes]
    cuts = [value.cut for value in values]
    if any(cut is not None for cut in cuts) and (divided := follow(traced, node, cuts)):
        return divided
    whole = [value.owner for value in values if value.at and not value.free and not value.parts]
    return whole[0] if whole else 0
