"""The built-in models: their layers and parameters as they are counted by hand, and data that follow from a seed."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from distbelief.tasks import TensorData, as_data, resolve
from distbelief.zoo.convnets import CLASSES
from distbelief.zoo.gpt import ALPHABET, CONTEXT, TinyGPT
from distbelief.zoo.mnist import MARGIN, LocallyConnected, Pairs, Siamese, contrastive

REAL = Path(os.environ.get("DISTBELIEF_DATA") or Path(__file__).parents[3] / "shared/data/mnist")

PARAMETERS = {
    "alexnet": {
        "conv1": 96 * (3 * 11 * 11 + 1),
        "conv2": 256 * (48 * 5 * 5 + 1),
        "conv3": 384 * (256 * 3 * 3 + 1),
        "conv4": 384 * (192 * 3 * 3 + 1),
        "conv5": 256 * (192 * 3 * 3 + 1),
        "fc1": 4096 * (256 * 6 * 6 + 1),
        "fc2": 4096 * (4096 + 1),
        "fc3": 1000 * (4096 + 1),
    },
    "vgg16": {
        **{
            f"conv{block}_{number}": made * (9 * given + 1)
            for block, widths in enumerate(
                ([3, 64, 64], [64, 128, 128], [128, 256, 256, 256], [256, 512, 512, 512], [512, 512, 512, 512]), 1
            )
            for number, (given, made) in enumerate(itertools.pairwise(widths), 1)
        },
        "fc6": 4096 * (512 * 7 * 7 + 1),
        "fc7": 4096 * (4096 + 1),
        "fc8": 1000 * (4096 + 1),
    },
    "mnist": {"fc1": 300 * (784 + 1), "fc2": 100 * (300 + 1), "fc3": 10 * (100 + 1)},
    "mnist-lenet": {
        "conv1": 20 * (5 * 5 + 1),
        "conv2": 50 * (20 * 5 * 5 + 1),
        "fc1": 500 * (50 * 4 * 4 + 1),
        "fc2": 10 * (500 + 1),
    },
    "mnist-alexnet": {
        "conv1": 20 * (5 * 5 + 1),
        "conv2": 50 * (10 * 5 * 5 + 1),
        "fc1": 500 * (50 * 4 * 4 + 1),
        "fc2": 10 * (500 + 1),
    },
    "mnist-inception": {
        "conv1": 48 * (5 * 5 + 1),
        "inception.path1.conv": 16 * (48 + 1),
        "inception.path3.reduce": 24 * (48 + 1),
        "inception.path3.conv": 32 * (24 * 3 * 3 + 1),
        "inception.path5.reduce": 4 * (48 + 1),
        "inception.path5.conv": 8 * (4 * 5 * 5 + 1),
        "inception.path_pool.project": 8 * (48 + 1),
        "fc1": 10 * ((16 + 32 + 8 + 8) * 7 * 7 + 1),
    },
    "mnist-siamese": {
        "tower.conv1": 20 * (5 * 5 + 1),
        "tower.conv2": 50 * (20 * 5 * 5 + 1),
        "tower.fc1": 500 * (50 * 4 * 4 + 1),
        "tower.fc2": 10 * (500 + 1),
    },
    "mnist-gru": {"gru1": 3 * 128 * (28 + 128 + 2), "gru2": 3 * 128 * (128 + 128 + 2), "fc1": 10 * (128 + 1)},
    "mnist-local": {"local1": 19 * 19 * 8 * (10 * 10 + 1), "fc1": 10 * (8 * 9 * 9 + 1)},
    "gpt-tiny": {
        "": 64 * 64,
        "token": 96 * 64,
        **{
            f"blocks.{block}.{layer}": count
            for block in range(2)
            for layer, count in {
                "norm1": 2 * 64,
                "attention.query": 64 * (64 + 1),
                "attention.key": 64 * (64 + 1),
                "attention.value": 64 * (64 + 1),
                "attention.project": 64 * (64 + 1),
                "norm2": 2 * 64,
                "mlp.fc1": 256 * (64 + 1),
                "mlp.fc2": 64 * (256 + 1),
            }.items()
        },
        "norm": 2 * 64,
        "head": 96 * 64,
    },
    "mnist-squeezenet": {
        "conv1": 20 * (25 + 1),
        "fire2.squeeze.0": 16 * (20 + 1),
        "fire2.one.0": 48 * (16 + 1),
        "fire2.three.0": 48 * (16 * 9 + 1),
        "fire3.squeeze.0": 32 * (96 + 1),
        "fire3.one.0": 64 * (32 + 1),
        "fire3.three.0": 64 * (32 * 9 + 1),
        "fire4.squeeze.0": 32 * (128 + 1),
        "fire4.one.0": 64 * (32 + 1),
        "fire4.three.0": 64 * (32 * 9 + 1),
        "conv5": 10 * (128 + 1),
    },
    "digits": {"fc1": 64 * (64 + 1), "fc2": 10 * (64 + 1)},
}
"""Of each task's model: the parameters of each of its modules that has some of its own."""
TOTAL = {
    "alexnet": 60_965_224, "mnist": 266_610, "mnist-lenet": 431_080, "mnist-alexnet": 418_580,
    "mnist-inception": 42_918, "mnist-squeezenet": 58_370, "mnist-siamese": 431_080,
    "mnist-gru": 161_034, "mnist-local": 298_178,
    "gpt-tiny": 110_336, "digits": 4_810, "vgg16": 138_357_544, "inception-v1": 6_998_552, "squeezenet": 1_248_424,
}  # fmt: skip
"""As they are published, of the last two with biases and without side classifiers; what is tied counts once."""
SHAPES = {
    **dict.fromkeys(("alexnet", "vgg16", "inception-v1", "squeezenet"), ((3, 224, 224), torch.float32)),
    "mnist-alexnet": ((1, 28, 28), torch.float32),
    "mnist-inception": ((1, 28, 28), torch.float32),
    "mnist-squeezenet": ((1, 28, 28), torch.float32),
    "mnist-siamese": ((2, 1, 28, 28), torch.float32),
    "mnist-gru": ((28, 28), torch.float32),
    "mnist-local": ((1, 28, 28), torch.float32),
    "gpt-tiny": ((64,), torch.int64),
}
"""What a sample is."""
CROSSING = {
    "alexnet": {"pool2": 2 * 21_632, "pool5": 2 * 4_608, "fc1": 2 * 2_048, "fc2": 2 * 2_048, "fc3": 2 * 500},
    "mnist-alexnet": {"pool2": 2 * 25 * 4 * 4, "fc1": 2 * 250, "fc2": 10},
}
"""Numbers that a layer gives for a sample, where its two columns meet."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_layers_and_parameters_that_are_counted_by_hand(name: str) -> None:
    with torch.device("meta"):
        model = resolve(name).model()
    found = {layer: sum(p.numel() for p in module.parameters(recurse=False)) for layer, module in model.named_modules()}
    assert {layer: count for layer, count in found.items() if count} == PARAMETERS[name]
    tied = 96 * 64 if name == "gpt-tiny" else 0
    assert sum(PARAMETERS[name].values()) - tied == TOTAL[name]


@pytest.mark.parametrize("name", SHAPES)
def test_its_data_are_of_its_shape_and_the_same_each_time(name: str) -> None:
    task, numbers = resolve(name, str(REAL) if "mnist" in name else None), torch.tensor([7, 0, 7])
    for load in (task.train, task.test):
        assert load is not None
        inputs, targets = as_data(load()).batch(numbers)
        again = as_data(load()).batch(numbers)
        assert (inputs.shape[1:], inputs.dtype) == SHAPES[name]
        assert torch.equal(inputs, again[0])
        assert torch.equal(targets, again[1])
        assert torch.equal(inputs[0], inputs[2])
        assert not torch.equal(inputs[0], inputs[1])


@pytest.mark.parametrize("name", CROSSING)
@pytest.mark.long
def test_the_columns_meet_where_they_should_with_as_many_numbers(name: str) -> None:
    model, sizes = resolve(name).model(), dict[str, int]()
    for layer in CROSSING[name]:
        model.get_submodule(layer).register_forward_hook(
            lambda _, __, output, layer=layer: sizes.update({layer: output[0].numel()})
        )
    with torch.no_grad():
        model(torch.zeros(1, *SHAPES[name][0]))
    assert sizes == CROSSING[name]


def test_images_of_a_class_are_alike_in_both_sets_and_those_of_others_are_not() -> None:
    task = resolve("alexnet")
    (seen, labels), (others, theirs) = (as_data(load()).batch(torch.arange(200)) for load in (task.train, task.test))
    assert int(max(labels.max(), theirs.max())) < CLASSES
    assert abs(float(seen.mean())) < 0.05
    assert abs(float(seen.std()) - 1) < 0.05
    points = [images[:, :, ::8, ::8].flatten(1) for images in (others, seen)]
    near = torch.cdist(*points) / points[0].shape[1] ** 0.5
    same = theirs[:, None] == labels
    assert same.any()
    assert near[same].max() < 0.8 < 1.1 < near[~same].min()


@pytest.mark.parametrize(("patch", "stride", "size"), [(10, 1, (28, 28)), (3, 2, (9, 7)), (5, 5, (11, 5))])
def test_a_locally_connected_layer_has_filters_of_its_own_at_each_place(
    patch: int, stride: int, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer = LocallyConnected(2, 3, size, patch, stride).double()
    maps = torch.randn(4, 2, *size, dtype=torch.float64)
    rows, columns = ((side - patch) // stride + 1 for side in size)
    wanted = torch.empty(4, 3, rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            seen = maps[:, :, row * stride : row * stride + patch, column * stride : column * stride + patch]
            filters = layer.weight[row, column].view(3, 2, patch, patch)
            wanted[:, :, row, column] = torch.tensordot(seen, filters, ([1, 2, 3], [1, 2, 3])) + layer.bias[row, column]
    torch.testing.assert_close(layer(maps), wanted, rtol=1e-12, atol=1e-12)


def test_pairs_say_whether_both_are_of_one_class_and_half_of_them_are() -> None:
    classes = torch.arange(10).repeat(100)
    pairs = Pairs(TensorData(classes.float()[:, None], classes), seed=0)
    both, same = pairs.batch(torch.arange(1000))
    assert both.shape == (1000, 2, 1)
    assert torch.equal(both[:, 0, 0], classes.float())
    assert torch.equal(same, (both[:, 0, 0] == both[:, 1, 0]).float())
    # half of them, and a tenth of the others by chance
    assert abs(float(same.mean()) - 0.55) < 0.05
    assert both[:, 1, 0][same == 0].unique().numel() == 10


def test_the_towers_of_a_siamese_model_share_their_weights_and_are_pulled_by_both_images() -> None:
    torch.manual_seed(0)
    tower = nn.Linear(3, 2).double()
    pairs, same = torch.randn(6, 2, 3, dtype=torch.float64), torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=torch.float64)
    contrastive(Siamese(tower)(pairs), same).backward()
    copies = [nn.Linear(3, 2).double() for _ in range(2)]
    for copy in copies:
        copy.load_state_dict(tower.state_dict())
    # nn.functional.pairwise_distance adds 1e-6 to each difference
    distance = (copies[0](pairs[:, 0]) - copies[1](pairs[:, 1]) + 1e-6).square().sum(1).sqrt()
    loss = sum(d**2 if s else max(MARGIN - d, torch.zeros(())) ** 2 for d, s in zip(distance, same, strict=True)) / 12
    loss.backward()
    for name, parameter in tower.named_parameters():
        both = sum(dict(copy.named_parameters())[name].grad for copy in copies)
        torch.testing.assert_close(parameter.grad, both, rtol=1e-9, atol=1e-12)


def test_a_transformer_sees_only_what_came_before_and_its_last_layer_is_its_embedding() -> None:
    torch.manual_seed(0)
    model = TinyGPT()
    assert model.head.weight is model.token.weight
    characters = torch.randint(len(ALPHABET), (2, CONTEXT))
    changed = characters.clone()
    changed[:, 40] = (changed[:, 40] + 1) % len(ALPHABET)
    with torch.no_grad():
        near = (model(characters) == model(changed)).all(-1)
    assert near[:, :40].all()
    assert not near[:, 40:].any()


def test_the_next_character_is_the_target_and_the_sets_have_nothing_in_common() -> None:
    task = resolve("gpt-tiny")
    assert task.test is not None
    train, test = as_data(task.train()), as_data(task.test())
    seen = [set(map(tuple, data.batch(torch.arange(len(data)))[0].tolist())) for data in (train, test)]
    assert len(seen[0] & seen[1]) < 0.01 * len(seen[1]), "rulers of dashes are alike, hardly anything else"
    assert 8.5 < len(train) / len(test) < 9.5
    inputs, targets = train.batch(torch.arange(10))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    # one window in ten is the test's, and begins with the last character of the one before
    assert torch.equal(targets[8, -1:], test.batch(torch.tensor([1]))[0][0, :1])
