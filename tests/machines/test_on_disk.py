"""Models whose large tensors lie in files: bit for bit those in memory; what is in memory after all is told."""

from __future__ import annotations

import copy
import gc
import os
import random
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import library, nn

from distbelief.core import roles
from distbelief.core.settings import Settings
from distbelief.errors import TrainingError, UsageError
from distbelief.record.restore import load_weights
from distbelief.strategies import Single
from distbelief.strategies.partition import part_of, split_graph
from distbelief.tasks import Task, TensorData, on_disk, resolve
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.on_disk import Built, build_on_disk
from distbelief.tasks.worker import build_model

TASKS = [
    "mnist", "mnist-lenet", "mnist-alexnet", "mnist-inception", "mnist-siamese", "mnist-gru", "mnist-local",
    "mnist-squeezenet", "gpt-tiny",
]  # fmt: skip
SIDE = 16
"""Of a layer of 1 kB."""
SEED = 5


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is small lies in files too, and leaves memory as soon as can be."""
    monkeypatch.setattr(on_disk, "LARGE", 256)
    monkeypatch.setattr(on_disk, "ROOM", 2048)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on a disk, where the files lie."""
    with tempfile.TemporaryDirectory(dir=on_disk.FOLDER) as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def of(make: Callable[[], nn.Module]) -> Task:
    return Task(model=make, train=list)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check(make: Callable[[], nn.Module], why: str = "") -> Built:
    """It is the model in memory bit for bit, with its chance, and lies in files, or why it does not is told."""
    chance = random.getstate(), numpy.random.get_state()
    expected = build_model(of(make), SEED, "cpu")
    left = torch.get_rng_state(), random.random(), numpy.random.rand()
    random.setstate(chance[0])
    numpy.random.set_state(chance[1])
    built = build_on_disk(of(make), SEED)
    assert torch.equal(torch.get_rng_state(), left[0])
    assert (random.random(), numpy.random.rand()) == left[1:]
    found = state(built.model)
    assert found.keys() == state(expected).keys()
    for name, tensor in state(expected).items():
        assert torch.equal(found[name], tensor), name
        assert type(found[name]) is type(tensor)
        assert found[name].stride() == tensor.stride()
    if why:
        assert why in built.told
    else:
        assert not built.told
        assert all(one.untyped_storage().is_shared() for one in found.values() if one.nbytes >= on_disk.LARGE)
    return built


@pytest.mark.parametrize("name", TASKS)
def test_the_model_of_a_task_is_the_one_in_memory(name: str) -> None:
    check(resolve(name).model)


def layer(chance: random.Random) -> nn.Module:
    """A layer of any kind, initialised in any way."""
    made: nn.Module = chance.choice(
        [
            lambda: nn.Linear(SIDE, SIDE), lambda: nn.Conv2d(4, 8, 3), lambda: nn.GRU(SIDE, SIDE, 2),
            lambda: nn.Embedding(40, SIDE, padding_idx=3), lambda: nn.BatchNorm1d(100),
            lambda: nn.MultiheadAttention(SIDE, 2), lambda: nn.Bilinear(SIDE, 5, 7),
            lambda: nn.ConvTranspose1d(8, 8, 5), lambda: nn.LSTM(SIDE, 20, bidirectional=True),
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(SIDE, 2, 30, batch_first=True), 2),
        ]
    )()  # fmt: skip
    how = chance.choice(
        [
            None, nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.orthogonal_, nn.init.trunc_normal_,
            partial(nn.init.trunc_normal_, a=1.5), nn.init.zeros_, partial(nn.init.sparse_, sparsity=0.3),
            lambda tensor: tensor.copy_(torch.randn(tensor.shape) * 0.02),
            lambda tensor: tensor.copy_(torch.from_numpy(numpy.random.rand(*tensor.shape)) + random.random()),
        ]
    )  # fmt: skip
    with torch.no_grad():
        for one in made.parameters() if how else ():
            if one.ndim == 2:
                how(one)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_any_model_is_the_one_in_memory(seed: int) -> None:
    def make() -> nn.Module:
        chance = random.Random(seed)
        return nn.Sequential(*(layer(chance) for _ in range(chance.randint(2, 7))))

    check(make)


