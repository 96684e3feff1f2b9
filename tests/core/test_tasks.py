"""Tasks: the built-in ones, a user's own, their data and its order; every bad input is one clear error."""

import dataclasses
import gzip
import hashlib
import importlib
import io
import os
import struct
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import made
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, TensorDataset

from distbelief import tasks
from distbelief.core.effects import Batch
from distbelief.core.settings import Settings
from distbelief.errors import DataError, TrainingError, UsageError
from distbelief.job import Job
from distbelief.places.processes.local import Local
from distbelief.tasks.flat import layout_of
from distbelief.tasks.order import Order, key, seed_chance
from distbelief.tasks.task import Task, correct
from distbelief.tasks.worker import Trainer, measure, placed

# the package's name `mnist` is the function
MNIST: Any = importlib.import_module("distbelief.tasks.digits")
REAL = Path(os.environ.get("DISTBELIEF_DATA") or Path(__file__).parents[3] / "shared/data/mnist")


def contents(images: int = 3, labels: int = 3, label: int = 9) -> dict[str, bytes]:
    pictures = struct.pack(">4B3I", 0, 0, 8, 3, images, 28, 28) + (bytes(range(256)) * 3 + bytes(16)) * images
    names = struct.pack(">4BI", 0, 0, 8, 1, labels) + bytes([label] * labels)
    return {name: pictures if "images" in name else names for name in MNIST.FILES}


def fill(folder: Path, **options: int) -> str:
    for name, content in contents(**options).items():
        (folder / name).write_bytes(content)
    return str(folder)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no data folder of this machine, and a current folder of its own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("DISTBELIEF_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))


@pytest.mark.parametrize(
    ("name", "parameters", "shape"), [("mnist", 266_610, (784,)), ("mnist-lenet", 431_080, (1, 28, 28))]
)
def test_mnist(tmp_path: Path, name: str, parameters: int, shape: tuple[int, ...]) -> None:
    task = tasks.resolve(name, fill(tmp_path))
    model = task.model()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert task.test is not None
    for data in map(tasks.as_data, (task.train(), task.test())):
        inputs, targets = data.batch(torch.tensor([2, 0]))
        assert (inputs.shape, inputs.dtype) == ((2, *shape), torch.float32)
        raw = torch.arange(784).remainder(256) * (torch.arange(784) < 768)
        assert torch.allclose(inputs[1].flatten(), (raw / 255 - 0.1307) / 0.3081, atol=1e-5)
        assert targets.tolist() == [9, 9]
        assert task.loss(model(inputs), targets).isfinite()
    assert tasks.resolve(task.reference, task.data_dir).data_dir == str(tmp_path)


def test_digits() -> None:
    pytest.importorskip("sklearn")
    task = tasks.digits()
    train, test = (tasks.as_data(load()) for load in (task.train, task.test))
    assert (len(train), len(test)) == (1437, 360)
    inputs, targets = test.batch(torch.arange(360))
    assert (inputs.dtype, inputs.shape, inputs.min(), inputs.max()) == (torch.float32, (360, 64), 0, 1)
    assert targets.bincount().min() > 20, "the split is not shuffled"
    again, _ = tasks.as_data(task.test()).batch(torch.arange(360))
    assert torch.equal(inputs, again)
    assert task.model()(inputs).shape == (360, 10)


def test_a_changed_task_has_no_name_by_which_processes_would_make_the_unchanged_one() -> None:
    changed = dataclasses.replace(tasks.digits(), loss=nn.functional.multi_margin_loss)
    assert (tasks.digits().reference, changed.reference) == ("digits", "")
    with pytest.raises(UsageError, match="module:function"):
        Local().run(Job(task=changed))


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:77", "mps"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match=f"--device {device}"):
        placed(device)


def test_cuda_is_one_gpu_for_each_replica_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [placed("cuda", index).index for index in range(4)] == [0, 1, 0, 1]
    assert placed("cuda:1", 2).index == 1


def test_digits_without_scikit_learn_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"pip install 'distbelief\[digits\]'"):
        tasks.digits().train()
    assert "pip install" in (tasks.available("digits") or "")


