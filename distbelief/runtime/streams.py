"""Streams: data without a length, of which each replica reads its own part, in order; and how many samples a minibatch
holds.
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
"""Samples of the beginning of a stream that replicas compare, at most."""
BEGINNING = -2
"""The number of the chance with which a stream begins; that of an order is -1."""


class Stream:
    """Data without a length, as a user gives them; a replica reads every n-th sample, or all where they are its own.

    What it draws as it goes is of the epoch, and the same in all replicas that share it; what `collate_fn` draws, and
    the step, is of the minibatch.

    Args:
        dataset: as the user made it.
        loader: what makes minibatches of it; without a batch size, each sample of it is one.
        batch_size: that the user names; 0 for the job's.
    """

    samples = STREAM

    def __init__(self, dataset: Iterable[object], loader: DataLoader[object], batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._given, self._loader = loader, loader
        self._items: Iterator[tuple[object, int, int]] | None = None
        self._epoch = self._next = self._seed = self._number = 0
        self._first = True
        """True where the first minibatch of each epoch is its own."""
        self.start: StreamStart | None = None
        """Beginning of the stream, where all replicas read the same and it is known."""
        self._compared = False
        self._collate = StreamCollate(loader.collate_fn, loader.batch_size is None)

    def begin(self, settings: Settings, index: int) -> None:
        """Have it read for replica `index` of a job."""
        own = self._given
        whole = own.batch_size is None
        shared = not settings.own_data and settings.replicas > 1
        self._first, self._compared = index == 0 or settings.own_data, not shared
        self._seed, self._number = settings.seed, BEGINNING - (index if settings.own_data else 0)
        changes: dict[str, Any] = {"batch_size": own.batch_size}
        if not whole:
            changes = {"batch_size": settings.batch_size, "drop_last": own.drop_last or settings.drop_last}
        part: StreamPart | None = None
        if shared:
            each = ((changes["batch_size"] or 1) - 1) * settings.replicas + 1  # of which each reads for its first
            part = StreamPart(own.dataset, index, settings.replicas, min(COMPARED, each))
            changes["generator"] = None  # the seeds of its workers are those that all share
        self._collate = StreamCollate(own.collate_fn, whole, settings.seed, index, part)
        self._loader = same_loader(own, part or own.dataset, self._collate, **changes)

    def read(self, batch: Batch) -> tuple[object, int] | None:
        """A minibatch, and how many samples it holds; None where the stream has ended before it. Those before it that
        were not read are read past, from the beginning if need be.

        Raises:
            DataError: an epoch begins, and there is nothing.
        """
        number, stream = batch.index % OWN, self.dataset
        back = batch.epoch != self._epoch or number < self._next
        of_script = mtrand.get_bit_generator()
        # an iterator cannot begin anew: it goes on
        if self._items is None or (back and (isinstance(stream, IterableDataset) or not hasattr(stream, "__next__"))):
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
        mtrand.set_bit_generator(of_script)
        self._next = number + 1
        if read is not None:
            made, samples, digest = read
            if digest and not self._compared:
                self.start, self._compared = StreamStart(batch.epoch, digest), True
            return made, samples
        if number == 0 and self._first:  # the others may have no part of a short one
            raise DataError(
                f"{type(stream).__name__} has nothing in epoch {batch.epoch}: an iterator is read once; give an "
                "IterableDataset, which begins anew whenever it is iterated over, or train for one epoch"
                if batch.epoch
                else f"{type(stream).__name__} has no minibatch: there is nothing to train on"
            )
        return None

    def close(self) -> None:
        """End who reads it."""
        self._items = None


class StreamPart(IterableDataset[object]):
    """Part of an iterable: sample `index` and every n-th after it.

    Args:
        stream: the iterable.
        index: of the replica.
        replicas: of which each takes a part.
        compared: samples of its beginning of which a digest is made.
    """

    def __init__(self, stream: Any, index: int = 0, replicas: int = 1, compared: int = 0) -> None:
        self.stream, self._index, self._replicas, self._compared = stream, index, replicas, compared
        self.digest = 0
        """Digest of its first samples; 0 before these were read."""

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
    """Return bytes by which two leaves of samples are told apart: their values, or their kind where these are of no
    plain type.
    """
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.tobytes()
    if isinstance(leaf, int | float | complex | str | bytes | np.generic | None):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()


class WorkerBegin:
    """Begins a worker, which finds the user's own data set, as `worker_init_fn` may set and cut it. What it cannot send
    is an error of the minibatch: torch itself would wait for that for ever.

    Args:
        begin: the user's `worker_init_fn`.
    """

    def __init__(self, begin: Callable[[int], None] | None) -> None:
        self.begin = begin
        self._sends: Any = None

    def __call__(self, number: int) -> None:
        """Begin the worker of this number."""
        share_descriptors()
        own: Any = multiprocessing.current_process()
        self._sends = signature(workers._worker_loop).bind(*own._args).arguments["data_queue"]
        self._sends._on_queue_feeder_error = self._not_sent
        info = get_worker_info()
        assert info is not None
        if isinstance(info.dataset, StreamPart):
            workers._worker_info = dataclasses.replace(info, dataset=info.dataset.stream)
        if self.begin is not None:
            self.begin(number)

    def _not_sent(self, error: Exception, what: Any) -> None:
        """Send the error in the place of what was not sent, or end this worker, which torch sees within 5 s."""
        index, made = what if isinstance(what, tuple) else (None, None)
        if index is None or isinstance(made, ExceptionWrapper):
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)
        info = get_worker_info()
        assert info is not None
        self._sends.put((index, ExceptionWrapper(where=f"in DataLoader worker process {info.id}")))


class CountedCollate:
    """A `collate_fn` that counts the samples which what it makes holds.

    >>> CountedCollate(lambda items: torch.tensor([one for one in items if one]))([3, 0, 4, 5])
    (tensor([3, 4, 5]), 3)
    """

    def __init__(self, collate: Callable[[Any], object]) -> None:
        self._collate = collate

    def __call__(self, items: list[object]) -> tuple[object, int]:
        """Make a minibatch, and count its samples."""
        made = self._collate(items)
        return made, held(made, items)


class StreamCollate:
    """A `collate_fn` of a stream: what it draws is of the minibatch, and leaves the chance of the stream as it is.

    Args:
        collate: the user's.
        whole: whether it is given minibatches, in the place of samples.
        seed: of the job.
        index: of the replica.
        part: of a stream that replicas compare.
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
        """Made in this process, of an epoch."""
        self.chance: Chance | None = None
        """Generators of the stream, in this process."""

    def __call__(self, items: Any) -> tuple[object, int, int]:
        """Make a minibatch, count its samples, and return the digest of its stream, 0 where unknown."""
        self.chance, info = _chance(), get_worker_info()
        worker, of = (info.id, info.num_workers) if info else (0, 1)
        mtrand.set_bit_generator(APART)
        seed_all(self._seed, self.epoch, self._index * OWN + self.minibatches * of + worker)
        self.minibatches += 1
        made = self._collate(items)
        _draw_from(self.chance)
        # the first of several workers reads the first minibatch of each replica
        digest = self._part.digest if self._part is not None and not worker else 0
        return made, _length(made) if self._whole else held(made, items), digest


