"""What a user's loop reads: data of every structure, and loaders, whose minibatches are had by number."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

from distbelief.coordination.allotments import own_numbers
from distbelief.core.effects import Batch
from distbelief.core.settings import Settings
from distbelief.errors import DataError, UsageError
from distbelief.runtime.loading import Ahead, Batches, InLine, Loader, Wanted, source_of
from distbelief.runtime.loop import Replica
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.runtime.script_story import ScriptStage
from distbelief.runtime.streams import StreamPart, WorkerBegin, held, same_loader
from distbelief.strategies import Downpour
from distbelief.tasks.order import seed_all, seed_chance

ROWS = torch.arange(12.0).view(6, 2)


class Nested(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        return {"x": (ROWS[number], number), "name": str(number)}


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        return torch.ones(number + 1)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


def had(data: Any, *numbers: int) -> Any:
    made, samples = source_of(data).load(Wanted(Batch(0, 0), torch.tensor(numbers)), (), 0)
    assert samples == len(numbers)
    return made


def test_samples_of_every_structure_are_stacked() -> None:
    got = had(Nested(), 4, 1)
    assert torch.equal(got["x"][0], ROWS[[4, 1]])
    assert (got["x"][1].tolist(), got["name"]) == ([4, 1], ["4", "1"])


def test_a_dictionary_of_tensors_is_one_of_minibatches() -> None:
    got = had({"a": ROWS, "b": {"c": ROWS[:, 1]}}, 2)
    assert (got["a"].tolist(), got["b"]["c"].tolist()) == ([[4.0, 5.0]], [5.0])


def test_a_loader_makes_what_it_would() -> None:
    loader = DataLoader(Ragged(), 4, shuffle=True, collate_fn=lambda items: pad_sequence(items, batch_first=True))
    assert had(loader, 2, 0).tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    source = source_of(loader)
    assert (source.dataset, source.samples, source.batch_size) == (loader.dataset, 6, 4)


def test_what_loads_a_users_data_does_so_as_the_users_loader_would() -> None:
    sizes = {"num_workers": 2, "prefetch_factor": 5, "timeout": 7.0, "persistent_workers": True, "pin_memory": True}
    named = {"worker_init_fn": seed_chance, "generator": torch.Generator(), "multiprocessing_context": "spawn"}
    own = DataLoader(Nested(), 4, **sizes, **named)  # type: ignore[arg-type]  # by name
    ours = same_loader(own, Ragged(), list, batch_size=3)
    for name in (*sizes, *named):
        kept = getattr(ours, name)
        assert (kept.begin if isinstance(kept, WorkerBegin) else kept) == getattr(own, name), name


@pytest.mark.parametrize(("asked", "has_gpu"), [(True, True), (True, False), (False, True)])
def test_a_minibatch_is_pinned_where_it_is_asked_for_and_there_is_a_gpu(
    asked: bool, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda leaf: pinned.append(leaf) or leaf)
    got = had(DataLoader(Nested(), 2, pin_memory=asked), 4, 1)
    assert torch.equal(got["x"][0], ROWS[[4, 1]])
    assert [leaf.tolist() for leaf in pinned] == ([got["x"][0].tolist(), [4, 1]] if asked and has_gpu else [])


@pytest.mark.long
def test_a_worker_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which was begun in the process that it was forked from, and raises in it."""

    class Begun:
        def manual_seed(self, seed: int) -> None:
            raise RuntimeError("CUDA error: initialization error")

    monkeypatch.setattr(torch.cuda, "default_generators", (Begun(),))
    source = Ahead(DataLoader(Nested(), 2, num_workers=1, multiprocessing_context="fork"), 2)
    assert source.load(Wanted(Batch(0, 0), torch.tensor([0, 1])), (), seed=3)[1] == 2
    source.close()


