"""The script of the benchmark loading: LeNet on data that load slowly. Its arguments are the seconds of transforms in a
minibatch, and the number of processes that load ahead, or "held" for tensors in memory.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.nn import functional
from torch.utils.data import Dataset

from distbelief.runtime.loop import join
from distbelief.tasks.digits import lenet

SAMPLES, BATCH = 12_800, 64


class Transformed(Dataset[tuple[torch.Tensor, int]]):
    """Images of noise; loading one uses the processor for some time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds / BATCH
        chance = torch.Generator().manual_seed(0)
        self.images = torch.rand(SAMPLES, 1, 28, 28, generator=chance)
        self.classes = torch.randint(0, 10, (SAMPLES,), generator=chance)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        image, until = self.images[number], time.thread_time() + self._seconds
        while time.thread_time() < until:
            pass
        return image, int(self.classes[number])


def main(seconds: float, workers: str) -> None:
    """Train as the job says."""
    replica, model, data = join(), lenet(), Transformed(seconds)
    optimizer = replica.optimizer(model)
    if workers == "held":
        batches = replica.batches((data.images, data.classes), BATCH)
    else:
        batches = replica.batches(data, BATCH, num_workers=int(workers))
    for images, classes in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        replica.report(loss=0.0)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
