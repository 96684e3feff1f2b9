"""Every way on every task that it applies to, over two to four homes: in float64 the split model is the whole one."""

from typing import Any

import pytest
import torch
from splitting import check_equal

from distbelief.schedules.pipelines import home_tasks
from distbelief.split.options import Split
from distbelief.tasks import Task, resolve

CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "mnist": {"stages": (2, 3), "neurons": (2, 3, 4), "columns": (2, 4), "groups": (3,)},
    "mnist-lenet": {
        "stages": (2, 3, 4), "neurons": (2,), "filters": (2, 3, 4), "groups": (2,), "regions": (2,),
        "conv*=filters,fc*=neurons": (2, 3, 4), "conv*=regions,fc*=neurons": (2, 3, 4), "conv*=0,fc*=1": (2,),
        "samples": (2, 3, 4), "conv2=samples,fc*=columns": (3,),
    },
    "mnist-alexnet": {"samples": (2, 4), "groups": (2, 4), "regions": (2,), "stages": (4,)},
    "mnist-inception": {
        "stages": (2, 4), "branches": (2, 3, 4), "filters": (2, 4), "regions": (3,), "groups": (3,), "samples": (3,),
    },
    "mnist-siamese": {
        "branches": (2,), "stages": (2,), "groups": (2, 4), "samples": (4,),
        "tower.conv*=regions,tower.fc*=neurons": (3,),
    },
    "mnist-gru": {"time": (2,), "stages": (2, 3), "groups": (2,), "samples": (3,), "gru*=time,fc1=samples": (2,)},
    "mnist-local": {"stages": (2,), "samples": (2,), "regions": (2, 3, 4), "local1=regions,fc1=neurons": (4,)},
    "mnist-squeezenet": {"branches": (2,), "filters": (3,), "stages": (4,), "samples": (3,)},
    "gpt-tiny": {
        "stages": (2, 3, 4), "neurons": (2, 3, 4), "samples": (3,),
        "blocks.*.mlp.fc1=columns,blocks.*.mlp.fc2=rows,head=1": (2,),
    },
}  # fmt: skip
"""By task and way, over how many homes."""
LIST = [(task, way, homes) for task, ways in CASES.items() for way, counts in ways.items() for homes in counts]


def doubled(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check(task: Task, way: str, homes: int, samples: int = 3, **options: Any) -> None:
    """Outputs, loss, gradients and buffers of one minibatch."""
    torch.manual_seed(0)
    model = task.model().double()
    inputs, targets = map(doubled, task.train().batch(torch.arange(samples)))  # type: ignore[union-attr]  # Data
    check_equal(model, (inputs,), targets, Split.parse(way, homes), loss=task.loss, atol=1e-12, **options)


@pytest.mark.parametrize(("task", "way", "homes"), LIST)
def test_a_task_split_is_the_whole_one(task: str, way: str, homes: int) -> None:
    check(resolve(task), way, homes)


@pytest.mark.parametrize(("task", "way"), [(task, way) for task, ways in CASES.items() for way in ways])
def test_a_task_whose_weights_gradients_are_made_once_is_the_whole_one(task: str, way: str) -> None:
    """Of two microbatches, one of them longer."""
    check(resolve(task), way, CASES[task][way][0], microbatches=2, order=[*home_tasks(2, 2, once=True)])
