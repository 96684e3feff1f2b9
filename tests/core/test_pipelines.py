"""Every pipeline over any graph of segments ends with every gradient, at the price of a hand's count."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_proofs import prove

from distbelief.cli import costs
from distbelief.errors import LocalProtocolError, UsageError
from distbelief.lab.draw.schedules import draw_pipeline, draw_svg
from distbelief.schedules.pipeline import (
    PIPELINES,
    Boundary,
    Crossing,
    PartitionSegment,
    PartitionTask,
    Pass,
    Pipeline,
    SegmentGraph,
    SegmentTask,
    chain,
    pipeline,
)
from distbelief.schedules.pipeline_price import SegmentCost, price_pipeline
from distbelief.schedules.price import LinkModel


def graph(partitions: list[int], edges: list[list[int]], lacking: frozenset[int] = frozenset()) -> SegmentGraph:
    """Segments at some partitions, each with the earlier ones whose one value it takes; some have no gradient."""
    numbers = {partition: number for number, partition in enumerate(dict.fromkeys(partitions))}
    partitions = [numbers[partition] for partition in partitions]
    crossing: dict[tuple[int, int], None] = {}
    for segment, sources in enumerate(edges):
        crossing |= {
            (source, partitions[segment]): None for source in sources if partitions[source] != partitions[segment]
        }
    number = {pair: at for at, pair in enumerate(sorted(crossing))}
    boundaries = [Boundary(f"value {s}", partitions[s], target, 4, s not in lacking) for s, target in number]
    return SegmentGraph(
        tuple(
            PartitionSegment(
                f"segment {at}",
                partition,
                tuple(sorted({number[s, partition] for s in edges[at] if partitions[s] != partition})),
                tuple(number[pair] for pair in number if pair[0] == at),
            )
            for at, partition in enumerate(partitions)
        ),
        tuple(boundaries),
    )


@st.composite
def graphs(draw: st.DrawFn) -> SegmentGraph:
    """Any graph, and half of the time one whose partitions follow each other, with connections that skip some."""
    count = draw(st.integers(1, 9))
    partitions = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    edges = [
        draw(st.lists(st.integers(0, at - 1), unique=True, max_size=3)) if at else list[int]() for at in range(count)
    ]
    if draw(st.booleans()):
        partitions, edges = sorted(partitions), [sorted({*of, at - 1} - {-1}) for at, of in enumerate(edges)]
    return graph(partitions, edges, frozenset(draw(st.lists(st.integers(0, count), max_size=2))))


@given(graphs(), st.sampled_from(PIPELINES), st.integers(1, 6), st.integers(0, 2))
def test_every_pipeline_over_any_graph_is_proved_with_its_own_slots_and_with_more(
    over: SegmentGraph, way: str, microbatches: int, more: int
) -> None:
    made = pipeline(way, over, 1 if way == "sequential" else microbatches)
    seen = prove(made)
    most = max(map(made.slots, range(len(over.boundaries))), default=0)
    assert msgspec.structs.replace(prove(made, most + more), waits=0) == msgspec.structs.replace(seen, waits=0)
    assert seen.in_flight == made.in_flight
    assert seen.waits == 0 or not all(boundary.gradient for boundary in over.boundaries)
    for partition, depth in enumerate(over.depths):
        assert seen.in_flight[partition] <= (made.microbatches if way == "gpipe" else min(depth, made.microbatches))
    crossings = [one for actions in made.actions for one in actions if isinstance(one, Crossing)]
    both = sum(1 + boundary.gradient for boundary in over.boundaries)
    assert len(crossings) == 2 * len(set(crossings)) == 2 * both * made.microbatches
    assert price_pipeline(made, [SegmentCost(1, 2)] * len(over.segments)).seconds > 0


def test_a_value_crosses_once_to_each_partition_that_takes_it_and_passes_by_those_between() -> None:
    """The first segment's value is taken by two of partition 1, and goes past partition 1 to partition 2."""
    over = graph([0, 1, 1, 2], [[], [0], [0, 1], [0, 2]])
    made = pipeline("gpipe", over, 2)
    sent = [one for one in made.actions[0] if isinstance(one, Crossing) and one.direction is Pass.FORWARD]
    assert [(over.boundaries[one.boundary].target, one.microbatch) for one in sent] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    # its gradient leaves partition 1 when the first of the two, which goes back last, has added to it
    back = [one for one in made.actions[1] if isinstance(one, SegmentTask) or one.direction is Pass.BACKWARD]
    at = back.index(SegmentTask(Pass.BACKWARD, 1, 0))
    assert back[at + 1] == Crossing(0, 0, Pass.BACKWARD)
    assert Crossing(0, 0, Pass.BACKWARD) not in back[:at]