def test_the_named_folder_then_the_environment_then_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {}
    for samples, name in enumerate(("named", "environment", "cache/distbelief/mnist"), 1):
        (tmp_path / name).mkdir(parents=True)
        folders[name] = fill(tmp_path / name, images=samples, labels=samples)
    assert len(tasks.mnist().train()) == 3  # type: ignore[arg-type]
    monkeypatch.setenv("DISTBELIEF_DATA", folders["environment"])
    assert len(tasks.mnist().train()) == 2  # type: ignore[arg-type]
    assert len(tasks.mnist(folders["named"]).train()) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"label": 10}, "train-labels-idx1-ubyte holds the label 10"),
        ({"images": 4}, "holds 4 images, but .*train-labels-idx1-ubyte 3 labels"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, int], says: str) -> None:
    with pytest.raises(DataError, match=says):
        tasks.mnist(fill(tmp_path, **options)).train()


def test_who_has_no_home_is_told_where_else_and_nothing_is_called_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", str)  # as of a user whom the system has no name of
    with pytest.raises(DataError, match=r"^no MNIST: this user has no home folder: .*XDG_CACHE_HOME.*--data-dir"):
        MNIST.folder_of(None)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", sorted(MNIST.FILES))
def test_a_named_folder_that_lacks_a_file_is_refused(tmp_path: Path, name: str) -> None:
    fill(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"it lacks {name}; put .* train 'digits'"):
        tasks.mnist(str(tmp_path)).train()


def test_without_network_the_answer_says_what_goes_where() -> None:
    why = tasks.available("mnist")
    assert why
    assert "\n" not in why
    for part in (*MNIST.FILES, *MNIST.MIRRORS, "no network", "'digits'", "--data-dir", "cache/distbelief/mnist"):
        assert part in why


def test_a_mirror_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "ANSWER_SECONDS", 0.02)
    end = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: end.wait(60))
    assert "no answer within 0.02 s" in (tasks.available("mnist") or "")
    end.set()


def serve(monkeypatch: pytest.MonkeyPatch, answers: dict[str, bytes]) -> None:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        assert timeout <= MNIST.ANSWER_SECONDS
        if url not in answers:
            raise OSError("404")
        return io.BytesIO(answers[url])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(
        MNIST, "FILES", {name: hashlib.md5(content).hexdigest() for name, content in contents().items()}
    )


def test_a_download_is_verified_kept_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, {f"{MNIST.MIRRORS[1]}{name}.gz": gzip.compress(content) for name, content in contents().items()})
    assert tasks.available("mnist") is None
    serve(monkeypatch, {})
    assert tasks.available("mnist") is None
    cache = tmp_path / "cache/distbelief/mnist"
    assert {p.name: p.read_bytes() for p in cache.iterdir()} == contents()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda _: gzip.compress(b"other"), "its content has MD5"),
        (lambda packed: packed[:-20], "Compressed file ended"),
        (lambda _: b"<html>", "Not a gzipped file"),
        (lambda _: gzip.compress(bytes(1 << 22)), "more than 2097152 bytes"),
    ],
)
def test_a_bad_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, says: str) -> None:
    serve(
        monkeypatch,
        {f"{MNIST.MIRRORS[0]}{name}.gz": spoil(gzip.compress(content)) for name, content in contents().items()},
    )
    monkeypatch.setattr(MNIST, "FILE_LIMIT", 1 << 21)
    assert says in (tasks.available("mnist") or "")
    assert list((tmp_path / "cache/distbelief/mnist").iterdir()) == []


@pytest.mark.skipif(not REAL.is_dir(), reason="the real MNIST is not on this machine")
def test_the_real_files_have_the_known_checksums() -> None:
    for name, md5 in MNIST.FILES.items():
        path = MNIST._file(REAL, name)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            assert hashlib.md5(file.read()).hexdigest() == md5


GOOD = (
    "from torch import nn\nfrom distbelief.tasks import Task\ndef make(data_dir=None):\n    return Task(model=lambda: "
    "nn.Linear(1, 2), train=list)\n"
)


