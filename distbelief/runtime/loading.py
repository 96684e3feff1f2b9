"""Data of a script's loop: data sets, loaders and streams of every kind.

Minibatches are read by their samples' numbers, in this process or ahead of the step by a loader's workers. A stream is
read in its order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from distbelief.coordination.allotments import own_numbers
from distbelief.core.effects import Batch
from distbelief.core.portions import STREAM, cut_numbers
from distbelief.core.settings import SEQUENTIAL, Settings
from distbelief.errors import DataError, UsageError
from distbelief.runtime.streams import CountedCollate, Stream, StreamPart, same_loader
from distbelief.tasks.order import Order, seed_all, seed_chance
from distbelief.tasks.task import Data


class Wanted(NamedTuple):
    """A minibatch to load, and the numbers of its samples (int64, on the CPU)."""

    batch: Batch
    numbers: torch.Tensor


class InLine:
    """Data that are loaded between steps.

    `gather` makes a minibatch from the samples of these numbers, and counts them. `samples` is the number in an epoch.
    `batch_size` is the one that the user sets; 0 for the job's.
    """

    def __init__(
        self, dataset: object, samples: int, batch_size: int, gather: Callable[[torch.Tensor], tuple[object, int]]
    ) -> None:
        self.dataset, self.samples, self.batch_size, self._gather = dataset, samples, batch_size, gather

    def load(self, wanted: Wanted, ahead: Iterable[Wanted], seed: int) -> tuple[object, int]:
        """Return a minibatch and its number of samples.

        The minibatch draws from the job's seed and its own number.
        """
        seed_all(seed, *_place(wanted.batch))
        return self._gather(wanted.numbers)

    def close(self) -> None:
        """Do nothing: there are no workers."""


class Ahead:
    """Data that a `DataLoader`'s workers load ahead of the step; each minibatch draws from its own seed.

    Workers start anew in each epoch, unless the loader keeps them. They load no minibatch before its epoch.
    """

    def __init__(self, loader: DataLoader[object], batch_size: int) -> None:
        self.dataset: object = loader.dataset
        self.samples, self.batch_size = len(loader.dataset), batch_size  # type: ignore[arg-type]  # map-style, which has a length
        self._loader, self._feed = loader, _Feed()
        self._most = loader.num_workers * (loader.prefetch_factor or 1)
        """Most minibatches that are under way at once."""
        self._loaded: Any = None
        self._epoch = 0

    def load(self, wanted: Wanted, ahead: Iterable[Wanted], seed: int) -> tuple[object, int]:
        """Return a minibatch and its number of samples, from a worker that may have loaded it already.

        Workers then load the minibatches `ahead`.
        """
        if wanted.batch.epoch > self._epoch:
            self._epoch = wanted.batch.epoch
            # as torch does, so that a data set may change between epochs
            if not self._loader.persistent_workers:
                self.close()
        for minibatch in (wanted, *ahead):
            if minibatch.batch.epoch <= self._epoch:
                self._feed.want(minibatch, seed)
        if self._loaded is None:
            user = self._loader
            collate = CountedCollate(user.collate_fn)
            self._loaded = iter(same_loader(user, user.dataset, collate, batch_sampler=self._feed))
        while self._feed.waiting and len(self._feed.given) < self._most:
            self._loaded._try_put_index()  # torch asks the feed only as a minibatch arrives; then it may be empty
        while True:
            minibatch, samples = next(self._loaded)
            # workers answer in the order of the feed; some minibatches may be from before the job went back to a
            # checkpoint
            if self._feed.given.popleft() == wanted.batch:
                return minibatch, samples

    def close(self) -> None:
        """End the workers, in a way that leaves nothing behind."""
        self._loaded, self._feed = None, _Feed()


Source = InLine | Ahead
"""Data whose minibatches are loaded by number."""


class _Numbers(list[int]):
    """The samples of a minibatch. On its way to a worker it becomes a plain list, and seeds that worker."""

    chance = (0, 0, 0)

    def __reduce__(self) -> tuple[object, ...]:
        return _seeded, (list(self), self.chance)


def _seeded(numbers: list[int], chance: tuple[int, int, int]) -> list[int]:
    seed_all(*chance)
    return numbers


class _Feed:
    """Feed of a loader: minibatches that are wanted and not under way."""

    def __init__(self) -> None:
        self.given: deque[Batch] = deque()
        """Minibatches under way, in order."""
        self.waiting: deque[tuple[Batch, _Numbers]] = deque()

    def want(self, wanted: Wanted, seed: int) -> None:
        """Have a minibatch loaded, unless it is under way."""
        if wanted.batch not in self.given and not any(batch == wanted.batch for batch, _ in self.waiting):
            numbers = _Numbers(wanted.numbers.tolist())
            numbers.chance = (seed, *_place(wanted.batch))
            self.waiting.append((wanted.batch, numbers))

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if not self.waiting:
            raise StopIteration
        batch, numbers = self.waiting.popleft()
        self.given.append(batch)
        return numbers


class _Stacked:
    """Default `collate_fn`, with an error that names the data set."""

    def __init__(self, dataset: object) -> None:
        self._kind = type(dataset).__name__

    def __call__(self, items: list[object]) -> object:
        try:
            return default_collate(items)
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"the samples of {self._kind} do not stack ({error}): pass DataLoader(dataset, batch_size=..., "
                "collate_fn=...) with a function that makes a minibatch of them"
            ) from error


def source_of(data: Any, batch_size: int = 0, num_workers: int = 0) -> Source | Stream:
    """Return data of any kind as a source, or as a stream if they have no length.

    Args:
        data: a `DataLoader`; a map-style data set, whose samples may have any structure; tensors or arrays, with
            samples in their first dimension, in a tuple, a dictionary or nested ones; an object with `len` and `batch`;
            an `IterableDataset`, or any iterable of samples.
        batch_size: samples in a minibatch; 0 for the loader's, or the job's.
        num_workers: processes that load a data set ahead of the step. Data in memory need none, and a loader has its
            own.

    >>> source = source_of({"x": torch.arange(6).view(3, 2), "y": torch.tensor([7, 8, 9])})
    >>> source.load(Wanted(Batch(0, 0), torch.tensor([2, 0])), (), 0)
    ({'x': tensor([[4, 5],
            [0, 1]]), 'y': tensor([9, 7])}, 2)
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, batch_size)
    if isinstance(data, Data):
        return InLine(data, len(data), batch_size, lambda numbers: (data.batch(numbers), len(numbers)))
    tensors = data.tensors if type(data) is TensorDataset else data if isinstance(data, tuple | Mapping) else ()
    leaves = tree_leaves(tensors)
    if leaves and all(isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim for leaf in leaves):
        tensors = tree_map(torch.as_tensor, tensors)
        lengths = sorted({len(leaf) for leaf in leaves})
        if len(lengths) > 1:
            raise UsageError(f"tensors of {lengths[0]} and of {lengths[-1]} samples: pass equally many of each")
        # index_select costs a fifth of tensor[numbers] for 64 rows
        return InLine(
            data,
            lengths[0],
            batch_size,
            lambda numbers: (tree_map(lambda leaf: leaf.index_select(0, numbers), tensors), len(numbers)),
        )
    counted = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    iterable = isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not counted)
    if isinstance(data, str | bytes | Mapping | torch.Tensor) or not (counted or iterable):
        raise UsageError(
            f"{type(data).__name__} cannot be cut into minibatches: pass a map-style data set (with __len__ and "
            "__getitem__), an IterableDataset or an iterable, a DataLoader of one of them, or tensors or arrays in a "
            "tuple or a dictionary"
        )
    stacked = _Stacked(data)
    if iterable:
        # an iterator must be read in this process: a worker's copy would not move it on
        forkable = isinstance(data, IterableDataset)
        workers = num_workers if forkable else 0
        ours = DataLoader(
            data if forkable else StreamPart(data),
            collate_fn=stacked,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        return Stream(data, ours, batch_size)
    if num_workers and not isinstance(data, Sequence):
        # with fork, a data set need not be picklable, and the script is not imported again
        ours = DataLoader(data, collate_fn=stacked, num_workers=num_workers, multiprocessing_context="fork")
        return Ahead(ours, batch_size)
    collate = CountedCollate(stacked)
    return InLine(data, len(data), batch_size, lambda numbers: collate(_items(data, numbers.tolist())))


def _of_loader(loader: DataLoader[object], batch_size: int) -> Source | Stream:
    """Return a user's loader as a source or a stream.

    A loader with its own order, or with an option that belongs to the job, is refused.
    """
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(loader), name) is not getattr(DataLoader, name):
            raise UsageError(
                f"a {type(loader).__name__}, a DataLoader with its own {name}: what it does with minibatches would be "
                "lost; do it in collate_fn, or pass loader.dataset and do it in the loop"
            )
    if isinstance(loader.dataset, IterableDataset):
        _check_size(batch_size, loader)
        return Stream(loader.dataset, loader, loader.batch_size or 0)
    sampler, batches = loader.sampler, loader.batch_sampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]  # map-style
    if type(batches) not in (BatchSampler, type(None)) or not (shuffled or type(sampler) is SequentialSampler):
        ordering = sampler if type(batches) in (BatchSampler, type(None)) else batches
        raise UsageError(
            f"a DataLoader with a {type(ordering).__name__}: the job has its own order, in which each sample goes to "
            "one replica; leave it out, and choose samples with torch.utils.data.Subset(dataset, numbers)"
        )
    if loader.batch_size is None and batches is not None:
        raise UsageError(
            "DataLoader(batch_sampler=...): the job has its own order and its own minibatches; leave it out, and set "
            "batch_size and shuffle=True"
        )
    if loader.batch_size is None:
        raise UsageError(
            "DataLoader(batch_size=None): the job deals minibatches; set a batch_size, and a collate_fn where samples "
            "are not stacked"
        )
    if loader.drop_last:
        raise UsageError(
            "DataLoader(drop_last=True): the job has its own minibatches; leave it out, and launch with --drop-last"
        )
    _check_size(batch_size, loader)
    if loader.num_workers:
        return Ahead(loader, loader.batch_size)
    counted = CountedCollate(loader.collate_fn)

    def gather(numbers: torch.Tensor) -> tuple[object, int]:
        minibatch, samples = counted(_items(loader.dataset, numbers.tolist()))
        return _pinned(minibatch, loader.pin_memory), samples

    return InLine(loader.dataset, len(loader.dataset), loader.batch_size, gather)  # type: ignore[arg-type]  # map-style


