"""Streams: data without a length, of which each replica reads its own part, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distbelief.core.effects import Batch
from distbelief.core.portions import OWN, STREAM
from distbelief.core.settings import Settings
from distbelief.errors import DataError


class Stream:
    """Data without a length, as a user gives them; a replica reads every n-th sample, or all where they are its own.

    Args:
        dataset: as the user made it.
        loader: what makes minibatches of it; without a batch size, each sample of it is one.
        batch_size: that the user names; 0 for the job's.
    """

    samples = STREAM

    def __init__(self, dataset: Iterable[object], loader: DataLoader[object], batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._given, self._loader = loader, loader
        self._items: Iterator[tuple[object, int]] | None = None
        self._epoch = self._next = 0
        self._first = True
        """Whether the first minibatch of each epoch is its own."""

    def begin(self, settings: Settings, index: int) -> None:
        """Have it read for replica `index` of a job."""
        own, data = self._given, settings.data
        self._first = data.own_data or index == 0
        dataset: Any = own.dataset
        read = dataset if data.own_data else StreamPart(dataset, index, settings.replicas)
        sizes: dict[str, object] = {"batch_size": own.batch_size}
        if own.batch_size is not None:
            sizes = {"batch_size": data.batch_size, "drop_last": own.drop_last or data.drop_last}
        counted = _Counted(own.collate_fn, whole=own.batch_size is None)
        self._loader = same_loader(own, read, counted, **sizes)

    def read(self, batch: Batch) -> tuple[object, int] | None:
        """A minibatch, and how many samples it holds; None where the stream has ended before it. Those before it that
        were not read are read past, from the beginning if need be.

        Raises:
            DataError: an epoch begins, and there is nothing.
        """
        number, stream = batch.index % OWN, self.dataset
        back = batch.epoch != self._epoch or number < self._next
        # what is its own iterator cannot begin anew: it goes on
        if self._items is None or (back and iter(stream) is not stream):
            self._items, self._next = iter(self._loader), 0
        elif back:
            self._next = number
        self._epoch = batch.epoch
        found = next(islice(self._items, number - self._next, None), None)
        self._next = number + 1
        if found is None and number == 0 and self._first:  # the others may have no part of a short one
            raise DataError(
                f"{type(stream).__name__} has nothing in epoch {batch.epoch}: an iterator is read once; give an "
                "IterableDataset, which begins anew whenever it is iterated over, or train for one epoch"
                if batch.epoch
                else f"{type(stream).__name__} has no minibatch: there is nothing to train on"
            )
        return found

    def close(self) -> None:
        """End who reads it."""
        self._items = None


class StreamPart(IterableDataset[object]):
    """Of an iterable, sample `index` and every n-th after it: all, where it is the first of one."""

    def __init__(self, stream: Iterable[object], index: int = 0, replicas: int = 1) -> None:
        self._stream, self._index, self._replicas = stream, index, replicas

    def __iter__(self) -> Iterator[object]:
        return islice(iter(self._stream), self._index, None, self._replicas)


class _Counted:
    """A `collate_fn` that tells how many samples it was given; of a sample that is a whole minibatch, how long its
    first tensor is.
    """

    def __init__(self, collate: Callable[[Any], object], whole: bool) -> None:
        self._collate, self._whole = collate, whole

    def __call__(self, items: Any) -> tuple[object, int]:
        made = self._collate(items)
        if not self._whole:
            return made, len(items)
        first = next((leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
        return made, 1 if first is None else len(first)


def same_loader(
    own: DataLoader[Any], dataset: Dataset[object], collate: Callable[[Any], object], **sizes: Any
) -> DataLoader[object]:
    """A user's loader, of another data set, with minibatches as `sizes` has them."""
    return DataLoader(
        dataset,
        collate_fn=collate,
        num_workers=own.num_workers,
        pin_memory=own.pin_memory,
        timeout=own.timeout,
        worker_init_fn=own.worker_init_fn,
        multiprocessing_context=own.multiprocessing_context,
        generator=own.generator,
        prefetch_factor=own.prefetch_factor,
        persistent_workers=own.persistent_workers,
        **sizes,
    )