def held(made: object, items: list[object]) -> int:
    """Count the samples in a minibatch that was made of `items`: those that are there (no None), and were not left out.
    They were, where all tensors have one length, which is less, and in it the shape of a sample.

    >>> held(torch.ones(2, 5), [torch.ones(5)] * 3), held(torch.ones(2, 3), [torch.ones(2)] * 3), held(None, [1, 2])
    (2, 3, 0)
    """
    if made is None:
        return 0
    there = sum(item is not None for item in items)
    tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    lengths = {len(leaf) for leaf in tensors}
    if len(lengths) != 1 or (length := lengths.pop()) >= there:
        return there
    shapes = {tuple(getattr(leaf, "shape", ())) for item in items for leaf in tree_leaves(item)}
    return length if all(tuple(leaf.shape[1:]) in shapes for leaf in tensors) else there


def _length(made: object) -> int:
    """The samples of a minibatch that came as one."""
    first = next((leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    return int(made is not None) if first is None else len(first)


Chance = tuple[torch.Tensor, Any, Any]
"""Generators of torch, Python and numpy; numpy's is the generator itself, whose state takes 100 us to copy."""
APART = np.random.MT19937(0)
"""Generator of numpy in a `collate_fn` of a stream."""


def _chance() -> Chance:
    return torch.default_generator.get_state(), random.getstate(), mtrand.get_bit_generator()


def _draw_from(chance: Chance) -> None:
    torch.default_generator.set_state(chance[0])
    random.setstate(chance[1])
    mtrand.set_bit_generator(chance[2])


def same_loader(
    own: DataLoader[Any], dataset: Dataset[object] | Iterable[object], collate: Callable[[Any], object], **changes: Any
) -> DataLoader[object]:
    """A user's loader, of this data set, with what `changes` has in the place of its own."""
    kept: dict[str, Any] = {
        "num_workers": own.num_workers,
        "pin_memory": own.pin_memory,
        "timeout": own.timeout,
        "worker_init_fn": WorkerBegin(own.worker_init_fn) if own.num_workers else None,
        "multiprocessing_context": own.multiprocessing_context,
        "generator": own.generator,
        "prefetch_factor": own.prefetch_factor,
        "persistent_workers": own.persistent_workers,
    }
    return DataLoader(dataset, collate_fn=collate, **{**kept, **changes})  # type: ignore[arg-type]  # an iterable is wrapped
