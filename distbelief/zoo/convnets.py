"""Convolutional networks in their full size on synthetic images of ImageNet's shape, and small ones on MNIST."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from distbelief.tasks.digits import CLASSES as DIGITS
from distbelief.tasks.digits import IMAGE, mnist_task, sequential
from distbelief.tasks.task import Task, TensorData


def vgg16() -> Task:
    """Make the task of VGG-16 (138,357,544 parameters), 13 convolutions of 3x3 and three fully connected layers.

    This is configuration D of Simonyan and Zisserman (2014) without dropout, on the images of `alexnet`.
    """
    return _task("vgg16", _vgg16)


def inception_v1() -> Task:
    """Make the task of Inception v1, or GoogLeNet (6,998,552 parameters), nine modules of four branches.

    This is table 1 of Szegedy et al. (2014) without dropout, normalisations and side classifiers, on the images of
    `alexnet`.
    """
    return _task("inception-v1", _inception_v1)


def squeezenet() -> Task:
    """Make the task of SqueezeNet 1.0 (1,248,424 parameters), eight fire modules without a fully connected layer.

    This is the network of Iandola et al. (2016) without dropout, on the images of `alexnet`.
    """
    return _task("squeezenet", _squeezenet)


def mnist_squeezenet(data_dir: str | None = None) -> Task:
    """Make the task of a small SqueezeNet on MNIST (58,370 parameters), three fire modules.

    It is initialised as by He et al. (2015). Inputs are float32 (n, 1, 28, 28), targets int64 (n,).

    >>> sum(p.numel() for p in mnist_squeezenet().model().parameters())
    58370
    """
    return mnist_task("mnist-squeezenet", _mnist_squeezenet, data_dir, IMAGE)


def _task(reference: str, model: Callable[[], nn.Module]) -> Task:
    return Task(model=model, train=partial(draw, test=False), test=partial(draw, test=True)).named(reference)


def _vgg16() -> nn.Module:
    layers: dict[str, nn.Module] = {}
    channels = 3
    for block, (depth, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for number in range(1, depth + 1):
            layers[f"conv{block}_{number}"] = nn.Conv2d(channels, width, 3, padding=1)
            layers[f"relu{block}_{number}"] = nn.ReLU()
            channels = width
        layers[f"pool{block}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    for number, width in enumerate((512 * 7 * 7, 4096), 6):
        layers[f"fc{number}"] = nn.Linear(width, 4096)
        layers[f"relu{number}"] = nn.ReLU()
    layers["fc8"] = nn.Linear(4096, CLASSES)
    return sequential(**layers)


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
"""Numbers of maps in each module (table 1 of the paper).