def test_a_users_own_task() -> None:
    Path("own_good.py").write_text(GOOD)
    task = tasks.resolve("own_good:make", "here")
    assert (task.reference, task.data_dir, task.test) == ("own_good:make", "here", None)
    assert task.metric(torch.tensor([[1.0, 2.0]]), torch.tensor([1])) == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("1/0", "importing 'MODULE' raised ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "importing 'MODULE' raised SystemExit: 3"),
        ("def make(:", "importing 'MODULE' raised SyntaxError"),
        ("import absent_module", "importing 'MODULE' raised ModuleNotFoundError: No module named 'absent_module'"),
        ("def other(): pass", "module 'MODULE' has no 'make'; .*: other"),
        ("make = 3", "has a int by the name 'make'"),
        ("def make(): raise KeyError('x')", "raised KeyError: 'x'"),
        ("def make(size): pass", "raised TypeError: .*'size'"),
        ("def make(): return 3", "returned int; it must return a distbelief.tasks.Task"),
        (
            "import torch\nfrom distbelief.tasks import Task\ndef make(): return Task(model=torch.nn.Linear(1, 1), "
            "train=list)",
            "a task's model is a function",
        ),
    ],
)
def test_a_users_mistake_is_named(source: str, says: str) -> None:
    module = f"own_{hashlib.md5(source.encode()).hexdigest()}"
    Path(f"{module}.py").write_text(source)
    with pytest.raises(UsageError, match=says.replace("MODULE", module)) as caught:
        tasks.resolve(f"{module}:make")
    assert module in str(caught.value)


@pytest.mark.parametrize("field", ["model", "train", "test", "loss", "metric"])
def test_a_field_that_is_no_function_is_refused(field: str) -> None:
    fields: dict[str, Any] = {"model": nn.Identity, "train": list, field: 3}
    with pytest.raises(UsageError, match=f"a task's {field} is a function, not a int"):
        tasks.Task(**fields)


def test_datasets_of_every_kind_give_the_same_batch() -> None:
    inputs, targets = torch.arange(12.0).view(6, 2), torch.arange(6)
    both = TensorDataset(inputs, targets)
    for dataset in (tasks.TensorData(inputs, targets), both, Subset(both, list(range(6))), [both[i] for i in range(6)]):
        data = tasks.as_data(dataset)
        assert len(data) == 6
        got = data.batch(torch.tensor([4, 1]))
        assert torch.equal(got[0], inputs[[4, 1]])
        assert torch.equal(got[1], targets[[4, 1]])
    assert isinstance(tasks.as_data(both), tasks.TensorData)


def test_data_that_cannot_be_used_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

        def __len__(self) -> int:
            return 1

    for dataset in (Stream(), iter([1])):
        with pytest.raises(UsageError, match="cannot be dealt out in portions: pass a map-style dataset"):
            tasks.as_data(dataset)  # type: ignore[arg-type]
    for items, says in (([1, 2], "is a int"), ([(1, 2, 3)], "is a tuple of 3 values")):
        with pytest.raises(DataError, match=says):
            tasks.as_data(items).batch(torch.tensor([0]))
    for other in (torch.zeros(2), torch.tensor(0), [0, 0, 0]):
        with pytest.raises(UsageError, match="equally many samples"):
            tasks.TensorData(torch.zeros(3, 1), other)  # type: ignore[arg-type]


def pair(one: torch.Tensor, other: torch.Tensor, buffer: bool = False) -> nn.Module:
    module = nn.Module()
    module.one = nn.Parameter(one)
    module.register_buffer("other", other) if buffer else module.register_parameter("other", nn.Parameter(other))
    return module


MATRIX = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "module",
    [
        pair(MATRIX, MATRIX.T),
        pair(MATRIX[:3], MATRIX[2:]),
        pair(MATRIX, MATRIX),
        pair(MATRIX[:, :4], MATRIX[:, 3:]),
        pair(MATRIX, MATRIX[1, 2]),
        pair(MATRIX, MATRIX[2], buffer=True),
        pair(MATRIX, MATRIX.view(torch.int32)[3], buffer=True),
        pair(MATRIX, MATRIX[3, 5].expand(7), buffer=True),
    ],
    ids=["transposed", "slices", "views", "columns", "an element", "a buffer", "another dtype", "expanded"],
)
def test_two_tensors_with_an_element_in_common_are_refused(module: nn.Module) -> None:
    with pytest.raises(
        UsageError,
        match=r"'(one|other)' and '(one|other)' are two tensors that share memory: tie them by assigning the same "
        r"parameter",
    ):
        layout_of(module)


