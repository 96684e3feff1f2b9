"""The order of the samples, and chance: both follow from seed, epoch and minibatch, never from who computes it."""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from distbelief.core.portions import OWN
from distbelief.core.settings import SEQUENTIAL, SHUFFLED
from distbelief.errors import DataError, UsageError

EPOCHS_KEPT = 2
"""Permutations kept: replicas at the end of one epoch and at the start of the next."""


def key(seed: int, epoch: int, index: int) -> int:
    """A seed of 64 bits for the chance of one minibatch, the same in every process and on every machine.

    >>> key(0, 1, 2)
    7324074409984376592
    """
    return int.from_bytes(blake2b(b"%d/%d/%d" % (seed, epoch, index), digest_size=8).digest(), "little")


def seed_chance(seed: int, epoch: int, index: int) -> None:
    """Seed torch's default generators (CPU, and each CUDA device in use) for one minibatch: dropout, augmentation.

    A loader's worker has the CPU's alone: CUDA that was begun before the fork is of no use after it.

    >>> seed_chance(0, 1, 2); first = torch.rand(3); seed_chance(0, 1, 2); torch.equal(first, torch.rand(3))
    True
    """
    value = key(seed, epoch, index)
    # torch.manual_seed asks every backend and takes 100 us; there are no CUDA generators before CUDA is used
    on_devices = torch.cuda.default_generators if get_worker_info() is None else ()
    for generator in (torch.default_generator, *on_devices):
        generator.manual_seed(value)


def seed_all(seed: int, epoch: int, index: int) -> None:
    """Seed whatever the transforms of a minibatch may draw from: torch, Python and numpy."""
    seed_chance(seed, epoch, index)
    value = key(seed, epoch, index)
    random.seed(value)
    np.random.seed(value % 2**32)


class Order:
    """The samples of an epoch, cut into minibatches, the last perhaps smaller: permuted by a seed, or in their order.

    Args:
        samples: Samples in an epoch.
        batch_size: Samples in a minibatch.
        seed: Of the job.
        order: shuffled or sequential.

    Raises:
        DataError: There is no sample.
        UsageError: The batch size is not positive.

    >>> order = Order(samples=5, batch_size=2, seed=0)
    >>> order.batches, sorted(i for b in range(3) for i in order.indices(0, b).tolist())
    (3, [0, 1, 2, 3, 4])
    >>> Order(samples=5, batch_size=2, seed=0, order="sequential").indices(7, 1)
    tensor([2, 3])
    """

    def __init__(self, samples: int, batch_size: int, seed: int, order: str = SHUFFLED) -> None:
        if samples < 1:
            raise DataError(
                f"the training data hold {samples} samples: there is nothing to train on; check the task's data"
            )
        if batch_size < 1:
            raise UsageError(f"batch size {batch_size} is not positive: choose 1 or more")
        self.samples, self.batch_size, self.seed, self.order = samples, batch_size, seed, order
        self.batches = -(-samples // batch_size)
        self._permutations: dict[int, Tensor] = {}

    def indices(self, epoch: int, index: int) -> Tensor:
        """The samples of minibatch `index` of an epoch, which of data of its own may be a number that only this replica
        has: int64, on the CPU, not to be written to.

        Raises:
            DataError: There is no such minibatch, so others have more data than this process.
        """
        position = index % OWN
        if position >= self.batches:
            raise DataError(
                f"minibatch {index} of epoch {epoch} is asked for, but the {self.samples} samples here make "
                f"{self.batches} minibatches of"
                f" {self.batch_size}; give every replica the same data"
            )
        first, end = position * self.batch_size, min(self.samples, (position + 1) * self.batch_size)
        if self.order == SEQUENTIAL:
            return torch.arange(first, end)
        permutation = self._permutations.get(epoch)
        if permutation is None:
            generator = torch.Generator().manual_seed(key(self.seed, epoch, -1))
            permutation = self._permutations[epoch] = torch.randperm(self.samples, generator=generator)
            if len(self._permutations) > EPOCHS_KEPT:
                del self._permutations[next(iter(self._permutations))]
        return permutation[first:end]
