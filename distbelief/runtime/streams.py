"""Streams: data without a length, of which each replica reads its part in order.

The count of the samples of a minibatch is here too.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch._utils import ExceptionWrapper
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as workers

from distbelief.core.conversations.dealing import StreamStart
from distbelief.core.effects import Batch
from distbelief.core.portions import OWN, STREAM
from distbelief.core.settings import Settings
from distbelief.errors import DataError
from distbelief.tasks.order import seed_all
from distbelief.transport.addresses import share_descriptors

COMPARED = 8
"""Most samples at the start of a stream that replicas compare."""
BEGINNING = -2
"""Number of the seed with which a stream begins; an order's is -1."""


class Stream:
    """A user's data without a length. A replica reads every n-th sample, or all of its own data.

    The stream draws from the epoch's seed, the same in all replicas that share it. `collate_fn` and the step draw from
    the minibatch's seed. The user's loader makes minibatches. Where it has no batch size, each of its samples
    is a minibatch. `batch_size` is the one that the user sets; 0 for the job's.
    """

    samples = STREAM

    def __init__(self, dataset: Iterable[object], loader: DataLoader[object], batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._given, self._loader = loader, loader
        self._items: Iterator[tuple[object, int, int]] | None = None
        self._epoch = self._next = self._seed = self._number = 0
        self._first = True
        """True if this replica has the first minibatch of each epoch."""
        self.start: StreamStart | None = None
        """Digest of the stream's start, once it is known, where all replicas read the same stream."""
        self._compared = False
        self._collate = StreamCollate(loader.collate_fn, loader.batch_size is None)

    def begin(self, settings: Settings, index: int) -> None:
        """Prepare to read the part of replica `index`."""
        user = self._given
        whole = user.batch_size is None
        shared = not settings.own_data and settings.replicas > 1
        self._first, self._compared = index == 0 or settings.own_data, not shared
        self._seed, self._number = settings.seed, BEGINNING - (index if settings.own_data else 0)
        changes: dict[str, Any] = {"batch_size": user.batch_size}
        if not whole:
            changes = {"batch_size": settings.batch_size, "drop_last": user.drop_last or settings.drop_last}
        part: StreamPart | None = None
        if shared:
            each = ((changes["batch_size"] or 1) - 1) * settings.replicas + 1  # read by each for its first minibatch
            part = StreamPart(user.dataset, index, settings.replicas, min(COMPARED, each))
            changes["generator"] = None  # so that workers have the same seeds in all replicas
        self._collate = StreamCollate(user.collate_fn, whole, settings.seed, index, part)
        self._loader = same_loader(user, part or user.dataset, self._collate, **changes)

    def read(self, batch: Batch) -> tuple[object, int] | None:
        """Return a minibatch and its number of samples, or None if the stream has ended before it.

        Minibatches before it are skipped; if it was passed, the stream is read from its start again. An epoch without a
        sample raises a `DataError`.
        """
        number, stream = batch.index % OWN, self.dataset
        back = batch.epoch != self._epoch or number < self._next
        script_generator = mtrand.get_bit_generator()
        # an iterator cannot start again: go on with it
        if self._items is None or (back and (isinstance(stream, IterableDataset) or not hasattr(stream, "__next__"))):
            # a generator of its own, so that a stream and the script do not draw each other's numbers
            mtrand.set_bit_generator(np.random.MT19937(0))
            seed_all(self._seed, batch.epoch, self._number)
            self._collate.epoch, self._collate.minibatches = batch.epoch, 0
            self._items, self._next = iter(self._loader), 0
        else:
            self._next = number if back else self._next
            if self._collate.chance and not self._loader.num_workers:
                _draw_from(self._collate.chance)
        self._epoch = batch.epoch
        read = next(islice(self._items, number - self._next, None), None)
        mtrand.set_bit_generator(script_generator)
        self._next = number + 1
        if read is not None:
            minibatch, samples, digest = read
            if digest and not self._compared:
                self.start, self._compared = StreamStart(batch.epoch, digest), True
            return minibatch, samples
        if number == 0 and self._first:  # other replicas may have no part of a short stream
            raise DataError(
                f"{type(stream).__name__} has nothing in epoch {batch.epoch}: an iterator can be read only once; use "
                "an IterableDataset, which starts again in each epoch, or train for one epoch"
                if batch.epoch
                else f"{type(stream).__name__} has no minibatch: there is nothing to train on"
            )
        return None

    def close(self) -> None:
        """End its workers."""
        self._items = None


class StreamPart(IterableDataset[object]):
    """Part of an iterable: sample `index` and every n-th after it, for n replicas.

    The first `compared` samples of the whole go into a digest.
    """

    def __init__(self, stream: Any, index: int = 0, replicas: int = 1, compared: int = 0) -> None:
        self.stream, self._index, self._replicas, self._compared = stream, index, replicas, compared
        self.digest = 0
        """Digest of the first samples; 0 until they are read."""

    def __iter__(self) -> Iterator[object]:
        samples = iter(self.stream)
        if self._compared and not self.digest:
            samples = self._digested(samples)
        return islice(samples, self._index, None, self._replicas)

    def _digested(self, samples: Iterator[object]) -> Iterator[object]:
        digest = blake2b(digest_size=7)
        for number, sample in enumerate(islice(samples, self._compared), start=1):
            for leaf in tree_leaves(sample):
                digest.update(_bytes_of(leaf))
            if number == self._compared:
                self.digest = int.from_bytes(digest.digest(), "little") or 1
            yield sample
        yield from samples


def _bytes_of(leaf: object) -> bytes:
    """Return bytes that differ if two leaves of samples do: their values, or their type if that is not a plain one."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.tobytes()
    if isinstance(leaf, int | float | complex | str | bytes | np.generic | None):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()


class WorkerBegin:
    """Start of a worker, which shows the user's `worker_init_fn` the user's own data set.

    A minibatch that the worker cannot send is reported.
    """

    def __init__(self, begin: Callable[[int], None] | None) -> None:
        self.begin = begin
        self._sends: Any = None

    def __call__(self, number: int) -> None:
        share_descriptors()
        process: Any = multiprocessing.current_process()
        self._sends = signature(workers._worker_loop).bind(*process._args).arguments["data_queue"]
        # torch would wait for ever for a minibatch that cannot be sent
        self._sends._on_queue_feeder_error = self._not_sent
        info = get_worker_info()
        assert info is not None
        if isinstance(info.dataset, StreamPart):
            workers._worker_info = dataclasses.replace(info, dataset=info.dataset.stream)
        if self.begin is not None:
            self.begin(number)

    def _not_sent(self, error: Exception, what: Any) -> None:
        """Send an error instead; if that fails, end this worker, which torch notices within 5 s."""
        index, result = what if isinstance(what, tuple) else (None, None)
        if index is None or isinstance(result, ExceptionWrapper):
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)
        info = get_worker_info()
        assert info is not None
        self._sends.put((index, ExceptionWrapper(where=f"in DataLoader worker process {info.id}")))


class CountedCollate:
    """A `collate_fn` that counts the samples in its result.

    >>> CountedCollate(lambda items: torch.tensor([item for item in items if item]))([3, 0, 4, 5])
    (tensor([3, 4, 5]), 3)
    """

    def __init__(self, collate: Callable[[Any], object]) -> None:
        self._collate = collate

    def __call__(self, items: list[object]) -> tuple[object, int]:
        minibatch = self._collate(items)
        return minibatch, held(minibatch, items)


class StreamCollate:
    """A `collate_fn` of a stream: it draws from the minibatch's seed, and leaves the stream's generators alone.

    Its items are minibatches if `whole`, else samples. `part` is the part of a stream whose start replicas compare.
    """

    def __init__(
        self,
        collate: Callable[[Any], object],
        whole: bool,
        seed: int = 0,
        index: int = 0,
        part: StreamPart | None = None,
    ) -> None:
        self._collate, self._whole, self._seed, self._index, self._part = collate, whole, seed, index, part
        self.epoch = self.minibatches = 0
        """The epoch, and the number of minibatches made in this process."""
        self.chance: Chance | None = None
        """The stream's generators, in this process."""

    def __call__(self, items: Any) -> tuple[object, int, int]:
        """Make a minibatch; return it, its number of samples, and the digest of the stream, 0 where unknown."""
        self.chance, info = _chance(), get_worker_info()
        worker, of = (info.id, info.num_workers) if info else (0, 1)
        mtrand.set_bit_generator(APART)
        seed_all(self._seed, self.epoch, self._index * OWN + self.minibatches * of + worker)
        self.minibatches += 1
        minibatch = self._collate(items)
        _draw_from(self.chance)
        # the first of several workers reads the first minibatch of each replica
        digest = self._part.digest if self._part is not None and not worker else 0
        return minibatch, _length(minibatch) if self._whole else held(minibatch, items), digest


def held(minibatch: object, items: list[object]) -> int:
    """Count the samples in a minibatch that was made from `items`: those that are not None, unless some were left out.

    Some were if all tensors have the same length, which is smaller, and apart from it the shape of a sample.

    >>> held(torch.ones(2, 5), [torch.ones(5)] * 3), held(torch.ones(2, 3), [torch.ones(2)] * 3), held(None, [1, 2])
    (2, 3, 0)
    """
    if minibatch is None:
        return 0
    there = sum(item is not None for item in items)
    tensors = [leaf for leaf in tree_leaves(minibatch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    lengths = {len(leaf) for leaf in tensors}
    if len(lengths) != 1 or (length := lengths.pop()) >= there:
        return there
    shapes = {tuple(getattr(leaf, "shape", ())) for item in items for leaf in tree_leaves(item)}
    return length if all(tuple(leaf.shape[1:]) in shapes for leaf in tensors) else there


def _length(minibatch: object) -> int:
    """Return the number of samples in a minibatch that was not made from samples."""
    first = next((leaf for leaf in tree_leaves(minibatch) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    return int(minibatch is not None) if first is None else len(first)


Chance = tuple[torch.Tensor, Any, Any]
"""Generators of torch, Python and numpy; for numpy the generator itself, since its state takes 100 us to copy."""
APART = np.random.MT19937(0)
"""numpy's generator in a stream's `collate_fn`."""


def _chance() -> Chance:
    return torch.default_generator.get_state(), random.getstate(), mtrand.get_bit_generator()


def _draw_from(chance: Chance) -> None:
    torch.default_generator.set_state(chance[0])
    random.setstate(chance[1])
    mtrand.set_bit_generator(chance[2])


def same_loader(
    user: DataLoader[Any], dataset: Dataset[object] | Iterable[object], collate: Callable[[Any], object], **changes: Any
) -> DataLoader[object]:
    """Return a copy of a user's loader for a data set, with some options changed."""
    kept: dict[str, Any] = {
        "num_workers": user.num_workers,
        "pin_memory": user.pin_memory,
        "timeout": user.timeout,
        "worker_init_fn": WorkerBegin(user.worker_init_fn) if user.num_workers else None,
        "multiprocessing_context": user.multiprocessing_context,
        "generator": user.generator,
        "prefetch_factor": user.prefetch_factor,
        "persistent_workers": user.persistent_workers,
    }
    return DataLoader(dataset, collate_fn=collate, **{**kept, **changes})  # type: ignore[arg-type]  # an iterable is wrapped
