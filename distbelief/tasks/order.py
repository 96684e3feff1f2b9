"""The order of samples, and randomness: both follow from seed, epoch and minibatch, not from the process."""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from distbelief.core.portions import OWN, cut_numbers
from distbelief.core.settings import PRIVATE, SEQUENTIAL, SHUFFLED, SORTED, Settings
from distbelief.errors import DataError, UsageError
from distbelief.tasks.task import Data

LABELS_AT_ONCE = 4096
"""Number of labels read at once."""
EPOCHS_KEPT = 2
"""Kept permutations: some replicas may be at the end of an epoch, and others in the next."""


def key(seed: int, epoch: int, index: int) -> int:
    """Return a 64-bit seed for one minibatch, the same in every process and on every machine.

    >>> key(0, 1, 2)
    7324074409984376592
    """
    return int.from_bytes(blake2b(b"%d/%d/%d" % (seed, epoch, index), digest_size=8).digest(), "little")


def seed_chance(seed: int, epoch: int, index: int) -> None:
    """Seed torch's default generators (CPU, and each CUDA device in use) for one minibatch: dropout, augmentation.

    In a worker of a loader only the CPU's is seeded, since CUDA does not survive its fork.

    >>> seed_chance(0, 1, 2); first = torch.rand(3); seed_chance(0, 1, 2); torch.equal(first, torch.rand(3))
    True
    """
    value = key(seed, epoch, index)
    # torch.manual_seed asks every backend and takes 100 us; there are no CUDA generators before CUDA is used
    on_devices = torch.cuda.default_generators if get_worker_info() is None else ()
    for generator in (torch.default_generator, *on_devices):
        generator.manual_seed(value)


def seed_all(seed: int, epoch: int, index: int) -> None:
    """Seed the generators of torch, Python and numpy for the transforms of a minibatch."""
    seed_chance(seed, epoch, index)
    value = key(seed, epoch, index)
    random.seed(value)
    np.random.seed(value % 2**32)


class Order:
    """The minibatches of an epoch: its samples, permuted by a seed or in their order; the last may be smaller.

    If each replica keeps a part of the data, `owners` has the replica of each sample (int64). These parts follow each
    other.

    >>> order = Order(samples=5, batch_size=2, seed=0)
    >>> order.batches, sorted(i for b in range(3) for i in order.indices(0, b).tolist())
    (3, [0, 1, 2, 3, 4])
    >>> Order(samples=5, batch_size=2, seed=0, order="sequential").indices(7, 1)
    tensor([2, 3])
    """

    def __init__(
        self, samples: int, batch_size: int, seed: int, order: str = SHUFFLED, owners: Tensor | None = None
    ) -> None:
        if samples < 1:
            raise DataError(
                f"the training data hold {samples} samples: there is nothing to train on; check the task's data"
            )
        if batch_size < 1:
            raise UsageError(f"batch size {batch_size} is not positive: choose 1 or more")
        self.samples, self.batch_size, self.seed, self.order = samples, batch_size, seed, order
        self._owners = owners
        self.batches = -(-samples // batch_size)
        self._permutations: dict[int, Tensor] = {}

    @classmethod
    def of(cls, settings: Settings, samples: int, data: Data | None = None) -> Order:
        """Make the order of a job's samples, with the labels of its data if they are cut by label."""
        owners = owners_of(settings, samples, data) if settings.keeps_parts else None
        return cls(samples, settings.batch_size, settings.seed, settings.order, owners)

    def indices(self, epoch: int, index: int) -> Tensor:
        """Return the samples of minibatch `index` of an epoch: int64, on the CPU, not to be written to.

        An index beyond the samples here raises a `DataError`: other processes have more data.
        """
        position = index % OWN
        if position >= self.batches:
            raise DataError(
                f"minibatch {index} of epoch {epoch} is beyond the {self.samples} samples here, which make "
                f"{self.batches} minibatches of {self.batch_size}; give every replica the same data"
            )
        first, end = position * self.batch_size, min(self.samples, (position + 1) * self.batch_size)
        if self.order == SEQUENTIAL:
            return torch.arange(first, end)
        permutation = self._permutations.get(epoch)
        if permutation is None:
            generator = torch.Generator().manual_seed(key(self.seed, epoch, -1))
            permutation = torch.randperm(self.samples, generator=generator)
            if self._owners is not None:
                permutation = permutation[torch.argsort(self._owners[permutation], stable=True)]
            self._permutations[epoch] = permutation
            if len(self._permutations) > EPOCHS_KEPT:
                del self._permutations[next(iter(self._permutations))]
        return permutation[first:end]


def owners_of(settings: Settings, samples: int, data: Data | None = None) -> Tensor:
    """Cut the samples into a part of whole minibatches for each replica; return the replica of each sample (int64)."""
    generator = torch.Generator().manual_seed(key(settings.seed, -1, -1))
    cut = torch.randperm(samples, generator=generator)
    if settings.data == SORTED:
        cut = cut[torch.argsort(labels_of(data, samples)[cut], stable=True)]
    batches = samples // settings.batch_size if settings.drop_last else -(-samples // settings.batch_size)
    owners = torch.empty(samples, dtype=torch.int64)
    for replica in range(settings.replicas):
        first = cut_numbers(replica, settings.replicas, batches).start * settings.batch_size
        owners[cut[first:]] = replica  # to the end: the next replica overwrites what is not this one's
    return owners


def labels_of(data: Data | None, samples: int) -> Tensor:
    """Return the class number of each sample, or raise a `UsageError`."""
    labels: list[Tensor] = []
    for first in range(0, samples, LABELS_AT_ONCE):
        numbers = torch.arange(first, min(samples, first + LABELS_AT_ONCE))
        targets = None if data is None else data.batch(numbers)[1]
        if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
            raise UsageError(f"--data {SORTED}: the targets are not class numbers to sort by; use --data {PRIVATE}")
        labels.append(targets)
    return torch.cat(labels)