@pytest.mark.long
def test_a_data_set_is_loaded_ahead_and_what_is_in_memory_is_not() -> None:
    """By processes of their own, which are told what comes next, and need not pickle what they read."""

    class Told(Nested):
        def __getitem__(self, number: int) -> Any:
            assert get_worker_info() is not None
            return {"number": number, "worker": get_worker_info().id}

    source = source_of(Told(), num_workers=2)
    order = [Wanted(Batch(0, index), torch.tensor([2 * index, 2 * index + 1])) for index in range(3)]
    loaded = [source.load(order[at], order[at + 1 :], 0)[0] for at in range(3)]
    assert [one["number"].tolist() for one in loaded] == [[0, 1], [2, 3], [4, 5]]
    assert {worker for one in loaded for worker in one["worker"].tolist()} == {0, 1}
    assert (source.dataset.__class__, source.samples, source.batch_size) == (Told, 6, 0)
    source.close()
    for kept in ((ROWS, ROWS), TensorDataset(ROWS), [1, 2, 3], DataLoader(Nested(), 2)):
        assert type(source_of(kept, num_workers=1)) is InLine


@pytest.mark.long
def test_samples_that_do_not_stack_in_a_worker_are_told_of_collate_fn() -> None:
    with pytest.raises(DataError, match=r"the samples of Ragged do not stack .*collate_fn"):
        source_of(Ragged(), num_workers=1).load(Wanted(Batch(0, 0), torch.tensor([0, 1])), (), 0)


class Unsendable(Nested):
    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def __getitem__(self, number: int) -> Any:
        class Local(ValueError):
            pass

        if self.raises:
            raise Local(number)
        return {"a": Local} if number else {"a": ROWS}


