"""Tasks on MNIST with other models: recurrent, locally connected, and two towers over pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distbelief.tasks.digits import CLASSES, IMAGE, lenet, load_mnist, mnist_task, sequential
from distbelief.tasks.task import Task, TensorData

HIDDEN = 128


class StackedGRU(nn.Module):
    """Two GRUs, the second over the states of the first, and a linear layer over its last state.

    Input float32 of shape (n, steps, width); output float32 of shape (n, classes).
    """

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gru1 = nn.GRU(width, hidden, batch_first=True)
        self.gru2 = nn.GRU(hidden, hidden, batch_first=True)
        self.fc1 = nn.Linear(hidden, classes)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the scores of each class from the state after the last row."""
        states, _ = self.gru1(rows)
        states, _ = self.gru2(states)
        scores: Tensor = self.fc1(states[:, -1])
        return scores


def mnist_gru(data_dir: str | None = None) -> Task:
    """Make the task of two stacked GRUs of 128 units over the 28 rows of an image (161,034 parameters).

    Inputs are float32 (n, 28, 28), targets int64 (n,).

    >>> sum(p.numel() for p in mnist_gru().model().parameters())
    161034
    """
    return mnist_task("mnist-gru", partial(StackedGRU, 28, HIDDEN, CLASSES), data_dir, (28, 28))


PATCH, MAPS = 10, 8


def _rows(call: Any) -> Any:
    """Divide a layer by rows of its output: a partition has their filters, and takes the rows of the input they see."""
    layer = call.layer

    def seen(start: int, stop: int) -> tuple[int, int, int]:
        return 2, start * layer.stride, (stop - 1) * layer.stride + layer.patch

    return call.sections(2, seen, {"weight": 0, "bias": 0}, lambda start, stop: {"rows": stop - start})


class LocallyConnected(nn.Module):
    """Convolution with different filters at each position of the output (DistBelief, section 5).

    Input of shape (n, maps, height, width); output of shape (n, filters, rows, columns), as of `nn.Conv2d` without
    padding. The parameters of a row are consecutive: `weight` has shape (rows, columns, filters, maps * patch * patch),
    `bias` (rows, columns, filters). Both are initialised as in `nn.Conv2d`.

    `size` is the height and width of the input, `patch` those of a filter, and `stride` the distance between patches.

    >>> layer = LocallyConnected(1, 8, (28, 28), 10)
    >>> layer(torch.zeros(2, 1, 28, 28)).shape, sum(p.numel() for p in layer.parameters())
    (torch.Size([2, 8, 19, 19]), 291688)
    """

    divisions: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"regions": _rows}
    """Divisions over partitions by way, as `distbelief.split.register` takes them."""

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
        """Apply the filters of each position to its patch."""
        patches = nn.functional.unfold(maps, self.patch, stride=self.stride).permute(2, 1, 0)
        values = torch.baddbmm(self.bias.flatten(0, 1).unsqueeze(-1), self.weight.flatten(0, 1), patches)
        out: Tensor = values.permute(2, 1, 0).unflatten(-1, (self.rows, self.columns))
        return out


def mnist_local(data_dir: str | None = None) -> Task:
    """Make the task of a locally connected layer of 8 filters at 19x19 positions (298,178 parameters).

    Inputs are float32 (n, 1, 28, 28), targets int64 (n,).

    >>> sum(p.numel() for p in mnist_local().model().parameters())
    298178
    """
    return mnist_task(
        "mnist-local",
        lambda: sequential(
            local1=LocallyConnected(1, MAPS, (28, 28), PATCH),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(3, stride=2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(MAPS * 9 * 9, CLASSES),
        ),
        data_dir,
        IMAGE,
    )


MARGIN = 4.0
"""Distance to which the loss pushes different digits."""


class Siamese(nn.Module):
    """Two towers with shared weights, which map the images of a pair to points; the output is their distance.

    Input float32 of shape (n, 2, ...); output float32 of shape (n,), 0 or more.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pairs: Tensor) -> Tensor:
        """Compute the Euclidean distance of each pair."""
        return nn.functional.pairwise_distance(self.tower(pairs[:, 0]), self.tower(pairs[:, 1]))


class Pairs:
    """Pairs of each sample of a data set with a partner from a seed; half of the partners are of the same class."""

    def __init__(self, data: TensorData, seed: int) -> None:
        chance, classes = torch.Generator().manual_seed(seed), data.targets
        self.data, self.partners = data, torch.randint(len(data), (len(data),), generator=chance)
        alike = torch.rand(len(data), generator=chance) < 0.5
        for number in classes.unique():
            mine, members = (alike & (classes == number)).nonzero()[:, 0], (classes == number).nonzero()[:, 0]
            self.partners[mine] = members[torch.randint(len(members), (len(mine),), generator=chance)]
        # a partner that is drawn from all classes may be of the same class
        self.same = (classes[self.partners] == classes).float()

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return pairs, float32 of shape (n, 2, ...), and 1 for pairs of one class, float32 of shape (n,)."""
        images, others = self.data.batch(indices)[0], self.data.batch(self.partners[indices])[0]
        return torch.stack([images, others], 1), self.same[indices]


def contrastive(distance: Tensor, same: Tensor) -> Tensor:
    """Compute the contrastive loss (Hadsell, Chopra, LeCun 2006, equation 4), the mean over the pairs.

    It pulls pairs of one class together, and pushes others apart up to `MARGIN`.

    >>> contrastive(torch.tensor([2.0, 3.0, 5.0]), torch.tensor([1.0, 0.0, 0.0]))
    tensor(0.8333)
    """
    apart = nn.functional.relu(MARGIN - distance)
    return (same * distance.square() + (1 - same) * apart.square()).mean() / 2


def told_apart(distance: Tensor, same: Tensor) -> Tensor:
    """Count the pairs that a threshold of half the margin classifies correctly.

    >>> told_apart(torch.tensor([1.0, 1.0, 3.0]), torch.tensor([1.0, 0.0, 0.0]))
    tensor(2)
    """
    return ((distance < MARGIN / 2) == same.bool()).sum()


def mnist_siamese(data_dir: str | None = None) -> Task:
    """Make the task of two LeNet towers with shared weights (431,080 parameters) on pairs of MNIST's images.

    Inputs are float32 (n, 2, 1, 28, 28), targets float32 (n,): 1 if both show the same digit. The accuracy is that of a
    threshold of half the margin.

    >>> sum(p.numel() for p in mnist_siamese().model().parameters())
    431080
    """
    return Task(
        data_dir=data_dir,
        model=lambda: Siamese(lenet()),
        train=lambda: Pairs(load_mnist(data_dir, IMAGE, "train"), seed=0),
        test=lambda: Pairs(load_mnist(data_dir, IMAGE, "t10k"), seed=0),
        loss=contrastive,
        metric=told_apart,
    ).named("mnist-siamese")