def linear(count: int) -> Any:
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(count)))


def reloaded() -> nn.Module:
    """Takes its own state, and that of another."""
    model = linear(8)
    model.load_state_dict(model.state_dict())
    model[1].load_state_dict(model[0].state_dict())
    return model


def tied() -> nn.Module:
    model = linear(8)
    model[7].weight = model[0].weight
    with torch.no_grad():
        model[3].weight.copy_(model[7].weight)
    return model


def caught() -> nn.Module:
    """Goes on otherwise where an operation has an error; in memory none has."""
    model = linear(8)
    try:
        model[0].weight.data.copy_(2 * model[7].weight)
        model[1].weight.data.copy_(model[0].weight.detach().numpy().sum() * torch.ones(SIDE, SIDE))
    except Exception:
        model[0].weight.data.zero_()
    return model


def summed() -> nn.Module:
    """Draws as the values say that it should."""
    model = linear(8)
    with torch.no_grad():
        for one in model:
            if one.weight.sum() > 0:
                model[0].weight.normal_()
    return model


def assigned() -> nn.Module:
    """By all ways that do not pass a module's registration."""
    model = copy.deepcopy(linear(8))
    model[0].weight.data = torch.randn(SIDE, SIDE)
    with torch.device("meta"):
        model[1] = nn.Linear(SIDE, SIDE)
    model[1].to_empty(device="cpu")
    model[1].reset_parameters()
    model[2] = nn.utils.skip_init(nn.Linear, SIDE, SIDE)
    nn.init.ones_(model[2].weight)
    nn.init.ones_(model[2].bias)
    return model.double().float()


def trained() -> nn.Module:
    """For some steps, with parametrizations."""
    model = linear(3)
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[1])
    nn.utils.parametrizations.orthogonal(model[2])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, SIDE)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def threaded() -> nn.Module:
    """Written to by threads of its own."""
    model = linear(8)
    threads = [threading.Thread(target=one.weight.data.mul_, args=(2.0,)) for one in model]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return model


def written_storage() -> nn.Module:
    """A copy of a tensor that is no parameter goes by its storage."""
    model = linear(2)
    model.register_buffer("noise", torch.randn(SIDE, SIDE))
    model.plain = torch.randn(SIDE, SIDE)
    model[1].weight.data.copy_(copy.deepcopy(model.plain))
    model[0].weight.untyped_storage().copy_(model.noise.untyped_storage())
    return model


@pytest.mark.parametrize(
    "make", [reloaded, tied, caught, summed, assigned, trained, threaded, written_storage], ids=lambda one: one.__name__
)
def test_whatever_a_function_does_with_its_parameters_they_are_those_in_memory(make: Callable[[], nn.Module]) -> None:
    check(make)


def resized() -> nn.Module:
    model = linear(2)
    model[0].weight.data.resize_(2 * SIDE, SIDE).normal_()
    return model


def drawn_and_resized() -> nn.Module:
    """From the chance of others."""
    model = linear(2)
    with torch.no_grad():
        model[1].weight.fill_(random.random() + numpy.random.rand())
    model[0].weight.data.resize_(SIDE, 2 * SIDE).normal_()
    return model


def resized_and_caught() -> nn.Module:
    model = linear(2)
    try:
        return resized()
    except RuntimeError:
        return model


def of_another_dtype() -> nn.Module:
    """For its last layer."""
    model = linear(2)
    torch.set_default_dtype(torch.float64)
    model.append(resized())
    torch.set_default_dtype(torch.float32)
    return model


def of_an_array() -> nn.Module:
    model = linear(2)
    model[0].weight = nn.Parameter(torch.from_numpy(numpy.ones((SIDE, SIDE), "float32")))
    return model


def of_a_thread() -> nn.Module:
    made: list[nn.Module] = []
    thread = threading.Thread(target=lambda: made.append(linear(1)))
    thread.start()
    thread.join()
    return nn.Sequential(*made, linear(1))


