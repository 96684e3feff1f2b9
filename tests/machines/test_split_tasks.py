"""Every way on every task, over two to four partitions: the split model is the whole one, or it is refused."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from drawn import some
from splitting import PARTITIONS, WAYS, Gave, check_equal, check_way, play_programs, prepared
from torch import nn

from distbelief.references import TASKS
from distbelief.split.options import Split
from distbelief.split.plan import apply
from distbelief.split.play import cut_minibatch
from distbelief.split.program import build
from distbelief.split.tracing import Traced, trace
from distbelief.tasks import Task, as_data, available, resolve
from distbelief.tasks.worker import on_device

LARGE = ("alexnet", "vgg16", "inception-v1", "squeezenet")
"""Those that are tried in their real shapes, in `tests/slow`."""
DENSE = dict.fromkeys(("neurons", "columns", "rows", "groups"), PARTITIONS)
CONVOLVED = dict.fromkeys(("stages", "samples", "filters", "groups"), PARTITIONS)
APPLIES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "digits": {**DENSE, "stages": (2,)},
    "mnist": {**DENSE, "stages": (2, 3)},
    "mnist-lenet": {**DENSE, **CONVOLVED, "regions": (2,)},
    "mnist-alexnet": {**DENSE, **CONVOLVED, "filters": (2, 4), "groups": (2, 4), "regions": (2,)},
    "mnist-inception": {**DENSE, **CONVOLVED, "branches": PARTITIONS, "regions": PARTITIONS},
    "mnist-siamese": {**DENSE, **CONVOLVED, "branches": (2,), "regions": (2,)},
    "mnist-gru": {**DENSE, "neurons": (), "stages": (2, 3), "time": (2,), "samples": (2, 3)},
    "mnist-local": {**DENSE, "stages": (2,), "samples": PARTITIONS, "regions": PARTITIONS},
    "mnist-squeezenet": {**CONVOLVED, "branches": (2,), "regions": PARTITIONS},
    "gpt-tiny": {**DENSE, "stages": PARTITIONS, "samples": PARTITIONS},
    "dense-svm": {},
    "sparse-svm": {},
}
"""By task and way, over how many partitions it can be split; over others it is refused."""
MIXED = {
    "mnist-lenet": {
        "conv*=filters,fc*=neurons": PARTITIONS, "conv*=regions,fc*=neurons": PARTITIONS, "conv*=0,fc*=1": (2,),
        "conv2=samples,fc*=columns": (3,),
    },
    "mnist-siamese": {"tower.conv*=regions,tower.fc*=neurons": (3,)},
    "mnist-gru": {"gru*=time,fc1=samples": (2,)},
    "mnist-local": {"local1=regions,fc1=neurons": (4,)},
    "gpt-tiny": {"blocks.*.mlp.fc1=columns,blocks.*.mlp.fc2=rows,head=1": (2,)},
}  # fmt: skip
"""Ways beside each other."""
SPLITS = [
    (task, way, partitions) for task, ways in MIXED.items() for way, counts in ways.items() for partitions in counts
]
FIRST = [
    (task, way, partitions[0])
    for table in (APPLIES, MIXED)
    for task, ways in table.items()
    for way, partitions in ways.items()
    if partitions
]
"""Each way of each task, over the fewest partitions."""


lacks = functools.cache(available)


@pytest.fixture(autouse=True)
def data(request: pytest.FixtureRequest) -> None:
    """Skip a task whose data are not here, and cannot be had."""
    chosen = getattr(request.node, "callspec", None)
    if chosen and (why := lacks(chosen.params.get("task") or chosen.params["name"])):
        pytest.skip(why)


def check(task: str, way: str, partitions: int, **options: object) -> None:
    """Outputs, loss, gradients and buffers of one minibatch."""
    own = prepared(task, 3)
    split = Split.parse(way, partitions)
    check_equal(own.model, own.inputs, own.targets, split, loss=own.task.loss, traced=own.traced, **options)


def test_every_task_is_tried() -> None:
    assert {*APPLIES, *LARGE} == TASKS.keys()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", APPLIES)
@pytest.mark.long
def test_a_task_split_each_way_is_the_whole_one_or_refused(task: str, way: str) -> None:
    check_way(task, way, APPLIES[task].get(way, ()))


@pytest.mark.parametrize(("task", "way", "partitions"), SPLITS)
def test_a_task_split_in_several_ways_is_the_whole_one(task: str, way: str, partitions: int) -> None:
    check(task, way, partitions)


@functools.lru_cache(maxsize=1)
def in_float32(name: str) -> tuple[Task, nn.Module, Any, Any, Traced]:
    """A task, six of its samples, and its model traced; whoever asks for one after the other has it made once."""
    task = resolve(name)
    model, (inputs, targets) = task.model(), as_data(task.train()).batch(torch.arange(6))
    return task, model, inputs, targets, trace(model, (inputs,))


META = torch.device("meta")
"""Refuses an operation with a tensor of another device."""


@pytest.mark.parametrize(("name", "way", "partitions"), some(sorted({*SPLITS, *FIRST})))
@pytest.mark.long
def test_all_that_a_partition_computes_with_is_on_its_device(name: str, way: str, partitions: int) -> None:
    task, model, inputs, targets, traced = in_float32(name)
    graph = apply(Split.parse(way, partitions), traced, task.loss, targets)
    programs = [build(graph, partition, model, META) for partition in range(partitions)]
    batches, gave = cut_minibatch((on_device(inputs, META),), on_device(targets, META), 1), list[Gave]()

    play_programs(programs, batches, gave)
    assert {one.tensor.device for one in gave} == {META}
    trained = [one for program in programs for one in program.module.parameters() if one.requires_grad]
    assert all(one.grad is not None and one.grad.device == META for one in trained)
