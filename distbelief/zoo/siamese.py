"""The task `mnist-siamese`: whether two images show the same digit, by two towers that share their weights."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from distbelief.tasks.mnist import IMAGE, lenet, load_mnist
from distbelief.tasks.task import Task, TensorData

MARGIN = 4.0
"""Wanted distance between the points of two different digits."""


class Siamese(nn.Module):
    """One tower that both images of a pair go through; gives how far apart their points lie.

    Input float32 of shape (n, 2, ...); output float32 of shape (n,), 0 or more.

    Args:
        tower: from an image to a point.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pairs: Tensor) -> Tensor:
        """The Euclidean distance of each pair."""
        return nn.functional.pairwise_distance(self.tower(pairs[:, 0]), self.tower(pairs[:, 1]))


class Pairs:
    """Each sample of a data set beside another one, half of which are of its class: seeded, once and for all.

    Args:
        data: targets are classes.
        seed: of who is beside whom.
    """

    def __init__(self, data: TensorData, seed: int) -> None:
        chance, classes = torch.Generator().manual_seed(seed), data.targets
        self.data, self.partners = data, torch.randint(len(data), (len(data),), generator=chance)
        alike = torch.rand(len(data), generator=chance) < 0.5
        for number in classes.unique():
            mine, members = (alike & (classes == number)).nonzero()[:, 0], (classes == number).nonzero()[:, 0]
            self.partners[mine] = members[torch.randint(len(members), (len(mine),), generator=chance)]
        # one that was drawn among all is of the same class now and then
        self.same = (classes[self.partners] == classes).float()

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs, float32 of shape (n, 2, ...), and 1 where both are of one class, float32 of shape (n,)."""
        images, others = self.data.batch(indices)[0], self.data.batch(self.partners[indices])[0]
        return torch.stack([images, others], 1), self.same[indices]


def contrastive(distance: Tensor, same: Tensor) -> Tensor:
    """The contrastive loss (Hadsell, Chopra, LeCun 2006, equation 4): the mean over the pairs.

    What is the same is pulled together, what is not is pushed apart until it is `MARGIN` away.

    >>> contrastive(torch.tensor([2.0, 3.0, 5.0]), torch.tensor([1.0, 0.0, 0.0]))
    tensor(0.8333)
    """
    apart = nn.functional.relu(MARGIN - distance)
    return (same * distance.square() + (1 - same) * apart.square()).mean() / 2


def told_apart(distance: Tensor, same: Tensor) -> Tensor:
    """Count the pairs that are nearer than half the margin if and only if they are of one class.

    >>> told_apart(torch.tensor([1.0, 1.0, 3.0]), torch.tensor([1.0, 0.0, 0.0]))
    tensor(2)
    """
    return ((distance < MARGIN / 2) == same.bool()).sum()


def mnist_siamese(data_dir: str | None = None) -> Task:
    """Two towers of one LeNet (431,080 parameters, once) on pairs of MNIST's images, with the contrastive loss.

    Inputs are float32 (n, 2, 1, 28, 28), targets float32 (n,): 1 where both show the same digit. The accuracy is that
    of telling so at half the margin.

    Args:
        data_dir: As for `mnist`.

    >>> sum(p.numel() for p in mnist_siamese().model().parameters())
    431080
    """
    load = partial(_load, data_dir)
    return Task(
        data_dir=data_dir,
        model=_model,
        train=partial(load, "train"),
        test=partial(load, "t10k"),
        loss=contrastive,
        metric=told_apart,
    ).named("mnist-siamese")


def _model() -> nn.Module:
    return Siamese(lenet())


def _load(data_dir: str | None, part: Literal["train", "t10k"]) -> Pairs:
    return Pairs(load_mnist(data_dir, IMAGE, part), seed=0)
