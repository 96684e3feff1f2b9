"""The task `mnist-local`: a locally connected layer, of which every place of the image has filters of its own."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distbelief.tasks.mnist import CLASSES, IMAGE, mnist_task
from distbelief.tasks.task import Task

PATCH, MAPS = 10, 8


def _rows(call: Any) -> Any:
    """Each partition has some rows of the output, with their filters, and takes the rows of the input that these
    see.
    """
    layer = call.layer

    def seen(start: int, stop: int) -> tuple[int, int, int]:
        return 2, start * layer.stride, (stop - 1) * layer.stride + layer.patch

    return call.sections(2, seen, {"weight": 0, "bias": 0}, lambda start, stop: {"rows": stop - start})


class LocallyConnected(nn.Module):
    """A convolution whose filters are not shared: each place of the output has its own (DistBelief, section 5).

    Input of shape (n, maps, height, width); output of shape (n, filters, rows, columns), as `nn.Conv2d` without padding
    has them. What a row of the output has of the parameters is consecutive: `weight` is of shape (rows, columns,
    filters, maps * patch * patch), `bias` of shape (rows, columns, filters); both begin as those of `nn.Conv2d`.

    Args:
        maps: of the input.
        filters: at each place.
        size: height and width of the input.
        patch: side of what a filter sees.
        stride: from one patch to the next.

    >>> layer = LocallyConnected(1, 8, (28, 28), 10)
    >>> layer(torch.zeros(2, 1, 28, 28)).shape, sum(p.numel() for p in layer.parameters())
    (torch.Size([2, 8, 19, 19]), 291688)
    """

    divisions: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"regions": _rows}
    """Divisions over processes: by ways, as `distbelief.split.register` takes them."""

    def __init__(self, maps: int, filters: int, size: tuple[int, int], patch: int, stride: int = 1) -> None:
        super().__init__()
        self.patch, self.stride = patch, stride
        self.rows, self.columns = ((side - patch) // stride + 1 for side in size)
        seen = maps * patch * patch
        self.weight = nn.Parameter(torch.empty(self.rows, self.columns, filters, seen))
        self.bias = nn.Parameter(torch.empty(self.rows, self.columns, filters))
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -1 / math.sqrt(seen), 1 / math.sqrt(seen))

    def forward(self, maps: Tensor) -> Tensor:
        """Apply each place's filters to its patch."""
        patches = nn.functional.unfold(maps, self.patch, stride=self.stride).permute(2, 1, 0)
        made = torch.baddbmm(self.bias.flatten(0, 1).unsqueeze(-1), self.weight.flatten(0, 1), patches)
        out: Tensor = made.permute(2, 1, 0).unflatten(-1, (self.rows, self.columns))
        return out


def mnist_local(data_dir: str | None = None) -> Task:
    """8 filters of 10x10 pixels at each of 19x19 places, their maxima, and a layer (298,178 parameters).

    Inputs are float32 (n, 1, 28, 28), targets int64 (n,).

    Args:
        data_dir: As for `mnist`.

    >>> sum(p.numel() for p in mnist_local().model().parameters())
    298178
    """
    return mnist_task("mnist-local", _model, data_dir, IMAGE)


def _model() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            local1=LocallyConnected(1, MAPS, (28, 28), PATCH),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(3, stride=2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(MAPS * 9 * 9, CLASSES),
        )
    )
