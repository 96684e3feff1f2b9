"""What training costs: counts and memory beside those made by hand, times that add up, and what is left out."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from asking import Ask
from torch import Tensor, nn

from distbelief.cli import tables
from distbelief.core.optimizer import LEARNING_RATES, optim
from distbelief.errors import TrainingError, UsageError
from distbelief.lab import number
from distbelief.lab.cost import cost, profile, trace
from distbelief.lab.cost.cost import compare
from distbelief.lab.cost.options import CostRequest
from distbelief.lab.cost.profile import Profile, StepTime
from distbelief.lab.cost.trace import KINDS, REST, Tracer
from distbelief.lab.cost.trace import _vectors as trace_vectors
from distbelief.tasks import Task, TensorData, resolve


def task_of(layers: Callable[[], list[nn.Module]], shape: tuple[int, ...]) -> Task:
    data = TensorData(torch.zeros(8, *shape), torch.zeros(8, dtype=torch.int64))
    return Task(model=lambda: nn.Sequential(*layers()), train=lambda: data)


def tracer_of(task: Task) -> Tracer:
    return Tracer(task, task.train().batch(torch.arange(2)))


IMAGES = {"mnist": (784,), "mnist-lenet": (1, 28, 28)}
VGG = {224: (3, 64, 64), 112: (64, 128, 128), 56: (128, 256, 256, 256), 28: (256, 512, 512, 512), 14: (512,) * 4}
"""Of the sides of its maps: how many there are, one convolution after the other."""
INCEPTION = {
    28: ((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64)),
    14: (
        (480, 192, 96, 208, 16, 48, 64),
        (512, 160, 112, 224, 24, 64, 64),
        (512, 128, 128, 256, 24, 64, 64),
        (512, 112, 144, 288, 32, 64, 64),
        (528, 256, 160, 320, 32, 128, 128),
    ),
    7: ((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)),
}
"""Table 1 of the paper, by the sides of maps: each module's given, 1x1, 3x3 reduced, 3x3, 5x5 reduced, 5x5, pool."""
FIRE = {54: ((96, 16, 64), (128, 16, 64), (128, 32, 128)),
        27: ((256, 32, 128), (256, 48, 192), (384, 48, 192), (384, 64, 256)), 13: ((512, 64, 256),)}  # fmt: skip
"""Of the sides of the maps: each module's given, squeezed and expanded twice."""


@pytest.mark.parametrize(
    ("name", "parameters", "multiply_adds"),
    [
        ("mnist", 784 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10, 784 * 300 + 300 * 100 + 100 * 10),
        (
            "mnist-lenet",
            20 * 25 + 20 + 50 * 20 * 25 + 50 + 800 * 500 + 500 + 500 * 10 + 10,
            24 * 24 * 20 * 25 + 8 * 8 * 50 * 20 * 25 + 800 * 500 + 500 * 10,
        ),
        (
            "alexnet",
            60_965_224,
            # in each of two columns, half of the maps see half
            55 * 55 * 96 * 3 * 121
            + 27 * 27 * 256 * 48 * 25
            + 13 * 13 * 9 * (384 * 256 + 384 * 192 + 256 * 192)
            + 9216 * 4096
            + 4096 * 4096
            + 4096 * 1000,
        ),
        (
            "vgg16",
            138_357_544,
            sum(
                side * side * 9 * given * made for side, maps in VGG.items() for given, made in itertools.pairwise(maps)
            )
            + 25088 * 4096
            + 4096 * 4096
            + 4096 * 1000,
        ),
        (
            "inception-v1",
            6_998_552,
            112 * 112 * 64 * 3 * 49
            + 56 * 56 * (64 * 64 + 192 * 64 * 9)
            + sum(
                side * side * (given * (one + less3 + less5 + pool) + 9 * less3 * three + 25 * less5 * five)
                for side, modules in INCEPTION.items()
                for given, one, less3, three, less5, five, pool in modules
            )
            + 1024 * 1000,
        ),
        (
            "squeezenet",
            1_248_424,
            109 * 109 * 96 * 3 * 49
            + sum(
                side * side * (given * squeezed + (1 + 9) * squeezed * expanded)
                for side, modules in FIRE.items()
                for given, squeezed, expanded in modules
            )
            + 13 * 13 * 512 * 1000,
        ),
    ],
)
@pytest.mark.long
def test_parameters_and_multiply_adds_are_those_counted_by_hand(name: str, parameters: int, multiply_adds: int) -> None:
    sample = torch.zeros(2, *IMAGES.get(name, (3, 224, 224))), torch.zeros(2, dtype=torch.int64)
    layers = Tracer(resolve(name), sample).layers
    assert sum(layer.parameters for layer in layers) == parameters
    assert sum(layer.multiply_adds for layer in layers) == multiply_adds