def as_they_are(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.long
@pytest.mark.parametrize(
    ("raises", "says"), [(False, "Can't pickle local object.*Local"), (True, "exited unexpectedly")]
)
def test_what_a_worker_cannot_send_is_an_error_of_its_minibatch(raises: bool, says: str) -> None:
    loader = DataLoader(Unsendable(raises), 1, num_workers=1, collate_fn=as_they_are)
    source = source_of(loader)
    with pytest.raises((AttributeError, RuntimeError), match=rf"(?s){says}"):  # noqa: PT012  # the first is had
        source.load(Wanted(Batch(0, 0), torch.tensor([0])), (), 0)
        source.load(Wanted(Batch(0, 1), torch.tensor([1])), (), 0)
    source.close()


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_sends_however_long_the_name_of_the_folder_of_temporary_files_is(
    context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a" * 60) / ("b" * 60)
    folder.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    source: Any = source_of(DataLoader(TensorDataset(ROWS), 2, num_workers=1, multiprocessing_context=context))
    got, _ = source.load(Wanted(Batch(0, 0), torch.tensor([4, 1])), (), 0)
    assert torch.equal(got[0], ROWS[[4, 1]])
    for worker in source._loaded._workers:
        worker.kill()
        worker.join()
    monkeypatch.setattr(source, "_loaded", None)
    assert not list(folder.iterdir())


class Told(Dataset[Any]):
    """Is told the epoch, and by `worker_init_fn` what to add."""

    epoch, added = 0, 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[int, int, int]:
        return number, self.epoch, self.added


def add(_: int) -> None:
    info: Any = get_worker_info()
    assert type(info.dataset) in (Told, Cut)
    info.dataset.added = 10


@pytest.mark.long
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_begun_anew_in_each_epoch_unless_they_are_to_stay(persistent: bool) -> None:
    """They load nothing of an epoch before, and find the user's own data set."""
    data = Told()
    loader = DataLoader(data, 2, num_workers=1, worker_init_fn=add, persistent_workers=persistent)
    source: Any = source_of(loader)
    job = Settings(batch_size=2, order="sequential", strategy=Downpour())
    ahead, seen = Loader(source, job, 0), []
    order = [Batch(epoch, index) for epoch in range(3) for index in range(2)]
    for at, batch in enumerate(order):
        data.epoch = batch.epoch
        made: Any = ahead.load(batch, order[at + 1 :])
        seen.append([one.tolist() for one in made[0]])
        assert {one.epoch for one in source._feed.given} <= {batch.epoch}
    source.close()
    assert seen == [
        [[2 * index, 2 * index + 1], [epoch * (not persistent)] * 2, [10, 10]] for epoch in range(3) for index in (0, 1)
    ]


@pytest.mark.long
def test_workers_are_kept_busy_whatever_is_wanted_when() -> None:
    """Where nothing was to be loaded when torch asked, the next that is wanted is under way at once."""
    source: Any = source_of(Nested(), num_workers=2)
    order = [Wanted(Batch(0, index), torch.tensor([index])) for index in range(6)]
    for at in range(3):
        source.load(order[at], (), 0)
    source.load(order[3], order[4:], 0)
    assert list(source._feed.given) == [Batch(0, 4), Batch(0, 5)]
    source.close()


OF_TWO = Settings(batch_size=2, strategy=Downpour(), seed=5)


class Noisy(Nested):
    def __getitem__(self, number: int) -> Any:
        return torch.tensor([torch.rand(()), random.random(), np.random.rand()])


@pytest.mark.long
def test_the_chance_of_a_minibatch_is_its_own() -> None:
    for data in (Noisy(), DataLoader(Noisy(), 2)):
        drawn = [Loader(source_of(data), OF_TWO, 0).load(Batch(1, index), ())[0] for index in (0, 1, 0)]
        assert torch.equal(drawn[0], drawn[2])
        assert not (drawn[0] == drawn[1]).any()
    ahead, _ = Loader(source_of(Noisy(), num_workers=1), OF_TWO, 0).load(Batch(1, 0), [Batch(1, 1)])
    assert torch.equal(ahead, drawn[0])
    after = torch.rand(())
    Loader(Ahead(DataLoader(Noisy(), 2, num_workers=2), 2), OF_TWO, 0).load(Batch(1, 0), [Batch(1, 1)])
    assert torch.rand(()) == after


SAMPLERS = {
    "DistributedSampler": DistributedSampler(Nested(), 2, 0),
    "SubsetRandomSampler": SubsetRandomSampler([1, 2]),
    "RandomSampler": RandomSampler(Nested(), replacement=True),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_of_ones_own_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(UsageError, match=rf"DataLoader with a {name}: the job has its own order.*Subset\("):
        source_of(DataLoader(Nested(), 2, sampler=SAMPLERS[name]))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"a": ROWS, "b": ROWS[:3]}, "tensors of 3 and of 6 samples: pass equally many of each"),
        (3, "int cannot be cut into"),
    ],
)
def test_data_that_cannot_be_dealt_are_refused_with_the_remedy(data: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        source_of(data)


def test_two_batch_sizes_are_refused() -> None:
    assert source_of(DataLoader(Nested(), 2), 2).batch_size == 2
    with pytest.raises(UsageError, match=r"batch_size=3\) of a DataLoader with batch_size=2"):
        source_of(DataLoader(Nested(), 2), 3)


def test_samples_that_do_not_stack_are_told_of_collate_fn() -> None:
    with pytest.raises(DataError, match=r"the samples of Ragged do not stack .*collate_fn"):
        had(Ragged(), 0, 1)
    assert had(Subset(Ragged(), [3]), 0).shape == (1, 4)


def read(data: Any, settings: Settings = OF_TWO, index: int = 1) -> Iterator[tuple[list[int], int] | None]:
    """What replica `index` reads of an epoch of a stream, each minibatch with the number of its samples."""
    loader = Loader(source_of(data), settings, index)
    for number in own_numbers(index):
        found = loader.load(Batch(0, number), ())
        yield found and (found[0].tolist(), found[1])


WORKS = pytest.param(DataLoader(Numbers(), 2, num_workers=1), marks=pytest.mark.long)


@pytest.mark.parametrize("data", [Numbers(), DataLoader(Numbers(), 2), WORKS])
def test_of_a_stream_each_replica_reads_its_own_part_in_order(data: Any) -> None:
    assert list(islice(read(data), 4)) == [([1, 3], 2), ([5, 7], 2), ([9], 1), None]
    own = Settings(batch_size=2, data="own", drop_last=True, strategy=Downpour())
    assert [one and one[0] for one in islice(read(data, own), 6)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], None]


