"""The built-in models: their layers and parameters as they are counted by hand, and data that follow from a seed."""

import itertools

import pytest
import torch

from distbelief.tasks import as_data, resolve
from distbelief.tasks.images import CLASSES

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
}
"""Of each task's model: the parameters of each of its modules that has some of its own."""
TOTAL = {"alexnet": 60_965_224, "vgg16": 138_357_544, "inception-v1": 6_998_552, "squeezenet": 1_248_424}
"""As they are published, of the last two with biases and without side classifiers."""
SHAPES = dict.fromkeys(TOTAL, ((3, 224, 224), torch.float32))
"""What a sample is."""
CROSSING = {"alexnet": {"pool2": 2 * 21_632, "pool5": 2 * 4_608, "fc1": 2 * 2_048, "fc2": 2 * 2_048, "fc3": 2 * 500}}
"""Numbers that a layer gives for a sample, where its two columns meet."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_layers_and_parameters_that_are_counted_by_hand(name: str) -> None:
    with torch.device("meta"):
        model = resolve(name).model()
    found = {layer: sum(p.numel() for p in module.parameters(recurse=False)) for layer, module in model.named_modules()}
    assert {layer: count for layer, count in found.items() if count} == PARAMETERS[name]


@pytest.mark.parametrize("name", TOTAL)
def test_a_model_has_as_many_parameters_as_are_published_and_tells_its_classes_apart(name: str) -> None:
    with torch.device("meta"):
        model = resolve(name).model()
        assert model(torch.zeros(2, *SHAPES[name][0])).shape == (2, CLASSES)
    assert (
        sum(p.numel() for p in model.parameters())
        == TOTAL[name]
        == sum(PARAMETERS.get(name, {"": TOTAL[name]}).values())
    )


@pytest.mark.parametrize("name", SHAPES)
def test_its_data_are_of_its_shape_and_the_same_each_time(name: str) -> None:
    task, numbers = resolve(name), torch.tensor([7, 0, 7])
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
def test_the_columns_meet_where_they_should_with_as_many_numbers(name: str) -> None:
    model, sizes = resolve(name).model(), {}
    for layer in CROSSING[name]:
        model.get_submodule(layer).register_forward_hook(
            lambda _, __, output, layer=layer: sizes.update({layer: output[0].numel()})
        )
    with torch.no_grad():
        model(torch.zeros(1, *SHAPES[name][0]))
    assert sizes == CROSSING[name]


def test_images_of_a_class_are_alike_in_both_sets_and_those_of_others_are_not() -> None:
    task = resolve("alexnet")
    assert task.test is not None
    (seen, labels), (others, theirs) = (as_data(load()).batch(torch.arange(200)) for load in (task.train, task.test))
    assert int(max(labels.max(), theirs.max())) < CLASSES
    assert abs(float(seen.mean())) < 0.05
    assert abs(float(seen.std()) - 1) < 0.05
    points = [images[:, :, ::8, ::8].flatten(1) for images in (others, seen)]
    near = torch.cdist(*points) / points[0].shape[1] ** 0.5
    same = theirs[:, None] == labels
    assert same.any()
    assert near[same].max() < 0.8 < 1.1 < near[~same].min()
