"""Planning of a split: the split graph for a user's ways, and the choice of a way by a price.

Every process computes the same price from operations, without measuring time. It is the price of the partitions'
schedule, with a guess for each segment: a rate of operations, a time for each output element and each node, and twice
as much backward. `distbelief split` measures instead.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from distbelief.errors import UsageError, unknown
from distbelief.schedules.pipeline import Pipeline, pipeline
from distbelief.schedules.pipeline_price import BACKWARD, SegmentCost, price_pipeline
from distbelief.schedules.price import LinkModel
from distbelief.split.graph import SplitGraph
from distbelief.split.layers import Divided, LossFunction, Placed
from distbelief.split.options import AUTO, Split, SplitSteps, blamed_on_task, fits
from distbelief.split.program import SplitProgram, elements, program_of
from distbelief.split.registry import DIVIDING, PLACING, LayerCall, rule_of, ways_of
from distbelief.split.rewriting import Rewriter
from distbelief.split.tracing import Traced
from distbelief.split.ways.following import follow
from distbelief.split.ways.neurons import pairs
from distbelief.split.ways.placing import branches, stages
from distbelief.split.ways.samples import before_dense, rounds
from distbelief.split.ways.time import unrolled

PLACERS = {"stages": stages, "branches": branches}


def apply(
    split: Split,
    traced: Traced,
    loss: LossFunction | None,
    targets: object,
    work: Mapping[str, float] | None = None,
    everywhere: bool = False,
) -> SplitGraph:
    """Return the split graph of a model, whose split is not `auto`.

    `work` is the cost of modules by their paths; by default it is floating-point operations.
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
    nodes = [node for node in traced.graph.nodes if split.of(node.meta.get("path", "")) == "time"]
    if not nodes:
        return traced, {}
    rewritten, partitions = unrolled(traced, nodes, split.partitions, split.chunks)
    return rewritten, {**partitions}


def _by_samples(split: Split, traced: Traced) -> set[fx.Node]:
    if split.ways == "samples":
        return before_dense(traced)
    return {node for node in traced.graph.nodes if split.of(node.meta.get("path", "")) == "samples"}


def _placed(split: Split, traced: Traced, nodes: list[fx.Node], work: Mapping[str, float] | None) -> Placed:
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
    """Return the places of nodes that a way divides; other nodes follow."""
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
    """Return whether a layer shares a tensor with another; it then stays whole, unless it is named."""
    names = {f"{node.target}.{name}" for name, _ in traced.layer(node).named_parameters()}
    return bool(names & (traced.aliases.keys() | set(traced.aliases.values())))


def _followed(traced: Traced, rewriter: Rewriter, node: fx.Node) -> int | Divided:
    """Return the place of an unplaced node: in parts if its inputs are cut, else with its inputs."""
    values = [rewriter.value(input_node) for input_node in node.all_input_nodes]
    cuts = [value.cut for value in values]
    if any(cut is not None for cut in cuts) and (divided := follow(traced, node, cuts)):
        return divided
    whole = [value.owner for value in values if value.at and not value.free and not value.parts]
    return whole[0] if whole else 0


RATE, ELEMENT, NODE = 4e10, 1e-9, 1e-5
"""Operations a second of a core; seconds per element and per node, forward."""
TOLD = 3
LINE = LinkModel(50e-6, 1.25e9)


@dataclass(frozen=True)
class Candidate:
    """Way to split, and its price or why it is impossible."""

    split: Split
    seconds: float
    reason: str = ""
    graph: SplitGraph | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Choice:
    """Chosen way to split a model, and its alternatives."""

    split: Split
    graph: SplitGraph = field(compare=False, repr=False)
    whole: float
    candidates: tuple[Candidate, ...]
    """All ways, the best first; a named one stands alone."""

    @property
    def told(self) -> str:
        """Return the reason for the choice as a sentence."""
        best = self.candidates[0]
        others = [candidate for candidate in self.candidates[1 : 1 + TOLD] if not candidate.reason]
        beside = "; ".join(f"{_named(candidate.split)} {self.whole / candidate.seconds:.2f}" for candidate in others)
        speedup = self.whole / best.seconds
        pays = "" if speedup > 1 else "; it does not pay in time, only in memory"
        return (
            f"{_named(best.split)} over {best.split.partitions} partitions: {speedup:.2f} times as fast as one process "
            f"by its operations{f' ({beside})' if beside else ''}{pays}"
        )