F, B = Pass.FORWARD, Pass.BACKWARD
CHAIN = pipeline("gpipe", chain(2), 2)


def changed(made: Pipeline, partition: int, *tasks: tuple[Pass, int]) -> Pipeline:
    orders = list(made.orders)
    orders[partition] = tuple(PartitionTask(*task) for task in tasks)
    return msgspec.structs.replace(made, orders=tuple(orders))


def edited(made: Pipeline, partition: int, edit: Callable[[list[object]], object]) -> Pipeline:
    """A pipeline whose actions do not follow from its tasks."""
    actions = [list[object](of) for of in made.actions]
    edit(actions[partition])
    # what a msgspec struct with a dict has cached is read from there
    changed = msgspec.structs.replace(made)
    changed.__dict__["actions"] = tuple(tuple(of) for of in actions)
    return changed


def swap(one: int, other: int) -> Callable[[list[object]], object]:
    def edit(actions: list[object]) -> None:
        actions[one], actions[other] = actions[other], actions[one]

    return edit


WRONG = {
    "a microbatch goes back before it came": (
        changed(CHAIN, 1, (F, 0), (B, 1), (F, 1), (B, 0)), "comes before",
    ),
    "both wait for each other": (changed(CHAIN, 0, (F, 0), (B, 0), (F, 1), (B, 1)), "waits forever"),
    "one asks for what comes later": (changed(CHAIN, 1, (F, 1), (F, 0), (B, 0), (B, 1)), "in its slot"),
    "a microbatch never goes back": (changed(CHAIN, 1, (F, 0), (F, 1), (B, 0)), "waits forever"),
    "a microbatch goes forward twice": (
        changed(CHAIN, 1, (F, 0), (F, 1), (F, 1), (B, 0), (B, 1)), "a second time",
    ),
    "computed before it came": (edited(CHAIN, 1, swap(0, 1)), "lacks"),
    "sent before it is made": (edited(CHAIN, 0, swap(0, 1)), "sent before it is made"),
    "sent twice": (edited(CHAIN, 0, lambda of: of.insert(2, of[1])), "a second time"),
    "never sent": (edited(CHAIN, 0, lambda of: of.pop(1)), "in its slot"),
    "another partition's task": (
        edited(CHAIN, 0, lambda of: of.insert(0, SegmentTask(F, 1, 0))), "is of another partition",
    ),
    "another partition's crossing": (
        edited(pipeline("gpipe", chain(3), 1), 0, lambda of: of.append(Crossing(1, 0, F))), "is of other partitions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_run_to_its_end_with_every_gradient_is_refused(what: str) -> None:
    made, says = WRONG[what]
    with pytest.raises(LocalProtocolError, match=says):
        prove(made)


def test_with_fewer_slots_than_a_pipeline_holds_it_waits_forever() -> None:
    made = pipeline("gpipe", chain(2), 4)
    assert made.slots(0) == 4
    assert [pipeline("1f1b", chain(4), 8).slots(boundary) for boundary in range(3)] == [4, 3, 2]
    prove(made, 4)
    with pytest.raises(LocalProtocolError, match="waits forever"):
        prove(made, 3)


def test_what_skips_partitions_has_slots_for_all_that_its_source_has_in_flight() -> None:
    """With as many as its target holds, the first and the last of four partitions would wait for each other."""
    over = graph([0, 1, 2, 3], [[], [0], [0, 1], [0, 1, 2]])
    made = pipeline("1f1b", over, 7)
    assert prove(made).waits == 0
    skips = next(n for n, one in enumerate(over.boundaries) if (one.source, one.target) == (0, 3))
    assert made.slots(skips) == 4
    with pytest.raises(LocalProtocolError, match="waits forever"):
        prove(made, 1)


BROKEN = {
    "first": ((PartitionSegment("a", 0, (0,)),), (Boundary("x", 1, 0),), "no earlier segment gives"),
    "number": ((PartitionSegment("a", 0, (), (3,)),), (), "boundary 3 of 0"),
    "given twice": (
        (PartitionSegment("a", 0, (), (0,)), PartitionSegment("b", 0, (), (0,)), PartitionSegment("c", 1, (0,))),
        (Boundary("x", 0, 1),), "which another segment gives",
    ),
    "not taken": (
        (PartitionSegment("a", 0, (), (0,)), PartitionSegment("b", 1)), (Boundary("x", 0, 1),), "crosses once",
    ),
    "twice to one partition": (
        (PartitionSegment("a", 0, (), (0, 1)), PartitionSegment("b", 1, (0, 1))),
        (Boundary("x", 0, 1), Boundary("x", 0, 1)), "crosses once",
    ),
    "a partition without": ((PartitionSegment("a", 1),), (), "some have no segment"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_graph_of_segments_is_refused(what: str) -> None:
    segments, boundaries, says = BROKEN[what]
    with pytest.raises(UsageError, match=says):
        SegmentGraph(segments, boundaries)


@pytest.mark.parametrize(
    ("algorithm", "microbatches", "says"),
    [("gpip", 1, "did you mean 'gpipe'"), ("gpipe", 0, "must be 1 or more"), ("sequential", 2, "as a whole")],
)
def test_what_is_no_pipeline_is_refused(algorithm: str, microbatches: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        pipeline(algorithm, chain(2), microbatches)


def test_partitions_that_need_values_of_each_other_have_the_same_in_flight() -> None:
    """Two halves of a layer that gather each other's values, and a stage behind them."""
    over = graph([0, 1, 0, 1, 2], [[], [], [0, 1], [0, 1], [2, 3]])
    assert over.depths == (2, 2, 1)
    assert prove(pipeline("1f1b", over, 6)).in_flight == (2, 2, 1)


# the orders of PyTorch's pipelining, from its own private functions


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("microbatches", [1, 2, 4, 5, 8])
def test_the_orders_are_those_of_pytorchs_pipelining_and_its_simulator_ends_them(
    stages: int, microbatches: int
) -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = torch._ComputationType
    names = {kinds.FORWARD: F, kinds.FULL_BACKWARD: B}

    def theirs(actions: list[object]) -> list[tuple[Pass, int]]:
        return [(names[a.computation_type], a.microbatch_index) for a in actions if a and a.computation_type in names]

    who = SimpleNamespace(_num_stages=stages, _n_microbatches=microbatches)
    for rank, actions in torch.ScheduleGPipe._get_pipeline_order(who).items():
        assert theirs(actions) == list(pipeline("gpipe", chain(stages), microbatches).orders[rank])
    made = pipeline("1f1b", chain(stages), microbatches)
    for rank in range(stages):
        warmup = min(microbatches, stages - 1 - rank)
        actions = torch._get_1f1b_rank_ops(
            1, stages, warmup, microbatches - warmup, warmup, rank, lambda _, rank=rank: rank, lambda _, rank=rank: rank
        )
        assert theirs(actions) == list(made.orders[rank])
    ways = {
        (False, F): kinds.RECV_F, (True, F): kinds.SEND_F, (False, B): kinds.RECV_B, (True, B): kinds.SEND_B,
    }  # fmt: skip
    order = {
        partition: [
            torch._Action(partition, kinds.FORWARD if one.direction is F else kinds.FULL_BACKWARD, one.microbatch)
            if isinstance(one, SegmentTask)
            else torch._Action(
                partition,
                ways[made.graph.boundaries[one.boundary].ends(one.direction)[0] == partition, one.direction],
                one.microbatch,
            )
            for one in actions
        ]
        for partition, actions in enumerate(made.actions)
    }
    torch._simulate_comms_compute(order, lambda stage: stage, stages)


# prices


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8))
def test_a_chain_costs_the_sum_of_its_stages_and_the_slowest_for_each_further_microbatch(
    seconds: list[int], microbatches: int
) -> None:
    costs = [SegmentCost(t, 2 * t) for t in seconds]
    for algorithm in ("gpipe", "1f1b") if len(set(seconds)) == 1 else ("gpipe",):
        made = price_pipeline(pipeline(algorithm, chain(len(seconds)), microbatches), costs)
        assert made.seconds == 3 * (sum(seconds) + (microbatches - 1) * max(seconds))
        assert made.busy == tuple(3.0 * t * microbatches for t in seconds)


def test_messages_cost_latency_and_bytes_of_each_sample() -> None:
    """Two stages, one microbatch of 50 samples, 8 bytes each: 2 messages of 400 bytes at 100 bytes a second and 1 s."""
    made = pipeline("sequential", chain(2, size=8))
    costs, link = [SegmentCost(1, 2)] * 2, LinkModel(1.0, 100.0)
    assert price_pipeline(made, costs).seconds == 6
    assert price_pipeline(made, costs, link).seconds == 6 + 2 * 1
    assert price_pipeline(made, costs, link, samples=50).seconds == 6 + 2 * (1 + 4)


def test_who_sends_waits_for_a_slot_that_is_still_in_use() -> None:
    """No gradient comes back, so that the first partition runs ahead, but by its two slots only: F0 F1 B0 F2, and then
    waits until the second, which takes 10 s each way, has the first microbatch back.
    """
    over = SegmentGraph(
        (PartitionSegment("a", 0, (), (0,)), PartitionSegment("b", 1, (0,))), (Boundary("x", 0, 1, gradient=False),)
    )
    made = pipeline("1f1b", over, 3)
    assert made.slots(0) == 2
    began = {s.task: s.start for s in price_pipeline(made, [SegmentCost(1, 1), SegmentCost(10, 10)]).spans}
    assert [began[SegmentTask(F, 0, m)] for m in range(3)] == [0, 1, 3]
    assert began[SegmentTask(B, 0, 1)] == 21
    assert began[SegmentTask(F, 1, 2)] == 41


def test_memory_is_what_is_in_flight() -> None:
    cost = [SegmentCost(1, 2, kept=10)] * 3
    over = chain(3, size=1)

    def held(algorithm: str, microbatches: int) -> tuple[int, ...]:
        return price_pipeline(pipeline(algorithm, over, microbatches), cost, samples=5).held

    # what it kept, and slots for inputs and for gradients of outputs
    assert held("sequential", 1) == (10 + 5, 10 + 5 + 5, 10 + 5)
    assert held("gpipe", 8) == (80 + 40, 80 + 40 + 40, 80 + 40)
    assert held("1f1b", 8) == (30 + 15, 20 + 15 + 10, 10 + 10)


# drawings


def test_a_drawing_has_every_task_once_and_says_what_is_in_flight() -> None:
    made = pipeline("1f1b", chain(3), 4)
    lines = draw_pipeline(made).splitlines()
    for partition, line in enumerate(lines[1:]):
        cells = line.split("  ", 2)[2].rsplit("  ", 1)[0].split()
        tasks = [cell for cell in cells if cell[0] in "FB"]
        assert tasks == [f"{way.name[0]}{number}" for way, number in made.orders[partition]]
        assert line.endswith(f"{3 - partition} in flight")


def test_the_document_shows_what_the_command_draws(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    shown = re.findall(r"^\$ distbelief draw (.*)\n((?:.|\n)*?)\n```", text, re.MULTILINE)
    assert [words.split()[0] for words, _ in shown] == list(PIPELINES)
    for words, drawn in shown:
        costs.draw(words.split())
        assert [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()] == drawn.splitlines()


def test_a_picture_is_to_the_scale_of_time() -> None:
    made = pipeline("gpipe", chain(2), 2)
    picture = draw_svg(made, price_pipeline(made, [SegmentCost(1e-3, 2e-3), SegmentCost(3e-3, 4e-3)]))
    assert picture.startswith("<svg ")
    assert picture.count("<title>") == 8
    assert "<title>stage 1: B1, 4 ms</title>" in picture
    widths = {part.split('width="')[1].split('"')[0] for part in picture.split("<rect")[2:]}
    assert {round(float(width) / 1000 * 17, 1) for width in widths} == {1, 2, 3, 4}
