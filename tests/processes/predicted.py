"""Tasks for predictions: models that end the process which computes with them, as often as a folder says."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import distbelief as db

SAMPLES = 50


class Deadly(nn.Module):
    """A linear model whose process is killed at the sample numbered 7, while the folder holds a file."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three numbers for each sample."""
        lives = Path(os.environ["DEATHS"])
        if (x == 7).any():
            for file in sorted(lives.iterdir()):
                file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        outputs: torch.Tensor = self.linear(x)
        return outputs


def data() -> db.TensorData:
    """One number for each sample: which it is."""
    return db.TensorData(torch.arange(float(SAMPLES))[:, None], torch.arange(SAMPLES) % 3)


def deadly() -> db.Task:
    """The task."""
    return db.Task(model=Deadly, train=data, test=data)


class Pairs(nn.Module):
    """A model that answers no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """A list."""
        return [self.linear(x)]


def pairs() -> db.Task:
    """A task whose outputs cannot be written."""
    return db.Task(model=Pairs, train=data, test=data)


def wide() -> db.Task:
    """A task with outputs of another shape."""
    return db.Task(model=lambda: nn.Linear(1, 4), train=data, test=data)


class Layered(nn.Module):
    """Layers that train otherwise than they answer, in the order of their names or the other way round."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.reverse = reverse
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3))
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three numbers for each sample."""
        x = x.expand(-1, 3)
        outputs: torch.Tensor = self.first(self.second(x)) if self.reverse else self.second(self.first(x))
        return outputs


def layered() -> db.Task:
    """The task of a model whose first part is frozen."""
    return db.Task(model=Layered, train=data, test=data)


def split_by_name() -> db.Task:
    """The same task, which brings a split of its own."""
    return replace(layered(), split="first=1,second=0")


def reversed_layers() -> db.Task:
    """The same layers, the other way round."""
    return db.Task(model=lambda: Layered(reverse=True), train=data, test=data)


class Between(nn.Module):
    """Two linear layers and, before one of them, what ends the process that computes there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Deadly() if number == at else nn.Linear(1, 3) for number in range(2)])
        self.at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three numbers for each sample."""
        first, second = self.parts
        outputs: torch.Tensor = second(first(x)[:, :1] * 0 + x)
        return outputs


def second_dies() -> db.Task:
    """The task of a model whose second partition dies."""
    return db.Task(model=lambda: Between(1), train=data, test=data)


class Narrow(nn.Module):
    """Two layers, of which the second refuses many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 3), Few()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three numbers for each sample."""
        outputs: torch.Tensor = self.second(self.first(x))
        return outputs


class Few(nn.Linear):
    """A layer that refuses many samples."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three numbers for each sample."""
        if len(x) > 9:
            raise RuntimeError("too narrow")
        return super().forward(x)


def narrow() -> db.Task:
    """The task of a model that raises."""
    return db.Task(model=Narrow, train=data, test=data)