def copied_buffer() -> nn.Module:
    model = nn.BatchNorm1d(100)
    return nn.Sequential(model, copy.deepcopy(model))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (resized, "an error of resize_"),
        (drawn_and_resized, "an error of resize_"),
        (resized_and_caught, "an error of resize_"),
        (of_another_dtype, "an error of resize_"),
        (of_an_array, "'0.weight', 1,024 bytes, was not made by an operation"),
        (of_a_thread, "'0.0.weight', 1,024 bytes, was not made by an operation"),
        (copied_buffer, "'1.running_mean', 400 bytes, was not made by an operation"),
    ],
)
def test_what_is_in_memory_after_all_is_told(make: Callable[[], nn.Module], why: str) -> None:
    check(make, why)


def test_a_folder_without_room_or_in_memory_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        check(partial(linear, 2), "No space left on device")
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    check(partial(linear, 2), "/dev/shm is in memory (tmpfs)")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    check(partial(linear, 2), "No such file")


def test_no_file_has_a_name(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Not for a moment, in which a process that is killed would leave it."""
    seen: list[list[str]] = []
    reserve = os.posix_fallocate

    def noted(*words: int) -> None:
        seen.append(os.listdir(folder))
        reserve(*words)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    check(partial(linear, 2))
    assert seen
    assert not any(seen)


def empty_filled(size: int) -> torch.Tensor:
    """An operation of a user's own, named as if it gave what nobody has filled."""
    return torch.from_numpy(numpy.full((size, size), 3, "float32"))


ANOTHER = library.Library("another", "DEF")
ANOTHER.define("empty_filled(int size) -> Tensor")
ANOTHER.impl("empty_filled", empty_filled, "CompositeExplicitAutograd")


def test_what_an_operation_of_another_library_gives_is_kept_whatever_its_name_is() -> None:
    def make() -> nn.Module:
        model = linear(2)
        model[0].weight = nn.Parameter(torch.ops.another.empty_filled(SIDE))
        return model

    check(make)


class Outer(torch.Tensor):
    """Has no memory of its own that could be moved, like quantised weights."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Outer:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Outer:
        return cls(func(args[0].inner))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_who_catches_errors_has_none_of_a_move() -> None:
    def make() -> nn.Module:
        model = linear(2)
        try:
            Outer(torch.ones(SIDE, SIDE)).neg()
            torch.nested.nested_tensor([torch.ones(SIDE, SIDE), torch.ones(2, SIDE)])
        except Exception:
            model[0].weight.data.zero_()
        return model

    check(make)


def test_a_function_that_fails_is_called_once() -> None:
    calls: list[int] = []

    def make() -> nn.Module:
        calls.append(0)
        linear(2)
        raise ValueError("no such width")

    with pytest.raises(TrainingError, match="no such width"):
        build_on_disk(of(make), SEED)
    assert len(calls) == 1


def test_what_shares_its_memory_goes_on_sharing(tmp_path: Path) -> None:
    """Two tensors of one file are one."""
    path = str(tmp_path / "shared")

    def make() -> nn.Module:
        model = linear(2)
        one, two = (torch.from_file(path, shared=True, size=SIDE * SIDE).view(SIDE, SIDE) for _ in range(2))
        one.fill_(3)
        with torch.no_grad():
            model[0].weight.copy_(two)
        return model

    check(make)


def test_what_is_compiled_while_a_model_is_built_is_so_afterwards() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(0)
        return graph.forward

    doubled = torch.compile(lambda x: 2 * x, backend=backend)

    def make() -> nn.Module:
        model = linear(1)
        doubled(model[0].weight)
        return model

    build_on_disk(of(make), SEED)
    compiled.clear()
    doubled(torch.ones(3))
    assert compiled


def test_tensors_leave_memory_once_operations_have_come_to_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those alone that were come to since."""
    left: list[int] = []

    class Libc:
        def madvise(self, address: Any, size: Any, advice: int) -> None:
            left.append(size.value)

    monkeypatch.setattr(on_disk, "LIBC", Libc())
    monkeypatch.setattr(on_disk, "ROOM", 4 * 1024)
    check(lambda: nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(100))))
    assert 100 <= len(left) <= 300