In this order: of its input, of 1x1, of the 1x1 before 3x3 and of 3x3, of the 1x1 before 5x5 and of 5x5, and of the 1x1
after the pool.
"""


def _inception_v1() -> nn.Module:
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 64, 7, stride=2, padding=3),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(3, stride=2, ceil_mode=True),
        "conv2": nn.Conv2d(64, 64, 1),
        "relu2": nn.ReLU(),
        "conv3": nn.Conv2d(64, 192, 3, padding=1),
        "relu3": nn.ReLU(),
        "pool2": nn.MaxPool2d(3, stride=2, ceil_mode=True),
    }
    for name, widths in INCEPTIONS.items():
        layers[f"inception{name}"] = Inception(*widths)
        if name in ("3b", "4e"):
            layers[f"pool{name[0]}"] = nn.MaxPool2d(3, stride=2, ceil_mode=True)
    layers |= {"average": nn.AvgPool2d(7), "flatten": nn.Flatten(), "fc": nn.Linear(1024, CLASSES)}
    return sequential(**layers)


class _Fire(nn.Module):
    """A fire module: a squeezing 1x1, followed by expanding 1x1 and 3x3 side by side."""

    def __init__(self, maps: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(maps, squeezed, 1), nn.ReLU())
        self.one = nn.Sequential(nn.Conv2d(squeezed, expanded, 1), nn.ReLU())
        self.three = nn.Sequential(nn.Conv2d(squeezed, expanded, 3, padding=1), nn.ReLU())

    def forward(self, maps: Tensor) -> Tensor:
        squeezed = self.squeeze(maps)
        return torch.cat([self.one(squeezed), self.three(squeezed)], 1)


def _squeezenet() -> nn.Module:
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 96, 7, stride=2),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(3, stride=2, ceil_mode=True),
    }
    maps = 96
    for number in range(2, 10):
        # 128 maps at first, and 128 more with every second module; an eighth of them are squeezed maps
        expanded = 64 * (number // 2)
        layers[f"fire{number}"] = _Fire(maps, expanded // 4, expanded)
        maps = 2 * expanded
        if number in (4, 8):
            layers[f"pool{number}"] = nn.MaxPool2d(3, stride=2, ceil_mode=True)
    layers |= {"conv10": nn.Conv2d(512, CLASSES, 1), "relu10": nn.ReLU()}
    layers |= {"average": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return sequential(**layers)


def _mnist_squeezenet() -> nn.Module:
    layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(1, 20, 5), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2)}
    layers |= {"fire2": _Fire(20, 16, 48), "pool2": nn.MaxPool2d(2)}
    layers |= {"fire3": _Fire(96, 32, 64), "fire4": _Fire(128, 32, 64)}
    layers |= {"conv5": nn.Conv2d(128, DIGITS, 1), "average": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    model = sequential(**layers)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


CLASSES, SIDE = 1_000, 224
SAMPLES, TEST_SAMPLES = 1_024, 256
COARSE, FINE = 7, 28
"""Blocks on a side of the pattern of a class, and of a stored image."""
NOISE = 32.0
"""Standard deviation of an image's blocks from the pattern of its class, of 255."""


def draw(test: bool) -> TensorData:
    """Draw 1,024 synthetic images to train on, or 256 to test: float32 (n, 3, 224, 224), with targets int64 (n,).

    A class is a pattern of 7x7 colours, to which each sample adds noise.

    >>> draw(test=True).batch(torch.tensor([3]))[0].shape
    torch.Size([1, 3, 224, 224])
    """
    patterns = torch.randint(256, (CLASSES, 3, COARSE, COARSE), generator=torch.Generator().manual_seed(0))
    chance, samples = torch.Generator().manual_seed(1 + test), TEST_SAMPLES if test else SAMPLES
    labels = torch.randint(CLASSES, (samples,), generator=chance)
    noise = NOISE * torch.randn(samples, 3, FINE, FINE, generator=chance)
    images = (_enlarge(patterns[labels], FINE) + noise).clamp(0, 255).byte()
    return TensorData(images, labels, _prepare)


def _prepare(images: Tensor) -> Tensor:
    """Convert blocks of bytes to pixels of float32, of about mean 0 and deviation 1."""
    return _enlarge(images.float().sub_(127.5).div_(74.0), SIDE)


def _enlarge(images: Tensor, side: int) -> Tensor:
    times = side // images.shape[-1]
    return images.repeat_interleave(times, -1).repeat_interleave(times, -2)


