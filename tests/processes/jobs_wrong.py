"""Tasks with which something is wrong."""

import os
import sys

import jobs
import torch
from torch import nn

from distbelief.tasks import Task


class _Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(8, 4), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps > 3:
            raise ValueError("three is enough")
        return self.linear(inputs)  # type: ignore[no-any-return]


class _Dies(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        os._exit(3)


class _DiesWell(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        os._exit(0)


class _Exits(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sys.exit(0)


class _Holes:
    def __len__(self) -> int:
        return jobs.SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 100:
            raise KeyError("a sample is missing")
        return torch.zeros(8), 0


def _raise(error: Exception) -> None:
    raise error


def raising() -> Task:
    return Task(model=_Raises, train=jobs.data)


def data_raising() -> Task:
    return Task(model=jobs.net, train=_Holes)


def loading_raises() -> Task:
    return Task(model=jobs.net, train=lambda: _raise(FileNotFoundError("no such file")))  # type: ignore[arg-type, return-value]


def dies_well() -> Task:
    return Task(model=lambda: _DiesWell(8, 4), train=jobs.data)


def exits() -> Task:
    return Task(model=lambda: _Exits(8, 4), train=jobs.data)


def dies() -> Task:
    return Task(model=lambda: _Dies(8, 4), train=jobs.data)
