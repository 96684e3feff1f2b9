"""The task `mnist-inception`: four paths side by side, those with large filters behind a reduction of dimensions."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from distbelief.tasks.mnist import IMAGE, mnist_task
from distbelief.tasks.task import Task


class Inception(nn.Module):
    """Four paths over the same maps, whose maps are put side by side (Szegedy et al. 2014, figure 2b).

    They are of filters 1x1; 1x1 and then 3x3; 1x1 and then 5x5; a 3x3 maximum and then 1x1.

    Input float32 of shape (n, maps, height, width); output of the same height and width, of as many maps as the paths
    have together.

    Args:
        maps: of the input.
        one: maps of the first path.
        three: maps of the second, after its reduction and at its end.
        five: maps of the third, likewise.
        pool: maps of the fourth.

    >>> Inception(48, 16, (24, 32), (4, 8), 8)(torch.zeros(2, 48, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """

    def __init__(self, maps: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.path1 = nn.Sequential(OrderedDict(conv=nn.Conv2d(maps, one, 1), relu=nn.ReLU()))
        self.path3 = _reduced(maps, three, 3)
        self.path5 = _reduced(maps, five, 5)
        self.path_pool = nn.Sequential(
            OrderedDict(
                pool=nn.MaxPool2d(3, stride=1, padding=1),
                project=nn.Conv2d(maps, pool, 1),
                relu=nn.ReLU(),
            )
        )

    def forward(self, maps: Tensor) -> Tensor:
        """The maps of the four paths, one behind the other."""
        return torch.cat([self.path1(maps), self.path3(maps), self.path5(maps), self.path_pool(maps)], 1)


def _reduced(maps: int, path: tuple[int, int], side: int) -> nn.Module:
    reduced, own = path
    return nn.Sequential(
        OrderedDict(
            reduce=nn.Conv2d(maps, reduced, 1),
            relu=nn.ReLU(),
            conv=nn.Conv2d(reduced, own, side, padding=side // 2),
            relu2=nn.ReLU(),
        )
    )


def mnist_inception(data_dir: str | None = None) -> Task:
    """A convolution and an Inception module on MNIST (42,918 parameters); its maps are a quarter of GoogLeNet's (3a).

    Inputs are float32 (n, 1, 28, 28), targets int64 (n,).

    Args:
        data_dir: As for `mnist`.

    >>> sum(p.numel() for p in mnist_inception().model().parameters())
    42918
    """
    return mnist_task("mnist-inception", _model, data_dir, IMAGE)


def _model() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 48, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            inception=Inception(48, 16, (24, 32), (4, 8), 8),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * 7 * 7, 10),
        )
    )
