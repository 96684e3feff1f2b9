"""The algorithms of pipelines, which differ only in the number of microbatches that a partition has in flight.

Each partition takes that many microbatches forward, then in turn one backward and the next forward, then the rest
backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from distbelief.errors import UsageError, unknown
from distbelief.schedules.pipeline import PartitionTask, Pass, Pipeline, SegmentGraph

PIPELINES = ("sequential", "gpipe", "1f1b")


def pipeline(algorithm: str, graph: SegmentGraph, microbatches: int = 1) -> Pipeline:
    """Return the pipeline of an algorithm over the segments of a split model.

    - `sequential`: the minibatch goes through as a whole.
    - `gpipe`: all microbatches go forward, then all backward (Huang et al. 2018).
    - `1f1b`: a partition has at most as many in flight as there are partitions from it to the last (Narayanan et al.
      2019, 2021).

    Args:
        algorithm: one of `PIPELINES`.
        graph: the segments and their partitions.
        microbatches: 1 or more; 1 for `sequential`.

    Raises:
        UsageError: the algorithm does not exist, or cannot have so many microbatches.

    >>> from distbelief.schedules.pipeline import chain
    >>> [f"{way.value[0]}{number}" for way, number in pipeline("1f1b", chain(2), 3).orders[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    check_pipeline(algorithm, microbatches)
    orders = tuple(
        tuple(partition_tasks(microbatches, in_flight(algorithm, microbatches, depth))) for depth in graph.depths
    )
    return Pipeline(algorithm, graph, microbatches, orders)


def in_flight(algorithm: str, microbatches: int, depth: int) -> int:
    """Return how many microbatches a partition at a depth may have in flight.

    >>> in_flight("gpipe", 8, 2), in_flight("1f1b", 8, 2), in_flight("1f1b", 1, 2)
    (8, 2, 1)
    """
    return microbatches if algorithm == "gpipe" else min(microbatches, depth)


def partition_tasks(microbatches: int, in_flight: int) -> Iterator[PartitionTask]:
    """Yield the tasks of a partition with so many microbatches in flight.

    >>> [(way.value, number) for way, number in partition_tasks(2, 2)]
    [('forward', 0), ('forward', 1), ('backward', 0), ('backward', 1)]
    """
    for turn in range(microbatches + in_flight):
        if turn >= in_flight:
            yield PartitionTask(Pass.BACKWARD, turn - in_flight)
        if turn < microbatches:
            yield PartitionTask(Pass.FORWARD, turn)


def named(schedule: str, microbatches: int) -> str:
    """Return the name of a schedule; auto is `sequential` for a whole minibatch, else `1f1b`.

    >>> named("auto", 1), named("auto", 4), named("gpipe", 4)
    ('sequential', '1f1b', 'gpipe')
    """
    return schedule if schedule != "auto" else "1f1b" if microbatches > 1 else "sequential"


def check_pipeline(algorithm: str, microbatches: int) -> None:
    """Refuse an algorithm that does not exist, or cannot have so many microbatches.

    Raises:
        UsageError: gives the reason, or names the nearest algorithm.
    """
    if algorithm not in PIPELINES:
        raise unknown("schedule", algorithm, PIPELINES)
    if microbatches < 1:
        raise UsageError(f"{microbatches} microbatches: there must be 1 or more")
    if algorithm == "sequential" and microbatches > 1:
        raise UsageError(
            f"{microbatches} microbatches in sequential, which sends a minibatch through as a whole: use 1, or gpipe "
            "or 1f1b"
        )