def in_order(data: object) -> bool:
    """Return whether data are a loader of a data set in its order."""
    return (
        isinstance(data, DataLoader)
        and type(data.sampler) is SequentialSampler
        and not isinstance(data.dataset, IterableDataset)
    )


def _check_size(batch_size: int, loader: DataLoader[object]) -> None:
    if batch_size not in (0, loader.batch_size):
        raise UsageError(
            f"batches(batch_size={batch_size}) of a DataLoader with batch_size={loader.batch_size}: leave one of them "
            "out"
        )


def _pinned(batch: object, pin: bool) -> object:
    """Return a minibatch in pinned memory, from which a GPU copies faster, if there is a GPU."""
    if not pin or not torch.cuda.is_available():
        return batch
    return tree_map(lambda leaf: leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf, batch)


def _items(dataset: Any, numbers: list[int]) -> list[object]:
    together = getattr(dataset, "__getitems__", None)
    return list(together(numbers)) if together else [dataset[number] for number in numbers]


def worker_traceback(error: BaseException) -> str:
    """Return the traceback of an error in a loader's worker, which torch puts into the error's text; "" for others."""
    _, worker, trace = str(error).partition("Original Traceback (most recent call last):\n")
    return trace if worker else ""


def text_of(error: BaseException) -> str:
    r"""Return the text of an error; for one in a loader's worker only the error's own text, without the traceback.

    >>> text_of(ValueError("no"))
    'no'
    >>> trace = 'Traceback (most recent call last):\n  File "a.py", line 6, in f\n    1 / 0\n'
    >>> caught = f"Caught ValueError in DataLoader worker process 1.\nOriginal {trace}"
    >>> text_of(ValueError(f"{caught}ValueError: no\nmore\n"))
    'no\nmore'
    """
    trace = worker_traceback(error)
    if not trace:
        return str(error)
    # of a chain of errors, take the last
    last = trace.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return "\n".join(dropwhile(lambda line: not line or line.startswith(" "), last)).partition(": ")[2]


