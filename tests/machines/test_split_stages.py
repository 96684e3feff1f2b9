"""Stages: runs of layers at partitions, equal to the whole model bit for bit."""

import pytest
import torch
from splitting import Skipping, check_equal, play_split
from torch import nn

from distbelief.errors import LocalProtocolError, UsageError
from distbelief.schedules.pipeline import Pass, pipeline
from distbelief.split.options import Split
from distbelief.split.play import Passes, cut_minibatch, play


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(inplace=True), nn.Linear(100, 10))


def lenet() -> nn.Module:
    features = (nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*features, nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


SHAPES = {mlp: (784,), lenet: (1, 28, 28), Skipping: (16,)}


@pytest.mark.parametrize("partitions", [2, 3])
@pytest.mark.parametrize("model", [mlp, lenet])
def test_stages_are_the_whole_model_bit_for_bit(model, partitions):
    torch.manual_seed(0)
    x, y = torch.randn(8, *SHAPES[model]), torch.randint(0, 10, (8,))
    check_equal(model(), (x,), y, Split("stages", partitions), atol=0)


@pytest.mark.parametrize("partitions", [2, 3, 4, 5])
def test_what_skips_goes_from_its_producer_to_each_partition_once(partitions):
    torch.manual_seed(0)
    model = Skipping().double()
    x, y = torch.randn(6, 16, dtype=torch.float64), torch.randint(0, 10, (6,))
    played = check_equal(model, (x,), y, Split("stages", partitions))
    forward = [one.transfer for one in played.gave if one.direction is Pass.FORWARD]
    assert len({(one.value, one.target) for one in forward}) == len(forward)
    first = [one for one in forward if one.source == 0]
    assert sorted(one.target for one in first if one.value == first[0].value) == list(range(1, partitions))


def test_one_message_crosses_between_two_stages_of_the_mlp_each_way():
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
    played = play_split(mlp(), (x,), y, Split("stages", 2))
    assert [played.bytes(partition) for partition in (0, 1)] == [64 * 300 * 4] * 2
    assert [len(played.messages(partition)) for partition in (0, 1)] == [1, 1]


@pytest.mark.parametrize("microbatches", [2, 3, 5])
def test_any_number_of_samples_and_of_uneven_microbatches(microbatches):
    torch.manual_seed(0)
    x, y = torch.randn(7, 784, dtype=torch.float64), torch.randint(0, 10, (7,))
    traced_with = (torch.zeros(3, 784, dtype=torch.float64),)
    check_equal(mlp().double(), (x,), y, Split("stages", 2), microbatches=microbatches, traced_with=traced_with)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UsageError, match="--partitions 4: there are 3 layers with parameters"):
        play_split(mlp(), (torch.zeros(2, 784),), torch.zeros(2, dtype=torch.int64), Split("stages", 4))
    with pytest.raises(UsageError, match="did you mean 'stages'"):
        Split("stage", 2)
    with pytest.raises(UsageError, match="partitions=1: a model is split over 2 to"):
        Split("stages", 1)


def test_a_partition_holds_its_own_parameters_and_no_others():
    played = play_split(mlp(), (torch.zeros(2, 784),), torch.zeros(2, dtype=torch.int64), Split("stages", 2))
    names = [sorted(name for name, _ in program.module.named_parameters()) for program in played.programs]
    assert names == [["0.bias", "0.weight"], ["2.bias", "2.weight", "4.bias", "4.weight"]]


def test_partitions_that_wait_for_what_nobody_gives_are_told():
    x, y = torch.zeros(2, 784), torch.zeros(2, dtype=torch.int64)
    second = play_split(mlp(), (x,), y, Split("stages", 2)).programs[1]
    with pytest.raises(LocalProtocolError, match="all partitions wait for each other"):
        play([Passes(second, cut_minibatch((x,), y, 1))], [pipeline("gpipe", second.split.graph).actions[1]])


def test_a_module_that_writes_in_place_does_not_write_to_what_was_received():
    torch.manual_seed(0)
    x, y = torch.randn(4, 784), torch.randint(0, 10, (4,))
    check_equal(mlp(), (x,), y, Split({"[0-2]": 0, "3": 1, "4": 1}, 2), atol=0)