class Inception(nn.Module):
    """An Inception module: four paths over the same input, whose outputs are concatenated (Szegedy et al. 2014).

    The paths are 1x1; 1x1 and then 3x3; 1x1 and then 5x5; and a 3x3 maximum and then 1x1 (figure 2b). The arguments
    are numbers of maps: of the input, and of each path. Those of the second and third path are the numbers after the
    reduction and at the end.

    Input float32 of shape (n, maps, height, width); output of the same height and width.

    >>> Inception(48, 16, (24, 32), (4, 8), 8)(torch.zeros(2, 48, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """

    def __init__(self, maps: int, first: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.path1 = sequential(conv=nn.Conv2d(maps, first, 1), relu=nn.ReLU())
        self.path3 = _reduced(maps, three, 3)
        self.path5 = _reduced(maps, five, 5)
        self.path_pool = sequential(
            pool=nn.MaxPool2d(3, stride=1, padding=1),
            project=nn.Conv2d(maps, pool, 1),
            relu=nn.ReLU(),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Concatenate the maps of the four paths."""
        return torch.cat([self.path1(maps), self.path3(maps), self.path5(maps), self.path_pool(maps)], 1)


def _reduced(maps: int, path: tuple[int, int], side: int) -> nn.Module:
    reduced, output = path
    return sequential(
        reduce=nn.Conv2d(maps, reduced, 1),
        relu=nn.ReLU(),
        conv=nn.Conv2d(reduced, output, side, padding=side // 2),
        relu2=nn.ReLU(),
    )


def mnist_inception(data_dir: str | None = None) -> Task:
    """Make the task of a convolution and an Inception module on MNIST (42,918 parameters).

    The module has a quarter of the maps of GoogLeNet's (3a). Inputs are float32 (n, 1, 28, 28), targets int64 (n,).

    >>> sum(p.numel() for p in mnist_inception().model().parameters())
    42918
    """
    return mnist_task(
        "mnist-inception",
        lambda: sequential(
            conv1=nn.Conv2d(1, 48, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            inception=Inception(48, 16, (24, 32), (4, 8), 8),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * 7 * 7, DIGITS),
        ),
        data_dir,
        IMAGE,
    )


def alexnet() -> Task:
    """Make the task of AlexNet with its two columns (60,965,224 parameters), on synthetic images of 1000 classes.

    A column has half of the filters of each convolution. It sees the other column only before the third convolution and
    the fully connected layers (Krizhevsky, Sutskever, Hinton 2012, figure 2): `groups=2` in the second, fourth and
    fifth. Dropout and the normalisation over neighbouring maps, which have no parameters, are left out.

    Inputs are float32 (n, 3, 224, 224), targets int64 (n,): 1,024 samples to train on, 256 to test, from a seed.

    >>> import torch
    >>> [part().batch(torch.tensor([3]))[0].shape for part in (alexnet().train, alexnet().test)]
    [torch.Size([1, 3, 224, 224]), torch.Size([1, 3, 224, 224])]
    """
    return _task("alexnet", convolutional)


def mnist_alexnet(data_dir: str | None = None) -> Task:
    """Make the task of a small AlexNet on MNIST (418,580 parameters), with two columns of 10 and 25 filters each.

    They meet before the first fully connected layer. Inputs are float32 (n, 1, 28, 28), targets int64 (n,).

    >>> sum(p.numel() for p in mnist_alexnet().model().parameters())
    418580
    """
    return mnist_task(
        "mnist-alexnet",
        lambda: sequential(
            conv1=nn.Conv2d(1, 20, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(20, 50, 5, groups=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(50 * 4 * 4, 500),
            relu3=nn.ReLU(),
            fc2=nn.Linear(500, DIGITS),
        ),
        data_dir,
        IMAGE,
    )


def convolutional(filters: Sequence[int] = (96, 256, 384, 384, 256), columns: int = 2) -> nn.Module:
    """Build AlexNet for images (n, 3, 224, 224), from the numbers of filters of its convolutions, and of columns.

    >>> sum(p.numel() for p in convolutional().parameters())
    60965224
    """
    first, two, three, four, five = filters
    return sequential(
        conv1=nn.Conv2d(3, first, 11, stride=4, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(3, stride=2),
        conv2=nn.Conv2d(first, two, 5, padding=2, groups=columns),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(3, stride=2),
        conv3=nn.Conv2d(two, three, 3, padding=1),
        relu3=nn.ReLU(),
        conv4=nn.Conv2d(three, four, 3, padding=1, groups=columns),
        relu4=nn.ReLU(),
        conv5=nn.Conv2d(four, five, 3, padding=1, groups=columns),
        relu5=nn.ReLU(),
        pool5=nn.MaxPool2d(3, stride=2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(five * 6 * 6, 4096),
        relu6=nn.ReLU(),
        fc2=nn.Linear(4096, 4096),
        relu7=nn.ReLU(),
        fc3=nn.Linear(4096, CLASSES),
    )
