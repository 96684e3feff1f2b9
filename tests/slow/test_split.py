"""Large models split: AlexNet of 2012 in its real shapes, in float64, in each way that it has."""

import pytest
import torch
from splitting import check_equal

from distbelief.split.options import Split
from distbelief.tasks.alexnet import alexnet


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "homes"), [("groups", 2), ("conv*=groups,fc*=neurons", 4), ("conv*=regions,fc*=neurons", 3), ("stages", 3)]
)
def test_alexnet_split_is_the_whole_one(way: str, homes: int) -> None:
    torch.manual_seed(0)
    task = alexnet()
    inputs, targets = task.train().batch(torch.arange(2))  # type: ignore[union-attr]  # Data
    check_equal(task.model().double(), (inputs.double(),), targets, Split.parse(way, homes), loss=task.loss, atol=1e-12)