def test_what_lies_side_by_side_and_what_is_tied_is_not_refused() -> None:
    tied = nn.Linear(6, 6)
    assert layout_of(nn.Sequential(tied, tied)).aliases == {"1.weight": "0.weight", "1.bias": "0.bias"}
    for module in (
        pair(MATRIX[:, :3], MATRIX[:, 3:]),
        pair(MATRIX[::2], MATRIX[1::2]),
        pair(MATRIX[:2], MATRIX[2:]),
        pair(MATRIX, MATRIX[:0]),
    ):
        assert layout_of(module).parameters == sum(p.numel() for p in module.parameters())
    alone = nn.Module()
    alone.one = nn.Parameter(torch.ones(1).expand(5))
    assert layout_of(alone).parameters == 5


def test_a_model_without_shapes_is_refused_with_the_remedy() -> None:
    for module in (nn.LazyLinear(3), nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())):
        with pytest.raises(
            UsageError, match="of a lazy module has no shape yet: run a minibatch through the model first"
        ):
            layout_of(module)


def test_a_test_set_of_nothing_is_refused_with_the_remedy() -> None:
    task = tasks.Task(model=lambda: nn.Linear(1, 2), train=lambda: [(0.0, 0)], test=list).named("mine:task")
    with pytest.raises(DataError, match=r"the test data of task 'mine:task' hold 0 samples.*--evaluate-every 0"):
        measure(task, nn.Linear(1, 2))


def regression(metric: Any) -> tasks.Task:
    data = [(torch.ones(1), torch.full((1,), float(i))) for i in range(4)]
    made = tasks.Task(
        model=lambda: nn.Linear(1, 1), train=lambda: data, test=lambda: data, loss=nn.functional.mse_loss, metric=metric
    )
    return made.named("mine:task")


def test_a_task_without_a_metric_is_measured_by_its_loss() -> None:
    assert measure(regression(None), nn.Linear(1, 1)).accuracy is None
    assert measure(regression(None), nn.Linear(1, 1)).loss > 0


def test_metrics_by_name_are_means_over_the_samples() -> None:
    metrics = {"target": lambda _, target: target.sum(), "accuracy": lambda _, target: (target < 3).sum()}
    measured = measure(regression(metrics), nn.Linear(1, 1))
    assert (measured.accuracy, measured.metrics) == (0.75, {"target": 1.5})


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (
            correct,
            r"metric 'accuracy' \(correct\) of task 'mine:task' raised ValueError: counts correct classes: .*=None",
        ),
        (lambda *_: 5, r"metric 'accuracy' .* is 5 for 4 samples, but must count the right ones; .*=None"),
        ({"mine": lambda *_: "many"}, r"metric 'mine' .* raised ValueError: could not convert string to float"),
    ],
)
def test_a_metric_that_does_not_fit_is_named(metric: Any, says: str) -> None:
    with pytest.raises(TrainingError, match=f"^{says}"):
        measure(regression(metric), nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["", "loss", 3])
def test_a_metric_that_has_no_name_of_its_own_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="has the name"):
        regression({name: correct})