class Branching(nn.Module):
    """A layer that is called twice, a matrix product in between, a parameter and weights that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last.weight = self.inner.weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.inner(x)) * self.scale
        return self.last(x) @ torch.ones(6, 4)


def test_what_is_called_twice_shared_or_between_layers_is_counted_once_and_named() -> None:
    layers = {layer.name: layer for layer in tracer_of(task_of(lambda: [Branching()], shape=(6,))).layers}
    assert (layers["0.inner"].calls, layers["0.inner"].multiply_adds, layers["0.inner"].parameters) == (2, 72, 36)
    assert (layers["0.last"].multiply_adds, layers["0.last"].parameters) == (36, 0)
    assert (layers[REST].multiply_adds, layers[REST].parameters) == (24, 6)


def test_feature_maps_are_what_the_backward_pass_keeps_and_gradients_are_of_what_layers_make() -> None:
    batch, wide = 16, 32
    task = task_of(lambda: [nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 10)], shape=(8,))
    trace = tracer_of(task).follow(batch, optim("sgd"))
    # relu keeps what it makes, a linear layer what it is given; the loss keeps its log-probabilities, and a few numbers
    assert trace.maps["1"] == 4 * batch * wide
    assert not trace.maps.get("0")
    assert 4 * batch * 10 <= trace.maps[REST] <= 4 * batch * 10 + 16
    assert trace.gradients == {"0": 4 * batch * wide, "1": 4 * batch * wide, "2": 4 * batch * 10, REST: 0}


@pytest.mark.parametrize(("name", "vectors"), [("sgd", 0), ("momentum", 1), ("adagrad", 1), ("adam", 2), ("lamb", 2)])
def test_memory_is_told_by_kind(name: str, vectors: int) -> None:
    wide = 256
    task = task_of(lambda: [nn.Linear(wide, wide, bias=False)], shape=(wide,))
    trace = tracer_of(task).follow(4, optim(name))
    parameters = 4 * wide * wide
    if name != "lamb":  # which holds most as it steps, when the minibatch is gone
        assert trace.memory["input batch"] == 4 * 4 * wide + 8 * 4
    assert trace.memory["parameters"] == trace.memory["gradients"] == parameters
    assert vectors * parameters <= trace.memory["optimizer state"] <= vectors * parameters * 1.001
    assert trace.peak == sum(trace.memory.values())


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) >= 0 else -x


def test_a_layer_that_needs_values_is_named_and_followed_as_it_computes() -> None:
    tracer = tracer_of(task_of(lambda: [nn.Linear(8, 10), Deciding()], shape=(8,)))
    assert "layer 1 (Deciding)" in tracer.note
    assert [layer.name for layer in tracer.layers] == ["0", "1", REST]
    plain = tracer_of(task_of(lambda: [nn.Linear(8, 10), nn.Identity()], shape=(8,)))
    assert not plain.note
    assert (
        tracer.follow(4, optim("adam")).memory["optimizer state"]
        == plain.follow(4, optim("adam")).memory["optimizer state"]
    )


class Last(nn.Module):
    """What a recurrent layer has made in the last step."""

    def forward(self, made: tuple[Tensor, object]) -> Tensor:
        return made[0][:, -1]


@pytest.mark.parametrize(
    ("made", "multiply_adds"),
    [
        (lambda: nn.RNN(8, 6, batch_first=True), 5 * (8 + 6) * 6),
        (lambda: nn.GRU(8, 6, batch_first=True), 5 * 3 * (8 + 6) * 6),
        # the second layer is given both directions of the first
        (lambda: nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True), 5 * 2 * 4 * ((8 + 6) * 6 + (12 + 6) * 6)),
        (lambda: nn.LSTM(8, 6, batch_first=True, proj_size=4), 5 * (4 * (8 + 4) * 6 + 6 * 4)),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_a_recurrent_layer_multiplies_all_its_weights_in_each_step(
    made: Callable[[], nn.Module], multiply_adds: int
) -> None:
    layers = {layer.name: layer for layer in tracer_of(task_of(lambda: [made(), Last()], shape=(5, 8))).layers}
    assert (layers["0"].multiply_adds, layers[REST].multiply_adds) == (multiply_adds, 0)


def test_what_has_parameters_and_no_multiply_adds_that_are_known_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_of(lambda: [nn.Linear(8, 10), nn.BatchNorm1d(10), nn.ReLU()], shape=(8,))
    found = cost_of(task, monkeypatch, batch_size=4)
    [note] = found.notes
    assert note.startswith("multiply-adds of BatchNorm1d are unknown")
    tables.show_cost(found)
    rows = {row[0]: row for row in (cells(line) for line in capsys.readouterr().out.splitlines()) if row}
    assert [rows[name][4] for name in "012"] == ["80", "unknown", ""]
    assert not cost_of(LINEAR, monkeypatch, batch_size=4).notes


@pytest.mark.long
def test_a_minibatch_that_a_model_refuses_is_left_out_or_told_and_no_largest_batch_is_looked_for_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch norm refuses one sample."""
    monkeypatch.setattr(profile, "ENOUGH", 0.0)
    task = task_of(lambda: [nn.Linear(8, 10), nn.BatchNorm1d(10)], shape=(8,))
    found = cost.measure(task, CostRequest(4), optim("sgd"), 1e10, seconds=0.3)
    assert [*found.profile.left_out] == [1]
    assert "a minibatch of 1 raised ValueError: Expected more than 1 value" in found.profile.left_out[1]
    assert found.largest_batch > 4
    assert tracer_of(task).mapped(1) == {}
    with pytest.raises(TrainingError, match="a minibatch of 1 raised ValueError"):
        cost.measure(task, CostRequest(1), optim("sgd"))
    with pytest.raises(UsageError, match="not 2 samples fit"):
        cost.measure(task, CostRequest(4), optim("sgd"), 1.0)