def _place(batch: Batch) -> tuple[int, int]:
    return batch.epoch, batch.index


class Batches:
    """The minibatches of one replica; iterate over them once, or once in each epoch of `replica.epochs()`.

    `len()` is the number of minibatches in an epoch, over all replicas. Where each replica has its own data, it
    is the number in these.

    `within` is the script's epoch when they were made; -1 before the first, or without a loop over epochs.
    """

    def __init__(
        self,
        data: object,
        source: Source | Stream,
        settings: Settings,
        index: int,
        within: int,
        begin: Callable[[Batches], Iterator[Any]],
    ) -> None:
        self.data, self.within = data, within
        self._job, self._index = settings, index
        self.source, self.batch_size = source, source.batch_size or settings.batch_size
        self.at = Batch(0, -1)
        """The current minibatch."""
        self._begin = begin

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self.source.dataset

    @property
    def epoch(self) -> int:
        """Epoch of the current minibatch, from 0."""
        return self.at.epoch

    @property
    def last(self) -> bool:
        """True if the current minibatch is the last in this replica's epoch.

        It is known where there is one replica, an order that is kept, or data of its own. Elsewhere reading it raises a
        `UsageError`.
        """
        job = self._job
        if self.source.samples == STREAM:
            raise UsageError(
                f"batches.last of {type(self.dataset).__name__}, a stream: its last minibatch is not known before its "
                "end; pass data with a length"
            )
        if job.own_data:
            numbers = own_numbers(self._index, len(self))
        elif job.order == SEQUENTIAL or job.keeps_parts:
            numbers = cut_numbers(self._index, job.replicas, len(self))
        elif job.replicas == 1:
            numbers = range(len(self))
        else:
            raise UsageError(
                f"batches.last of {job.replicas} replicas in order {job.order}: the next minibatch goes to the replica "
                'that is ready, so none knows its last one; use batches(..., order="sequential"), or launch with '
                "--data own"
            )
        return self.at.index == numbers[-1]

    def __len__(self) -> int:
        if self.source.samples == STREAM:
            raise TypeError(f"{type(self.dataset).__name__} is a stream: it has no length")
        samples = self.source.samples
        return samples // self.batch_size if self._job.drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self)