@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 50),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_every_sample_occurs_once_in_an_epoch(samples: int, batch_size: int, seed: int, epoch: int) -> None:
    order = Order(samples, batch_size, seed)
    batches = [order.indices(epoch, b).tolist() for b in range(order.batches)]
    assert sorted(i for batch in batches for i in batch) == list(range(samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    with pytest.raises(DataError, match="give every replica the same data"):
        order.indices(epoch, order.batches)
    with pytest.raises(DataError, match="minibatch -1"):
        order.indices(epoch, -1)


def test_an_order_follows_from_seed_and_epoch_alone() -> None:
    order = Order(100, 100, 7)
    epochs = [order.indices(e, 0).tolist() for e in range(5)]
    assert len({tuple(e) for e in epochs}) == 5
    assert Order(100, 100, 8).indices(0, 0).tolist() != epochs[0]
    other = Order(100, 100, 7)
    assert [other.indices(e, 0).tolist() for e in (4, 0, 4, 1)] == [epochs[e] for e in (4, 0, 4, 1)]
    assert len(order._permutations) == 2


@pytest.mark.parametrize(
    ("samples", "batch_size", "error"), [(0, 1, DataError), (1, 0, UsageError), (1, -1, UsageError)]
)
def test_an_order_of_nothing_is_refused(samples: int, batch_size: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        Order(samples, batch_size, 0)


def test_chance_follows_from_seed_epoch_and_minibatch_alone() -> None:
    def draw(*keys: int) -> list[float]:
        seed_chance(*keys)
        return nn.functional.dropout(torch.ones(64)).tolist()

    torch.manual_seed(int.from_bytes(os.urandom(4)))
    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert draw(1, 2, 3) not in [draw(*keys) for keys in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1))]
    assert key(1, 23, 4) != key(12, 3, 4)


def test_what_data_draw_follows_from_the_minibatch_too() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 8

        def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.randn(len(indices), 2), indices % 2

    model = nn.Linear(2, 2)
    trainer = Trainer(Task(model=lambda: model, train=Noisy), model, Settings(batch_size=4, seed=1))
    alone = trainer.compute(Batch(0, 1)).loss
    trainer.compute(Batch(0, 0))
    torch.rand(5)
    assert trainer.compute(Batch(0, 1)).loss == alone


def in_parts(settings: Settings, labels: Tensor | None = None, samples: int = 60, epoch: int = 0) -> list[list[int]]:
    """Return the samples of each replica in an epoch, as its minibatches go through them."""
    data = None if labels is None else tasks.TensorData(torch.zeros(samples, 1), labels)
    order, replicas = Order.of(settings, samples, data), settings.replicas
    batches = samples // settings.batch_size if settings.drop_last else order.batches
    return [
        [
            i
            for b in range(n * batches // replicas, (n + 1) * batches // replicas)
            for i in order.indices(epoch, b).tolist()
        ]
        for n in range(replicas)
    ]


@given(samples=st.integers(12, 100), batch_size=st.integers(1, 4), replicas=st.integers(1, 3), drop=st.booleans())
def test_private_data_are_cut_once_and_each_replica_goes_through_its_part_anew(
    samples: int, batch_size: int, replicas: int, drop: bool
) -> None:
    settings = made(data="private", replicas=replicas, batch_size=batch_size, drop_last=drop, seed=3)
    epochs = [in_parts(settings, samples=samples, epoch=epoch) for epoch in range(3)]
    left_out = samples % batch_size if drop else 0
    for parts in epochs:
        assert sum(map(len, parts)) == len({i for part in parts for i in part}) == samples - left_out
        # whoever has the last part has the samples that are left out too, which differ from epoch to epoch
        assert [{*part} for part in parts[:-1]] == [{*part} for part in epochs[0][:-1]]


def test_private_parts_are_in_another_order_in_each_epoch_and_of_another_cut_with_another_seed() -> None:
    settings = made(data="private", replicas=3, batch_size=5)
    first, second = (in_parts(settings, epoch=epoch) for epoch in range(2))
    other = in_parts(made(data="private", replicas=3, batch_size=5, seed=1))
    assert all(one != two and {*one} == {*two} for one, two in zip(first, second, strict=True))
    assert all({*one} != {*two} for one, two in zip(first, other, strict=True))


def test_sorted_parts_follow_the_labels() -> None:
    labels = torch.tensor([2, 0, 1]).repeat(20)
    parts = in_parts(made(data="sorted", replicas=3, batch_size=5), labels)
    assert [{labels[i].item() for i in part} for part in parts] == [{0}, {1}, {2}]
    halves = in_parts(made(data="sorted", replicas=2, batch_size=5), labels)
    assert [{labels[i].item() for i in part} for part in halves] == [{0, 1}, {1, 2}]


@pytest.mark.parametrize("labels", [torch.zeros(60), torch.zeros(60, 2, dtype=torch.int64), None], ids=str)
def test_targets_that_are_no_classes_are_not_cut_by(labels: Tensor | None) -> None:
    with pytest.raises(UsageError, match=r"--data sorted: the targets are not class numbers .*use --data private"):
        in_parts(made(data="sorted", replicas=2), labels)