def choose(
    split: Split,
    traced: Traced,
    loss: LossFunction | None,
    targets: object,
    steps: SplitSteps,
    everywhere: bool = False,
) -> Choice:
    """Return the named way, or for `auto` the possible way with the least price."""
    batch_size, scale = steps.batch_size, steps.batch_size / traced.samples
    ways = _ways(traced, split.partitions) if split.ways == AUTO else [split]
    candidates: list[Candidate] = []
    for way in ways:
        try:
            graph = apply(way, traced, loss, targets, everywhere=everywhere)
            program = program_of(graph)
            pipe = pipeline(steps.algorithm, program.graph, steps.microbatches)
            candidates.append(Candidate(way, _price(program, pipe, scale, batch_size), "", graph))
        except UsageError as error:
            if len(ways) == 1:
                raise
            candidates.append(Candidate(way, float("inf"), str(error)))
    best, *_ = candidates = sorted(candidates, key=lambda candidate: candidate.seconds)
    if best.graph is None:
        raise UsageError(
            f"the model cannot be split over {split.partitions} partitions: "
            + "; ".join(f"{candidate.split.text}: {candidate.reason}" for candidate in candidates)
        )
    return Choice(best.split, best.graph, _of_whole(traced, scale, batch_size), tuple(candidates))


def _ways(traced: Traced, partitions: int) -> list[Split]:
    """Return every way alone, and ways of convolutions combined with neurons for fully connected layers."""
    plain = [way for way in (*PLACING, *DIVIDING) if way not in ("columns", "rows")]
    splits: list[Split] = [Split(way, partitions) for way in plain]
    layers = {str(node.target): traced.layer(node) for node in traced.layers}
    dense = [path for path, layer in layers.items() if rule_of(layer, "columns")]
    for way in ("filters", "regions"):
        able = [path for path, layer in layers.items() if rule_of(layer, way)]
        if able and dense:
            mixed = {path: way if path in able else "neurons" for path in layers if path in (*able, *dense)}
            splits.append(Split(mixed, partitions))
    return splits


def _named(split: Split) -> str:
    """Return the ways in words.

    >>> _named(Split({"conv1": "filters", "conv2": "filters", "fc1": "neurons"}))
    'conv1 and 1 more=filters, fc1=neurons'
    """
    if isinstance(split.ways, str):
        return split.ways
    first: dict[str | int, list[str]] = {}
    for pattern, way in split.ways.items():
        first.setdefault(way, []).append(pattern)
    parts = [f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}={way}" for way, paths in first.items()]
    return ", ".join(parts)


def _price(program: SplitProgram, pipe: Pipeline, scale: float, samples: int) -> float:
    parts = pipe.microbatches
    costs = []
    for segment in program.segments:
        forward = _seconds(scale * segment.flops / parts, samples * segment.elements / parts, segment.nodes)
        costs.append(SegmentCost(forward, BACKWARD * forward))
    return price_pipeline(pipe, costs, LINE, samples / parts).seconds


def _of_whole(traced: Traced, scale: float, samples: int) -> float:
    nodes = [node for node in traced.graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    flops = sum(node.meta["flops"] for node in nodes)
    return (1 + BACKWARD) * _seconds(scale * flops, samples * elements(nodes, traced.shapes), len(nodes))


def _seconds(flops: float, elements: float, nodes: int) -> float:
    return flops / RATE + elements * ELEMENT + nodes * NODE