def test_a_stream_is_read_past_what_is_done_and_again_where_the_job_goes_back() -> None:
    loader = Loader(source_of(Numbers()), OF_TWO, 0)
    found = [loader.load(Batch(epoch, number), ()) for epoch, number in ((1, 1), (1, 2), (1, 0), (2, 0))]
    assert [one and one[0].tolist() for one in found] == [[4, 6], [8, 10], [0, 2], [0, 2]]


def test_an_iterator_cannot_be_read_again_and_goes_on() -> None:
    loader = Loader(source_of(iter(range(11))), OF_TWO, 0)
    found = [loader.load(Batch(0, number), ()) for number in (0, 1, 0, 1)]
    assert [one and one[0].tolist() for one in found] == [[0, 2], [4, 6], [8, 10], None]
    with pytest.raises(
        DataError, match="has nothing in epoch 1: an iterator can be read only once; use an IterableDataset"
    ):
        loader.load(Batch(1, 0), ())


def test_a_stream_of_nothing_is_refused_by_who_would_have_its_first_minibatch() -> None:
    assert list(islice(read(iter(range(1))), 1)) == [None]
    for index, settings in ((0, OF_TWO), (1, Settings(batch_size=2, data="own", strategy=Downpour()))):
        with pytest.raises(DataError, match="has no minibatch: there is nothing to train on"):
            next(read(iter(()), settings, index))


class Shuffled(IterableDataset[int]):
    """In an order that is drawn as it begins, and from a buffer as it goes."""

    def __iter__(self) -> Iterator[int]:
        numbers = [torch.randperm(20).tolist(), np.random.permutation(20).tolist()][random.randrange(2)]
        while numbers:
            drawn = random.randrange(100) + np.random.randint(100) + int(torch.randint(100, ()))
            yield numbers.pop(drawn % len(numbers))


class Cut(IterableDataset[int]):
    added = 0

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter(range(self.added + info.id, self.added + 8, info.num_workers))


def noisy(items: list[int]) -> torch.Tensor:
    random.random(), np.random.rand(items[0]), torch.rand(items[0])
    return torch.tensor(items)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_stream_that_shuffles_is_the_same_in_all_replicas_and_another_in_each_epoch(workers: int) -> None:
    orders = []
    for epoch in range(2):
        seen: list[list[int]] = []
        for index in (0, 1, 1):
            given = Loader(source_of(DataLoader(Shuffled(), 2, collate_fn=noisy, num_workers=workers)), OF_TWO, index)
            loaded = []
            for number in own_numbers(index, 5):
                loaded.append(given.load(Batch(epoch, number), ()))
                seed_all(*[len(seen)] * 3)  # as a script may
            seen.append([number for one in loaded if one for number in one[0].tolist()])  # type: ignore[attr-defined]  # a tensor
        assert sorted(seen[0] + seen[1]) == [*range(20)]
        assert seen[1] == seen[2]
        orders.append(seen[0])
    assert orders[0] != orders[1]


@pytest.mark.long
def test_of_a_stream_that_its_workers_cut_each_replica_has_a_part() -> None:
    given = DataLoader(Cut(), 2, num_workers=2, worker_init_fn=add)
    assert [one and one[0] for one in islice(read(given, index=0), 3)] == [[10, 14], [11, 15], None]
    assert [one and one[0] for one in islice(read(given), 3)] == [[12, 16], [13, 17], None]


def start_of(samples: Any, index: int, settings: Settings = OF_TWO) -> Any:
    """How replica `index` finds that a stream of these samples begins."""
    source = source_of(iter(samples))
    Loader(source, settings, index).load(Batch(3, own_numbers(index)[0]), ())
    return source.start  # type: ignore[union-attr]  # a stream


