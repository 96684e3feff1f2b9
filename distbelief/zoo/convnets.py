"""The tasks `vgg16`, `inception-v1` and `squeezenet`: convolutional networks of 2014 to 2016 in their real shapes, on
images that are made here; and `mnist-squeezenet`, small, on MNIST.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from distbelief.tasks.mnist import CLASSES as DIGITS
from distbelief.tasks.mnist import IMAGE, mnist_task
from distbelief.tasks.task import Task
from distbelief.zoo.images import CLASSES, draw
from distbelief.zoo.inception import Inception


def vgg16() -> Task:
    """VGG-16 (138,357,544 parameters): 13 convolutions of 3x3 and three fully connected layers (Simonyan, Zisserman
    2014, configuration D), without its dropout, on synthetic images as `alexnet`'s.
    """
    return _task("vgg16", _vgg16)


def inception_v1() -> Task:
    """Inception v1, also GoogLeNet (6,998,552 parameters): nine modules of four branches (Szegedy et al. 2014, table
    1), without its dropout, normalisations and side classifiers, on synthetic images as `alexnet`'s.
    """
    return _task("inception-v1", _inception_v1)


def squeezenet() -> Task:
    """SqueezeNet 1.0 (1,248,424 parameters): eight fire modules and no fully connected layer (Iandola et al. 2016),
    without its dropout, on synthetic images as `alexnet`'s.
    """
    return _task("squeezenet", _squeezenet)


def mnist_squeezenet(data_dir: str | None = None) -> Task:
    """A small SqueezeNet on MNIST (58,370 parameters): three fire modules and no fully connected layer, begun as He et
    al. (2015) do; inputs float32 (n, 1, 28, 28), targets int64 (n,).

    Args:
        data_dir: as for `mnist`.

    >>> sum(p.numel() for p in mnist_squeezenet().model().parameters())
    58370
    """
    return mnist_task("mnist-squeezenet", _mnist_squeezenet, data_dir, IMAGE)


def _task(reference: str, model: Callable[[], nn.Module]) -> Task:
    return Task(model=model, train=partial(draw, test=False), test=partial(draw, test=True)).named(reference)


def _vgg16() -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for block, (depth, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for number in range(1, depth + 1):
            layers[f"conv{block}_{number}"] = nn.Conv2d(channels, width, 3, padding=1)
            layers[f"relu{block}_{number}"] = nn.ReLU()
            channels = width
        layers[f"pool{block}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    for number, (given, made) in enumerate(((512 * 7 * 7, 4096), (4096, 4096)), 6):
        layers[f"fc{number}"] = nn.Linear(given, made)
        layers[f"relu{number}"] = nn.ReLU()
    layers["fc8"] = nn.Linear(4096, CLASSES)
    return nn.Sequential(layers)


INCEPTIONS = {
    "3a": (192, 64, (96, 128), (16, 32), 32),
    "3b": (256, 128, (128, 192), (32, 96), 64),
    "4a": (480, 192, (96, 208), (16, 48), 64),
    "4b": (512, 160, (112, 224), (24, 64), 64),
    "4c": (512, 128, (128, 256), (24, 64), 64),
    "4d": (512, 112, (144, 288), (32, 64), 64),
    "4e": (528, 256, (160, 320), (32, 128), 128),
    "5a": (832, 256, (160, 320), (32, 128), 128),
    "5b": (832, 384, (192, 384), (48, 128), 128),
}
"""Maps of each module: those it is given, those of 1x1, of the 1x1 before 3x3 and of 3x3, of the 1x1 before 5x5 and of
5x5, and of the 1x1 after the pool (table 1 of the paper).
"""


def _inception_v1() -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, stride=2, padding=3),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(3, stride=2, ceil_mode=True),
        conv2=nn.Conv2d(64, 64, 1),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(64, 192, 3, padding=1),
        relu3=nn.ReLU(),
        pool2=nn.MaxPool2d(3, stride=2, ceil_mode=True),
    )
    for name, widths in INCEPTIONS.items():
        layers[f"inception{name}"] = Inception(*widths)
        if name in ("3b", "4e"):
            layers[f"pool{name[0]}"] = nn.MaxPool2d(3, stride=2, ceil_mode=True)
    layers |= {"average": nn.AvgPool2d(7), "flatten": nn.Flatten(), "fc": nn.Linear(1024, CLASSES)}
    return nn.Sequential(layers)


class _Fire(nn.Module):
    """A squeezing 1x1, and expanding 1x1 and 3x3 on what it makes."""

    def __init__(self, given: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(given, squeezed, 1), nn.ReLU())
        self.one = nn.Sequential(nn.Conv2d(squeezed, expanded, 1), nn.ReLU())
        self.three = nn.Sequential(nn.Conv2d(squeezed, expanded, 3, padding=1), nn.ReLU())

    def forward(self, maps: Tensor) -> Tensor:
        squeezed = self.squeeze(maps)
        return torch.cat([self.one(squeezed), self.three(squeezed)], 1)


def _squeezenet() -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 96, 7, stride=2), relu1=nn.ReLU(), pool1=nn.MaxPool2d(3, stride=2, ceil_mode=True)
    )
    given = 96
    for number in range(2, 10):
        # from 128 maps on, 128 more with every second module; an eighth as many are squeezed to
        expanded = 64 * (number // 2)
        layers[f"fire{number}"] = _Fire(given, expanded // 4, expanded)
        given = 2 * expanded
        if number in (4, 8):
            layers[f"pool{number}"] = nn.MaxPool2d(3, stride=2, ceil_mode=True)
    layers |= {"conv10": nn.Conv2d(512, CLASSES, 1), "relu10": nn.ReLU()}
    layers |= {"average": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return nn.Sequential(layers)


def _mnist_squeezenet() -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=nn.Conv2d(1, 20, 5), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2))
    layers |= {"fire2": _Fire(20, 16, 48), "pool2": nn.MaxPool2d(2)}
    layers |= {"fire3": _Fire(96, 32, 64), "fire4": _Fire(128, 32, 64)}
    layers |= {"conv5": nn.Conv2d(128, DIGITS, 1), "average": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    model = nn.Sequential(layers)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model
