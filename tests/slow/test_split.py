"""Large models split: in their real shapes, in float64, in each way over two to four partitions."""

import gc
from collections.abc import Mapping, Sequence

import pytest
from splitting import PARTITIONS, WAYS, check_equal, check_way, prepared

from distbelief.split.options import Split

DENSE = dict.fromkeys(("neurons", "columns", "rows"), PARTITIONS)
CONVOLVED = dict.fromkeys(("stages", "samples", "filters", "regions", "groups"), PARTITIONS)
APPLIES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "alexnet": {**DENSE, **CONVOLVED, "filters": (2, 4), "groups": (2, 4)},
    "inception-v1": {**DENSE, **CONVOLVED, "branches": PARTITIONS},
    "squeezenet": {**CONVOLVED, "branches": (2,)},
    "vgg16": {**DENSE, **CONVOLVED},
}
"""By task and way, over how many partitions it can be split; over others it is refused."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", APPLIES)
def test_a_large_task_split_each_way_is_the_whole_one_or_refused(task: str, way: str) -> None:
    for partitions in PARTITIONS:
        check_way(task, way, APPLIES[task].get(way, ()), samples=2, over=(partitions,))
        gc.collect()  # a traced model is a cycle: a few of vgg16's 1.1 GB are more than a machine has


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("way", "partitions"), [("conv*=groups,fc*=neurons", 4), ("conv*=regions,fc*=neurons", 3)])
def test_alexnet_split_in_two_ways_is_the_whole_one(way: str, partitions: int) -> None:
    own = prepared("alexnet", 2)
    split = Split.parse(way, partitions)
    check_equal(own.model, own.inputs, own.targets, split, loss=own.task.loss, traced=own.traced)