def test_a_model_that_cannot_compute_is_an_error_that_names_the_layer() -> None:
    with pytest.raises(TrainingError, match=r"layer 0 \(Linear\) raised RuntimeError"):
        tracer_of(task_of(lambda: [nn.Linear(9, 10)], shape=(8,)))


def measured(task: Task, sizes: list[int], seconds: float = 0.3, **refused: str) -> Profile:
    names = [layer.name for layer in tracer_of(task).layers]
    return profile.measure(task, names, {size: refused.get(f"of_{size}", "") for size in sizes}, seconds)


def test_layers_partition_the_passes_and_steps_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "ENOUGH", 0.0)
    monkeypatch.setattr(profile, "MOST_ROUNDS", 3)
    found = measured(
        task_of(lambda: [nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)], shape=(300,)), [1, 256], seconds=30.0
    )
    [small, large] = found.points
    assert large.step > 2 * small.step
    for phase, of in enumerate((large.forward, large.backward)):
        assert sum(times[phase] for times in found.layers.values()) == pytest.approx(of)
    assert found.layers["0"][0] > found.layers["2"][0]
    assert found.at(256).step == pytest.approx(large.step)
    assert small.step < found.at(100).step < large.step


class Times:
    """A time of the thread that goes on by a millisecond whenever it is looked at, and a wall's that is slower."""

    def __init__(self, busy: float) -> None:
        self._busy, self._worked = busy, 0

    def thread_time_ns(self) -> int:
        self._worked += 1_000_000
        return self._worked

    def perf_counter(self) -> float:
        return self._busy * self._worked / 1e9


