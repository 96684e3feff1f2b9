"""A task whose gradients are 16 MB, and whose replicas print when each of their steps begins."""

import contextlib
import os
import time
from pathlib import Path

import torch
from torch import nn

from distbelief.tasks import Task, TensorData

PARAMETERS = 4_000_000


def keep_cores() -> None:
    """Go before whatever else this machine does, where that is allowed: what is timed is the network."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PARAMETERS))
        self.begun = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.begun:
            keep_cores()
            self.begun = True
        print(f"step at {time.monotonic()}", flush=True)
        return inputs.mean(1, keepdim=True) * self.weight[:2] + 0 * self.weight.mean()


def data() -> TensorData:
    return TensorData(torch.ones(64, 1), torch.zeros(64, dtype=torch.long))


def wide() -> Task:
    return Task(model=Wide, train=data, test=data)