def test_streams_that_differ_are_told_apart_by_their_first_samples() -> None:
    same = [{"x": ROWS[number], "y": (number, "a", np.ones(2))} for number in range(6)]
    first = start_of(same, 0)
    assert first.epoch == 3
    assert start_of(same, 1) == first
    for other in (same[1:], [{**same[0], "x": ROWS[0] + 1}, *same[1:]], [*same[:2], same[4], *same[2:]]):
        assert start_of(other, 1) != first
    own = Settings(batch_size=2, data="own", strategy=Downpour())
    assert [start_of(same, 0, one) for one in (own, Settings(batch_size=2, strategy=Downpour(1)))] == [None, None]


@pytest.mark.parametrize(
    ("made", "items", "samples"),
    [
        (None, [None, None], 0),
        ((torch.ones(3, 5), torch.ones(3)), [(torch.ones(5), 1)] * 4, 3),
        (torch.ones(2, 7), [torch.ones(4), torch.ones(7), torch.ones(9)], 2),
        (torch.ones(3, 8, 5), [torch.ones(3, 5)] * 8, 8),
        (torch.ones(2, 8, 5), [torch.ones(5)] * 8, 8),
        (torch.ones(1, 30), [torch.ones(10)] * 3, 3),
        ((torch.ones(9, 4), torch.ones(2, 20)), [torch.ones(3, 4)] * 3, 3),
        ([torch.ones(9, 4)], [torch.ones(3, 4), None, torch.ones(6, 4)], 2),
        ("text", ["t", "e"], 2),
    ],
    ids=["none", "stacked", "padded", "sequence first", "two views", "packed", "a graph", "of one length", "no tensor"],
)
def test_a_minibatch_holds_what_was_not_left_out_of_it(made: Any, items: list[Any], samples: int) -> None:
    assert held(made, items) == samples


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_collate_fn_leaves_out_does_not_count(workers: int, stream: bool) -> None:
    def collate(items: list[int]) -> Any:
        kept = [one for one in items if one > 2]
        return torch.tensor(kept) if kept else None

    data: Any = StreamPart(range(6)) if stream else Subset(range(6), range(6))  # type: ignore[arg-type]  # as a data set
    job = Settings(batch_size=2, order="sequential", strategy=Downpour(1))
    loader = Loader(source_of(DataLoader(data, 2, collate_fn=collate, num_workers=workers)), job, 0)
    loaded: list[Any] = [loader.load(Batch(0, number), ()) for number in range(3)]
    assert [(None if made is None else made.tolist(), samples) for made, samples in loaded] == [
        (None, 0), ([3], 1), ([4, 5], 2)
    ]  # fmt: skip


def test_the_last_minibatch_of_a_replica_is_known_where_it_can_be() -> None:
    def last(index: int, number: int, replicas: int = 2, **data: Any) -> bool:
        job = Settings(**{"batch_size": 2, **data}, strategy=Downpour(replicas))
        batches = Batches(ROWS, source_of((ROWS,)), job, index, -1, iter)
        batches.at = Batch(1, number)
        return batches.last

    assert [last(0, number, 1) for number in range(3)] == [False, False, True]
    assert [last(index, number, order="sequential") for index, number in ((0, 0), (1, 1), (1, 2))] == [
        True,
        False,
        True,
    ]
    assert [last(1, number, data="own") for number in own_numbers(1, 3)] == [False, False, True]
    with pytest.raises(UsageError, match=r'batches.last of 2 replicas in order shuffled.*order="sequential"'):
        last(0, 0)
    with pytest.raises(UsageError, match="last of Numbers, a stream: its last minibatch is not known"):
        _ = Batches(Numbers(), source_of(Numbers()), OF_TWO, 0, -1, iter).last


def test_a_replica_that_is_dealt_nothing_has_done_its_part() -> None:
    """What its script does with the loss of its last minibatch, when there was none, ends no job."""
    nobody: Any = Mock()
    replica = Replica("replica 1", ScriptStage(nobody, nobody, lambda _: PlayedRole(nobody, Worker())))
    replica._script = Mock(paused=False)
    replica.optimizer(nn.Linear(2, 2))
    assert not replica.over
    assert list(replica.batches((ROWS,))) == []
    assert replica.over