class Loader:
    """Loader of one minibatch after another, in a job's order."""

    def __init__(self, source: Source | Stream, settings: Settings, index: int) -> None:
        self._seed, self._source, self._seconds = settings.seed, source, 0.0
        if isinstance(source, Stream):
            source.begin(settings, index)
        else:
            self._order = Order.of(settings, source.samples)

    def take_seconds(self) -> float:
        """Return the seconds of loading since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def load(self, batch: Batch, ahead: Iterable[Batch]) -> tuple[object, int] | None:
        """Return a minibatch and its number of samples, or None if a stream has ended; seed the step."""
        begun = time.perf_counter()
        try:
            return self._read(batch, ahead)
        finally:
            self._seconds += time.perf_counter() - begun

    def _read(self, batch: Batch, ahead: Iterable[Batch]) -> tuple[object, int] | None:
        if isinstance(self._source, Stream):
            read = self._source.read(batch)
            seed_all(self._seed, *_place(batch))  # or the step would draw the stream's next numbers
            return read
        numbers = self._order.indices(*_place(batch))
        coming = (Wanted(item, self._order.indices(*_place(item))) for item in ahead)
        loaded = self._source.load(Wanted(batch, numbers), coming, self._seed)
        if isinstance(self._source, Ahead):
            seed_chance(self._seed, *_place(batch))
        return loaded
