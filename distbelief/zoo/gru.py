"""The task `mnist-gru`: an image's rows as a sequence, through two recurrent layers, one on top of the other."""

from __future__ import annotations

from torch import Tensor, nn

from distbelief.tasks.mnist import CLASSES, mnist_task
from distbelief.tasks.task import Task

HIDDEN = 128


class StackedGRU(nn.Module):
    """Two GRUs, the second over the states of the first, and a layer over its last state.

    Input float32 of shape (n, steps, width); output float32 of shape (n, classes).
    """

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gru1 = nn.GRU(width, hidden, batch_first=True)
        self.gru2 = nn.GRU(hidden, hidden, batch_first=True)
        self.fc1 = nn.Linear(hidden, classes)

    def forward(self, rows: Tensor) -> Tensor:
        """The scores of each class, of the state after the last row."""
        states, _ = self.gru1(rows)
        states, _ = self.gru2(states)
        scores: Tensor = self.fc1(states[:, -1])
        return scores


def mnist_gru(data_dir: str | None = None) -> Task:
    """Two stacked GRUs of 128 units over an image's 28 rows (161,034 parameters).

    Inputs are float32 (n, 28, 28), targets int64 (n,).

    Args:
        data_dir: As for `mnist`.

    >>> sum(p.numel() for p in mnist_gru().model().parameters())
    161034
    """
    return mnist_task("mnist-gru", _model, data_dir, (28, 28))


def _model() -> nn.Module:
    return StackedGRU(28, HIDDEN, CLASSES)