@pytest.mark.parametrize("busy", [1.0, 1.5])
def test_times_are_the_threads_and_the_walls_beside_them_say_how_busy_the_machine_is(
    busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the wall's is looked at before the first of four looks at the thread's, and after the last
    monkeypatch.setattr(profile, "time", Times(0.75 * busy))
    monkeypatch.setattr(profile, "ENOUGH", 0.0)
    monkeypatch.setattr(profile, "MOST_ROUNDS", 3)
    task = task_of(lambda: [nn.Linear(8, 10)], shape=(8,))
    found = profile.measure(task, ["(model)"], {1: "", 4: ""}, 1e3)
    assert found.busy == pytest.approx(busy, rel=1e-6)
    # input, forward and backward, each until the next is begun
    assert [point.step for point in found.points] == pytest.approx([3e-3] * 2)
    assert [point.forward for point in found.points] == pytest.approx([1e-3] * 2)


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_a_profile_ends_with_its_time_and_uses_it(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "time", times := Times(1.0))
    task = task_of(lambda: [nn.Linear(8, 10)], shape=(8,))
    found = profile.measure(task, ["(model)"], {1: "", 4: ""}, seconds)
    assert 0.7 * seconds < times.perf_counter() <= seconds
    assert not found.left_out


def test_sizes_that_do_not_fit_the_time_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "ENOUGH", 0.0)
    monkeypatch.setattr(profile, "MOST_ROUNDS", 1)
    task = task_of(lambda: [nn.Linear(8, 10)], shape=(8,))
    found = measured(task, [1, 4, 16], seconds=1e-6)
    assert [point.batch_size for point in found.points] == [1]
    assert set(found.left_out) == {4, 16}
    assert "do not fit 1e-06 s" in found.left_out[4]
    refused = measured(task, [1, 4], of_4="no room")
    assert refused.left_out == {4: "no room"}


@pytest.mark.parametrize(("seconds", "left_out"), [(30.0, set()), (29.0, {64})])
def test_as_many_sizes_are_profiled_as_fit_the_time(seconds: float, left_out: set[int]) -> None:
    """Four steps of each of the others, 6.2 s in all, and seven of the largest, 3.3 s each."""
    steps = {size: 0.1 + 0.05 * size for size in profile.ladder(64)}

    class Known:
        def __init__(self, size: int) -> None:
            self.step = lambda: steps[size]

        def forget(self) -> None: ...

    found, left = profile._fitting(Known, dict.fromkeys(steps, ""), seconds, lambda _: None)  # type: ignore[arg-type]  # all that is asked of steps
    assert set(left) == left_out == set(steps) - set(found)


class Back(torch.autograd.Function):
    """Its way back looks at values."""

    @staticmethod
    def forward(_: Any, given: Tensor) -> Tensor:
        return given * 1

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # as torch documents it
        return gradient if float(gradient.sum()) >= 0 else gradient * 2


