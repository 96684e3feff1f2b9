"""The algorithms of pipelines: how many microbatches a partition has in flight is all in which they differ.

Every partition takes as many microbatches forward as may be in flight at it, then one back and the next one forward by
turns, then the rest back.
"""

from __future__ import annotations

from collections.abc import Iterator

from distbelief.errors import UsageError, unknown
from distbelief.schedules.pipeline import PartitionTask, Pass, Pipeline, SegmentGraph

PIPELINES = ("sequential", "gpipe", "1f1b")


def pipeline(algorithm: str, graph: SegmentGraph, microbatches: int = 1) -> Pipeline:
    """The pipeline of an algorithm over the segments of a split model.

    - `sequential`: the minibatch goes through as a whole.
    - `gpipe`: all microbatches go forward, then all back (Huang et al. 2018).
    - `1f1b`: a partition has no more in flight than there are partitions from it to the turn (Narayanan et al. 2019,
      2021).

    Args:
        algorithm: one of `PIPELINES`.
        graph: the segments and their partitions.
        microbatches: 1 or more; 1 for `sequential`.

    Raises:
        UsageError: there is no such algorithm, or these do not go together.

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
    """Return how many microbatches a partition of a depth may have in flight.

    >>> in_flight("gpipe", 8, 2), in_flight("1f1b", 8, 2), in_flight("1f1b", 1, 2)
    (8, 2, 1)
    """
    return microbatches if algorithm == "gpipe" else min(microbatches, depth)


def partition_tasks(microbatches: int, in_flight: int) -> Iterator[PartitionTask]:
    """The tasks of a partition that may have so many microbatches in flight, at most all.

    >>> [(way.value, number) for way, number in partition_tasks(2, 2)]
    [('forward', 0), ('forward', 1), ('backward', 0), ('backward', 1)]
    """
    for turn in range(microbatches + in_flight):
        if turn >= in_flight:
            yield PartitionTask(Pass.BACKWARD, turn - in_flight)
        if turn < microbatches:
            yield PartitionTask(Pass.FORWARD, turn)


def named(schedule: str, microbatches: int) -> str:
    """Return the name of a schedule: with auto, that of a minibatch which goes through as it is where it is whole.

    >>> named("auto", 1), named("auto", 4), named("gpipe", 4)
    ('sequential', '1f1b', 'gpipe')
    """
    return schedule if schedule != "auto" else "1f1b" if microbatches > 1 else "sequential"


def check_pipeline(algorithm: str, microbatches: int) -> None:
    """Refuse what is no pipeline, or has no meaning in one.

    Raises:
        UsageError: with the reason, or the nearest known name.
    """
    if algorithm not in PIPELINES:
        raise unknown("schedule", algorithm, PIPELINES)
    if microbatches < 1:
        raise UsageError(f"--microbatches {microbatches}: must be 1 or more")
    if algorithm == "sequential" and microbatches > 1:
        raise UsageError(
            f"--microbatches {microbatches}: schedule sequential sends a minibatch through as a whole: use 1, or "
            "gpipe or 1f1b"
        )
