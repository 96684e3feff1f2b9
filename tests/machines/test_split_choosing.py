"""Choosing: auto takes the way with the least price, the same in every process, and says what it was chosen from."""

import copy

import pytest
import torch
from torch import nn

from distbelief.errors import UsageError
from distbelief.split.options import Split, SplitSteps
from distbelief.split.plan import Choice, choose
from distbelief.split.tracing import trace
from distbelief.tasks.digits import lenet, mnist
from distbelief.zoo.mnist import Siamese, contrastive, mnist_gru


def chosen(
    model: nn.Module,
    shape: tuple[int, ...],
    way: str = "auto",
    batch_size: int = 64,
    partitions: int = 2,
    microbatches: int = 1,
) -> Choice:
    x = torch.zeros(2, *shape)
    loss, y = nn.functional.cross_entropy, torch.zeros(2, dtype=torch.int64)
    if isinstance(model, Siamese):
        loss, y = contrastive, torch.zeros(2)
    steps = SplitSteps(batch_size=batch_size, microbatches=microbatches)
    return choose(Split.parse(way, partitions), trace(model, (x,)), loss, y, steps)


def test_auto_takes_the_least_price_of_the_ways_that_can_be():
    found = chosen(lenet(), (1, 28, 28))
    ways = {"conv1": "filters", "conv2": "filters", "fc1": "neurons", "fc2": "neurons"}
    assert [one.split for one in found.candidates[:2]] == [Split("samples", 2), Split(ways, 2)]
    prices = [one.seconds for one in found.candidates]
    assert prices == sorted(prices)
    for one in found.candidates:
        if one.reason:
            with pytest.raises(UsageError):
                chosen(lenet(), (1, 28, 28), one.split.text)
        else:
            assert chosen(lenet(), (1, 28, 28), one.split.text).candidates[0].seconds == one.seconds
    assert {one.split.text for one in found.candidates if one.reason} == {"branches", "time"}
    assert found.told.startswith("samples over 2 partitions: ")
    assert "(conv1 and 1 more=filters, fc1 and 1 more=neurons " in found.told


@pytest.mark.parametrize(
    ("model", "shape", "way"),
    [
        (mnist().model(), (784,), "neurons"),
        (mnist_gru().model(), (28, 28), "samples"),
        (Siamese(lenet()), (2, 1, 28, 28), "branches"),
    ],
)
def test_auto_takes_what_the_model_is_made_for(model, shape, way):
    assert chosen(model, shape, batch_size=256).split == Split(way, 2)


def test_microbatches_are_in_the_price():
    """Two equal stages: one after the other with one microbatch, 5/8 of that with four, and what messages cost."""
    model = nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 3000))
    prices = [chosen(model, (3000,), "stages", 512, microbatches=m).candidates[0].seconds for m in (1, 4)]
    assert prices[1] / prices[0] == pytest.approx(5 / 8, rel=0.05)


def test_every_process_chooses_alike_whatever_the_values():
    model = lenet()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert chosen(model, (1, 28, 28)) == chosen(other, (1, 28, 28))


def test_where_splitting_does_not_pay_it_is_told():
    found = chosen(mnist().model(), (784,), "stages")
    assert "0.9" in found.told
    assert found.told.endswith("; it does not pay in time, only in memory")
    assert "does not pay" not in chosen(lenet(), (1, 28, 28)).told


def test_a_model_that_can_be_split_in_no_way_is_refused_with_every_reason():
    with pytest.raises(
        UsageError, match=r"cannot be split over 4 partitions: stages: .*; branches: .*; time: .*; neurons: "
    ):
        chosen(nn.Sequential(nn.Linear(3, 3)), (3,), partitions=4)
