"""The tasks `alexnet`, the two columns of 2012 on images that are made here, and `mnist-alexnet`, a small one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from torch import nn

from distbelief.tasks.mnist import IMAGE, mnist_task
from distbelief.tasks.task import Task
from distbelief.zoo.images import CLASSES, draw


def alexnet() -> Task:
    """AlexNet of 2012 with its two columns (60,965,224 parameters), on synthetic images of its shapes and 1000 classes.

    A column has half of the filters of each convolution and sees the other one's only before the third and the fully
    connected layers (Krizhevsky, Sutskever, Hinton 2012, figure 2): `groups=2` in the second, fourth and fifth. Dropout
    and the normalisation over neighbouring maps, which have no parameters, are left out.

    Inputs are float32 of shape (n, 3, 224, 224), targets int64 of shape (n,): 1,024 samples to train on, 256 to test,
    which follow from a seed (`images.draw`).

    >>> import torch
    >>> [part().batch(torch.tensor([3]))[0].shape for part in (alexnet().train, alexnet().test)]
    [torch.Size([1, 3, 224, 224]), torch.Size([1, 3, 224, 224])]
    """
    return Task(model=convolutional, train=partial(draw, test=False), test=partial(draw, test=True)).named("alexnet")


def mnist_alexnet(data_dir: str | None = None) -> Task:
    """A small AlexNet on MNIST (418,580 parameters): columns of 10 and 25 filters each, then of 250 neurons.

    They meet before the first fully connected layer. Inputs are float32 (n, 1, 28, 28), targets int64 (n,).

    Args:
        data_dir: As for `mnist`.

    >>> sum(p.numel() for p in mnist_alexnet().model().parameters())
    418580
    """
    return mnist_task("mnist-alexnet", _small, data_dir, IMAGE)


def convolutional(filters: Sequence[int] = (96, 256, 384, 384, 256), columns: int = 2) -> nn.Module:
    """AlexNet's layers, for images (n, 3, 224, 224), with so many filters in each convolution and so many columns.

    >>> sum(p.numel() for p in convolutional().parameters())
    60965224
    """
    one, two, three, four, five = filters
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, one, 11, stride=4, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(3, stride=2),
            conv2=nn.Conv2d(one, two, 5, padding=2, groups=columns),
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
    )


def _small() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 20, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(20, 50, 5, groups=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(50 * 4 * 4, 500),
            relu3=nn.ReLU(),
            fc2=nn.Linear(500, 10),
        )
    )
