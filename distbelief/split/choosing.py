"""Choosing: which way to split a model, by a price that every process computes alike: of operations, not of time.

The price is that of the schedule with which the partitions compute. What a segment takes is guessed from what it
computes: so many operations a second, so long for each element that it gives and for each of its nodes, twice as much
on the way back. `distbelief split` measures instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distbelief.errors import UsageError
from distbelief.schedules.pipeline import Pipeline, pipeline
from distbelief.schedules.pipeline_price import BACKWARD, SegmentCost, price_pipeline
from distbelief.schedules.price import LinkModel
from distbelief.split.graph import SplitGraph
from distbelief.split.layers import LossFunction
from distbelief.split.options import AUTO, Split, SplitSteps
from distbelief.split.plan import apply
from distbelief.split.program import SplitProgram, elements, program_of
from distbelief.split.registry import DIVIDING, PLACING, rule_of
from distbelief.split.tracing import Traced

RATE, ELEMENT, NODE = 4e10, 1e-9, 1e-5
"""Operations a second of a core; seconds of an element and of a node, forward."""
TOLD = 3
"""Other ways that are named beside the best one."""
LINE = LinkModel(50e-6, 1.25e9)
"""Between two partitions."""


@dataclass(frozen=True)
class Candidate:
    """A way to split, and its price or why it cannot be."""

    split: Split
    seconds: float
    """Seconds of a step; infinite where it cannot be."""
    reason: str = ""
    graph: SplitGraph | None = field(default=None, compare=False, repr=False)
    """The model, split so; None where it cannot be."""


@dataclass(frozen=True)
class Choice:
    """Chosen way to split a model, and those that were looked at."""

    split: Split
    graph: SplitGraph = field(compare=False, repr=False)
    """The model, split so."""
    whole: float
    """Guessed seconds of a step of the whole model."""
    candidates: tuple[Candidate, ...]
    """All ways, the best one first; one that was named stands alone."""

    @property
    def told(self) -> str:
        """Return what it was chosen for, in a sentence."""
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
    """The way that is named; for `auto`, of the ways that can be, the one with the least price.

    Args:
        split: how, or `auto`.
        traced: the model; no value of it is read.
        loss: of its output and the targets.
        targets: an example of what the loss takes.
        steps: what is priced.
        everywhere: whether each partition is given the loss, or the output where there is none.

    Raises:
        UsageError: it cannot be split so, or in no way: with the reasons.
    """
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
    """Every way by itself; and convolutions in each way that they have, beside fully connected layers by neurons."""
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
    """The ways in words.

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
    """Guessed seconds of a step."""
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