def test_weights_to_begin_with_lie_in_files_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And what they are read from is not mapped as memory of the process's own."""
    values = {f"{number}.weight": torch.randn(SIDE, SIDE) for number in range(4)}
    save_file(values, tmp_path / "named.safetensors")
    mapped: list[bool] = []
    from_file = torch.UntypedStorage.from_file

    def noted(name: str, shared: bool = False, nbytes: int = 0) -> Any:
        mapped.append(shared)
        return from_file(name, shared, nbytes)

    def fill(model: nn.Module) -> None:
        found = load_weights(tmp_path / "named.safetensors", layout_of(model))
        assert all(one.untyped_storage().is_shared() for one in found.values())
        model.load_state_dict(found)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", noted)
    built = build_on_disk(of(partial(linear, 4)), SEED, fill)
    assert not built.told
    assert all(torch.equal(tensor, values[name]) for name, tensor in built.model.named_parameters())
    assert mapped
    assert all(mapped)


# partitions of such models

INPUTS = TensorData(torch.randn(8, SIDE), torch.randn(8, SIDE))


def taken(
    make: Callable[[], nn.Module], split: str = "stages", partitions: int = 2
) -> tuple[Task, Built, list[FlatModule]]:
    """A model on disk, and what each partition takes of it."""
    task = Task(model=make, train=lambda: INPUTS, loss=nn.functional.mse_loss, metric=None)
    settings = Settings(batch_size=4, strategy=Single(partitions=partitions, split=split), seed=SEED)
    built = build_on_disk(task, SEED)
    graph = split_graph(task, built.model, settings)
    found = [part_of(graph, built.model, settings, role, False)[0] for role in roles.replicas(settings.mesh)]
    return task, built, found


@pytest.mark.parametrize("split", ["stages", "neurons"])
@pytest.mark.parametrize("partitions", [2, 4])
def test_partitions_take_the_values_of_the_whole_model(split: str, partitions: int) -> None:
    task, _, parts = taken(partial(linear, 8), split, partitions)
    whole = FlatModule(build_model(task, SEED, "cpu"), layout=parts[0].layout)
    expected = torch.empty(whole.held.size, dtype=torch.uint8)
    whole.write(expected)
    found = torch.empty_like(expected)
    for part in parts:
        part.write(found[part.held.start : part.held.stop])
    assert torch.equal(found, expected)


@pytest.mark.long
def test_a_partition_keeps_nothing_of_the_others() -> None:
    _, built, parts = taken(partial(linear, 8))
    kept = weakref.ref(parts[0].module.get_parameter("0.weight"))
    other = weakref.ref(parts[1].module.get_parameter("7.weight"))
    parts.pop()
    del built
    gc.collect()
    assert kept() is not None
    assert other() is None


def test_a_hook_on_a_parameter_stays() -> None:
    """One that is whole at its partition is the parameter itself."""
    masks: list[int] = []

    def make() -> nn.Module:
        model = linear(4)
        model[0].weight.register_hook(lambda _: masks.append(0))
        return model

    _, _, parts = taken(make)
    parts[0].module.get_parameter("0.weight").sum().backward()
    assert masks == [0]


class Box:
    """No module, and no tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_what_else_refers_to_a_parameter_sees_its_values() -> None:
    def make() -> nn.Module:
        model = linear(8)
        model.box, model.turned = Box(model[0].weight), model[0].weight.detach().t()
        return model

    model: Any = check(make).model
    assert model.box.tensor is model[0].weight
    assert torch.equal(model.turned, model[0].weight.t())


class Asking(nn.Module):
    """Asks where its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = next(self.parameters()).device
        if held.type != "cpu":
            return x
        x = self.one(x.to(held))
        return self.two(x)


def test_a_model_that_asks_where_its_parameters_are_is_split_as_it_is() -> None:
    _, built, parts = taken(Asking)
    assert not built.told
    assert [sorted(name for name, _ in part.module.named_parameters()) for part in parts] == [
        ["one.bias", "one.weight"], ["two.bias", "two.weight"],
    ]  # fmt: skip


@pytest.mark.parametrize("split", ["stages", "fc9=neurons"])
def test_a_model_is_built_once(split: str) -> None:
    """Also one that differs from one call to the next, and one that cannot be split as it should be."""
    built: list[int] = []

    def make() -> nn.Module:
        built.append(0)
        return linear(7 + len(built))

    if split == "stages":
        taken(make, split)
    else:
        with pytest.raises(UsageError, match="fc9"):
            taken(make, split)
    assert len(built) == 1
