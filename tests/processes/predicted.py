"""Tasks for predictions: models that end the process which computes with them, as often as a folder says."""

import os
import signal
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
