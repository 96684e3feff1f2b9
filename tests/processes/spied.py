"""A task whose replicas write down how their gradients are added up, and which buffers they compute with."""

import os
from pathlib import Path
from typing import Any

import torch
from jobs import data
from setproctitle import getproctitle
from torch import nn

from distbelief.fabric.memory import SharedMemory
from distbelief.fabric.role_links import RoleLinks
from distbelief.schedules.schedule import Schedule
from distbelief.tasks import Task


def note(*words: object) -> None:
    """Write a line into the file of this process."""
    with open(Path(os.environ["SPIED"]) / getproctitle().rpartition(" ")[2], "a") as file:
        print(*words, file=file)


class _Spied(nn.Module):
    """Made in each replica before its model is bound: from then on, what it plays is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        steps_of = Schedule.steps_of

        def played(self: Schedule, rank: int) -> Any:
            made = steps_of(self, rank)
            note(
                "turns",
                *[(step.number, one.source, one.stop - one.start, one.adds) for step in made for one in step.receives],
            )
            return made

        Schedule.steps_of = played  # type: ignore[method-assign]
        for carrier in (SharedMemory, RoleLinks):
            ready = carrier.ready

            def told(self: Any, bucket: int, ready: Any = ready) -> None:
                note("bucket", bucket)
                ready(self, bucket)

            carrier.ready = told  # type: ignore[method-assign]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            note("buffers", self.norm.running_mean.tolist())  # type: ignore[union-attr]
        return self.norm(inputs)  # type: ignore[no-any-return]


def spied() -> Task:
    return Task(model=lambda: nn.Sequential(_Spied(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), train=data)