class BackLinear(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.inner = nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Back.apply(self.inner(x))
        return made.clone()


class Forwards(nn.Module):
    """The same layer and operations, on the way back too, without looking."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.inner = nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).clone()


def test_what_is_asked_of_a_model_that_has_to_compute_is_continued_from_two_small_minibatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide, sizes = 256, list[int]()
    tracer = tracer_of(task_of(lambda: [BackLinear(wide), nn.ReLU(), nn.Linear(wide, 10)], shape=(wide,)))
    followed = Tracer._followed

    def watched(self: Tracer, size: int, vectors: tuple[float, float]) -> Any:
        sizes.append(size)
        return followed(self, size, vectors)

    monkeypatch.setattr(Tracer, "_followed", watched)
    found = {size: tracer.follow(size, optim("adam")) for size in (2, 3, 64, 1 << 20)}
    assert sizes == [2, 4]
    assert tracer.mapped(64) == {}
    assert sizes[2:] == [2, 4]  # with an optimizer that keeps nothing
    assert "memory is extrapolated from computing 2 and 4 samples" in tracer.note
    plain = tracer_of(task_of(lambda: [Forwards(wide), nn.ReLU(), nn.Linear(wide, 10)], shape=(wide,)))
    for size, one in found.items():
        # with few samples most is held at the end of the way back, with many at its beginning
        assert one.peak == pytest.approx(plain.follow(size, optim("adam")).peak, rel=0.26)
    measured = tracer._followed(64, trace_vectors(optim("adam"))).trace(64)
    assert found[64] == measured
    assert found[1 << 20].memory["feature maps"] > 0.9 * (1 << 20) / 64 * measured.memory["feature maps"]


def test_what_cannot_be_trained_is_told_in_one_line() -> None:
    task = task_of(lambda: [nn.Linear(8, 10).requires_grad_(False)], shape=(8,))
    with pytest.raises(TrainingError, match="the backward pass raised RuntimeError: element 0 of tensors"):
        tracer_of(task)


def test_an_update_is_timed_with_one_thread_as_a_replica_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    made = profile.stepper

    def watched(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        step = made(optimizer)
        return lambda: (threads.append(torch.get_num_threads()), step())[1]

    monkeypatch.setattr(profile, "stepper", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        profile.measure_update(optim("sgd"), 10)
        assert (set(threads), torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


def test_an_update_on_a_device_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none of CUDA's here: what is said to be on it is not, and its events tell 7,000 s."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, _: Event) -> float:
            return 7e6

    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **more: zeros(*shape, **{**more, "device": "cpu"}))
    assert profile.measure_update(optim("sgd"), 10, "cuda:0").seconds == pytest.approx(7e3)
    assert profile.measure_update(optim("sgd"), 10).seconds < 7e3


def cost_of(
    task: Task,
    monkeypatch: pytest.MonkeyPatch,
    busy: float = 1.0,
    fresh: float = 0.0,
    max_memory: float | None = None,
    **asked: Any,
) -> cost.TrainingCost:
    """A cost with times that are known: 1 ms for each sample, and none for an update."""
    points = [StepTime(size, 0.0, 0.4e-3 * size, 0.6e-3 * size, 9) for size in (1, 4, 16)]

    def known(_: Task, names: list[str], *__: object) -> Profile:
        return Profile(points, dict.fromkeys(names, (0.0, 0.0)), busy, fresh=fresh)

    monkeypatch.setattr(cost.profiling, "measure", known)
    monkeypatch.setattr(cost.profiling, "measure_update", lambda one, *_: cost.UpdateCost(one.name, 0.0, 0))
    chosen = asked.pop("optimizer", optim("sgd"))
    return cost.measure(task, CostRequest(**asked), chosen, max_memory)


def test_what_the_kernel_takes_for_memory_is_no_part_of_the_line() -> None:
    """A nanosecond for each byte: of gradients with any size, of feature maps from 16 samples on."""

    def mapped(size: int) -> dict[str, int]:
        return {"gradients": 10**9, "feature maps": 10**8 * size if size >= 16 else 0}

    points = [StepTime(1, 0.0, 1.0, 1.0 + 2.0, 9), StepTime(4, 0.0, 4.0, 1.0 + 8.0, 9)]
    found = Profile(points, {}, 1.0, fresh=1e-9).at(16, mapped)
    assert (found.input, found.forward, found.backward) == pytest.approx((0.0, 16.0 + 1.6, 1.0 + 32.0))
    one = Profile(points[1:], {}, 1.0, fresh=1e-9)
    assert one.at(2, mapped).step == pytest.approx(1.0 + 2 * 3.0)
    assert one.at(4, mapped).step == pytest.approx(points[1].step)


def test_memories_of_32_mb_are_the_kernels_with_those_in_which_convolutions_lay_out() -> None:
    """What the convolution makes, and its gradient, has as much with 1024 samples; what it is given never has."""
    task = task_of(lambda: [nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(8192, 10)], (4, 32, 32))
    tracer = tracer_of(task)
    assert tracer.mapped(1023) == {}
    # each once more in blocks of channels: the first layer is asked for the gradient of its weights alone
    assert tracer.mapped(1024) == {"feature maps": 2 * trace.MAPPED, "their gradients": 2 * trace.MAPPED}
    deeper = task_of(lambda: [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(8192, 10)], (4, 32, 32))
    assert tracer_of(deeper).mapped(1024)["their gradients"] == 3 * trace.MAPPED


def test_memory_of_the_kernel_takes_what_filling_it_at_first_takes_more_and_giving_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = itertools.accumulate(itertools.cycle([0, 10, 4, 1]))
    monkeypatch.setattr(profile.StepClock, "mark", lambda _: 1_000_000_000 * next(moments))
    assert profile.fresh() == pytest.approx((10 - 4 + 1) / (2 * trace.MAPPED))


def test_times_of_a_batch_and_of_the_last_one_are_with_the_kernels_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost.Tracer, "mapped", lambda _, size: {"gradients": 1000 * (size == 3)})
    found = cost_of(LINEAR, monkeypatch, fresh=1e-6, batch_size=3)
    assert found.point.step == pytest.approx(3e-3 + 1e-3)
    assert found.last.step == pytest.approx(2e-3)


LINEAR = task_of(lambda: [nn.Linear(8, 10)], shape=(8,))


def test_epochs_cost_their_minibatches_the_last_one_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cost_of(LINEAR, monkeypatch, batch_size=3, epochs=5, watts=100.0, price_per_hour=3.6)
    assert found.step == pytest.approx(3e-3)
    assert found.epoch_seconds == pytest.approx(8e-3)  # 3 + 3 + 2 samples
    charges = found.charges(5)
    assert charges["seconds"] == pytest.approx(40e-3)
    assert charges["kilowatt_hours"] == pytest.approx(100 * 40e-3 / 3.6e6)
    assert charges["price"] == pytest.approx(40e-6)
    assert charges["price_per_million_samples"] == pytest.approx(1.0)


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cost_of(LINEAR, monkeypatch, busy=1.04).notes
    assert "busy" in cost_of(LINEAR, monkeypatch, busy=1.2).notes[0]


@pytest.mark.long
def test_the_largest_batch_fits_and_one_more_sample_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "held", lambda: 0)
    found = cost_of(LINEAR, monkeypatch, max_memory=5e6).largest_batch
    tracer = tracer_of(LINEAR)
    assert cost.needed(tracer, found, optim("sgd")) <= 5e6 < cost.needed(tracer, found + 1, optim("sgd"))
    with pytest.raises(UsageError, match=r"not one sample fits; the least is 0.01GB"):
        cost_of(LINEAR, monkeypatch, max_memory=1e2)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"batch_size": 0}, "--batch-size 0: must be from 1"),
        ({"epochs": 0}, "--epochs 0: must be from 1"),
        ({"watts": -1.0}, "--watts -1: must be more than 0"),
        ({"price_per_hour": float("inf")}, "--price-per-hour inf: must be more than 0, and at most 1e\\+15"),
        ({"seconds": 0.0}, "--seconds 0: must be more than 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused(more: dict[str, Any], told: str) -> None:
    seconds = more.pop("seconds", 1.0)
    with pytest.raises(UsageError, match=told):
        cost.measure(LINEAR, CostRequest(**more), optim("sgd"), seconds=seconds)


def cells(line: str, between: str = "│") -> list[str]:
    return [cell.strip() for cell in line.split(between)[1:-1]]


def test_tables_have_a_row_for_each_layer_part_optimizer_and_kind_and_words_say_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All times are known: 0.4 ms forward and 0.6 ms back of each sample, and no update."""
    task = task_of(lambda: [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(100, 10)], (3, 5, 5))
    charged = {"epochs": 5, "watts": 100.0, "price_per_hour": 3.6}
    found = cost_of(task, monkeypatch, max_memory=4e9, batch_size=4, optimizer=optim("adam"), **charged)
    tables.show_cost(found)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert cells(next(line for line in lines if "multiply-adds ┃" in line), "┃") == [
        "layer", "kind", "output", "parameters", "multiply-adds", "forward, ms", "backward, ms", "maps, MB",
        "gradients, MB",
    ]  # fmt: skip
    trace = found.trace
    rows = [cells(line) for line in lines if line.startswith("│")]
    for layer, kind, output, parameters, multiply_adds in (
        ("0", "Conv2d", "4x5x5", "112", "2,700"), ("1", "ReLU", "4x5x5", "", ""), ("2", "Flatten", "100", "", ""),
        ("3", "Linear", "10", "1,010", "1,000"),
    ):  # fmt: skip
        maps, gradients = (f"{one.get(layer, 0) / 1e6:.3f}" for one in (trace.maps, trace.gradients))
        assert [layer, kind, output, parameters, multiply_adds, "0", "0", maps, gradients] in rows
    point = found.point
    for part, seconds in (("input", 0.0), ("forward", point.forward), ("backward", point.backward),
                          ("update, adam", 0.0), ("an iteration", found.step)):  # fmt: skip
        assert [part, number(1e3 * seconds), f"{seconds / found.step:.0%}"] in rows
    assert set(LEARNING_RATES) <= {row[0] for row in rows}
    for kind in KINDS:
        assert [kind, f"{trace.memory[kind] / 1e6:.3f}"] in rows
    # 8 samples of a millisecond
    assert any(line.startswith("1,000 samples/s; ") for line in lines)
    assert "an epoch: 8.0 ms, 2.22e-07 kWh, a price of 8e-06" in lines
    assert "5 epochs: 40.0 ms, 1.11e-06 kWh, a price of 4e-05" in lines
    assert "normalised, for a million samples: 1e+03 s, 0.0278 kWh, 1 price" in lines
    assert any(line.startswith(f"4 GB hold a batch of {found.largest_batch}, with a margin of 15%") for line in lines)
    slow = StepTime(4, 0.0, 2.0, 3.0, 9)
    tables.show_cost(msgspec.structs.replace(found, point=slow, last=slow))
    assert "\n0.8 samples/s; " in capsys.readouterr().out


def cost_file(path: Path, **more: object) -> str:
    """A file of a machine that takes 1,000 s for a million samples, 65 W, and 3.6 for an hour."""
    epoch = {"seconds": 8.0, "seconds_per_million_samples": 1000.0, "kilowatt_hours_per_million_samples": 65 / 3600}
    fields = {"task": "digits", "optimizer": "sgd", "batch_size": 64, "processor": "Slow 1", "version": "0.1.0"}
    path.write_text(json.dumps({**fields, "epoch": {**epoch, "price_per_million_samples": 1.0}, **more}))
    return str(path)


def test_machines_stand_beside_each_other_by_a_million_samples(tmp_path: Path, ask: Ask) -> None:
    """One with four times the speed, four times the power and twice the price of an hour."""
    fast = {"seconds": 250.0, "kilowatt_hours": 65 / 3600, "price": 0.5}
    epoch = {f"{name}_per_million_samples": value for name, value in fast.items()}
    files = [
        cost_file(tmp_path / "cpu.json"),
        cost_file(tmp_path / "gpu.json", processor="GPU 2", batch_size=256, epoch=epoch),
    ]
    shown = ask(["cost", "--compare", *files]).out
    rows = [cells(line)[1:] for line in shown.splitlines() if line.startswith("│")]
    assert [row for row in rows if row[0]] == [
        ["Slow 1", "sgd", "64", "1,000", "1e+03", "1", "0.0181", "1", "1", "1"],
        ["GPU 2", "sgd", "256", "4,000", "250", "0.25", "0.0181", "1", "0.5", "0.5"],
    ]
    machines = json.loads(ask(["cost", "--compare", *files, "--json"]).out)["machines"]
    assert [(one["file"], one["seconds_of_first"], one["price_of_first"]) for one in machines] == [
        (files[0], 1.0, 1.0),
        (files[1], 0.25, 0.5),
    ]
    files.append(cost_file(tmp_path / "bare.json", epoch={"seconds_per_million_samples": 500.0}))
    shown = ask(["cost", "--compare", *files]).out
    assert "kWh" not in shown
    assert "price" not in shown


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"task": "mnist"}, "other.json: its task is mnist, but that of "),
        ({"version": "0.0.9"}, "other.json: its version is 0.0.9, but that of "),
        ({"batch_size": "many"}, "other.json: is no file of `distbelief cost TASK --json`: Expected `int`"),
        ({"epoch": {}}, "other.json: is no file of `distbelief cost TASK --json`: it has no seconds"),
        ({"epoch": {"seconds_per_million_samples": 0}}, "other.json: is no file of `distbelief cost TASK --json`: "),
    ],
)
def test_what_cannot_be_compared_is_refused_by_its_file(
    more: dict[str, Any], told: str, tmp_path: Path, ask: Ask
) -> None:
    files = [cost_file(tmp_path / "one.json"), cost_file(tmp_path / "other.json", **more)]
    [said] = ask(["cost", "--compare", *files], 2).err.splitlines()
    assert told in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "which task?"),
        ("--json", "write the task first"),
        ("mnits", "did you mean 'mnist'?"),
        ("digits --optimizer adm", "did you mean 'adam'?"),
        ("digits --max-memory 2", "its unit is missing"),
        ("digits --max-memory 2Gbit", "unknown unit in --max-memory 'Gbit'"),
        ("digits --max-memory 1MB", "not one sample fits"),
        ("digits --device cuda:9", "--device"),
        ("mnist --data-dir /nowhere", "no MNIST in /nowhere"),
        ("--compare one.json", "name two files"),
        (
            "--compare one.json nowhere.json",
            "nowhere.json: is no file of `distbelief cost TASK --json`: [Errno 2] No such file",
        ),
        (
            "--compare one.json torn.json",
            "torn.json: is no file of `distbelief cost TASK --json`: Input data was trunc",
        ),
        ("--compare one.json pipe", "pipe: is no file of `distbelief cost TASK --json`: it is no regular file"),
        ("--compare one.json one.json --epochs 3", "leave off all other options but --json"),
        ("digits --compare one.json one.json", "--compare takes files instead of a task"),
    ],
)
def test_a_wrong_word_is_one_line_with_the_right_one(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.chdir(tmp_path)
    text = Path(cost_file(tmp_path / "one.json")).read_text()
    (tmp_path / "torn.json").write_text(text[:-9])
    os.mkfifo(tmp_path / "pipe")
    [said] = ask(["cost", *words.split()], 2).err.splitlines()
    assert told in said


def test_a_cost_names_its_processor_and_version_and_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert cost.processor("cuda:1") == "GPU of cuda:1"
    found = cost_of(LINEAR, monkeypatch, batch_size=3, watts=100.0)
    (tmp_path / "one.json").write_bytes(msgspec.json.encode(found.as_json()))
    _, [row, _] = compare([str(tmp_path / "one.json")] * 2)
    assert row["seconds"] == pytest.approx(1000.0)
    assert row["kilowatt_hours"] == pytest.approx(100 * 1000 / 3.6e6)
    assert row["processor"] == cost.processor("cpu")
    assert "price" not in row
