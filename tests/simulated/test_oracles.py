"""Downpour with one replica is a sequential loop of plain PyTorch, bit for bit, in every setting."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from oracles import FALLS, STEPPERS, classes, mlp, sequential
from split_jobs import state_of
from torch import nn
from watching.observed import Observed

from distbelief.core.optimizer import LAYERWISE, LEARNING_RATES, OUTER, SCHEDULES, Optimizer
from distbelief.errors import TrainingError, UsageError
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.server.optimizers import OPTIMIZERS
from distbelief.strategies import Downpour
from distbelief.tasks import Task
from distbelief.transport.cluster_model import NetworkModel

SLOW_LINK = Simulated(network=NetworkModel(latency=5e-3, bandwidth=1e5, jitter=3.0))

FLAT = [name for name in OPTIMIZERS if name not in (*LAYERWISE, *OUTER)]
"""Those of gradients that know no layers; the others have their oracles in test_large.py and test_local_steps.py."""


def train(
    task: Task, cluster: Simulated | None = None, *, optimizer: Optimizer, epochs: int = 1, **options: Any
) -> dict[str, torch.Tensor]:
    shared = {name: options.pop(name) for name in ("lr_schedule", "clip_norm") if name in options}
    strategy = Downpour(replicas=1, optimizer=optimizer, **options)
    run = Observed(
        Job(task, strategy, epochs=epochs, batch_size=4, evaluate_every=0, checkpoint_every=0, **shared), cluster
    )
    state, aliases = state_of(run.run()), run.simulation.coordinator.plan.layout.aliases
    return state | {alias: state[name] for alias, name in aliases.items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), (
            f"{name} differs by up to {(ours[name].double() - value.double()).abs().max()}"
        )


def test_every_optimizer_has_an_oracle_and_every_schedule() -> None:
    assert STEPPERS.keys() | {*LAYERWISE, *OUTER} == OPTIMIZERS.keys() == LEARNING_RATES.keys()
    # which counts epochs: test_hogwild.py has its oracle
    assert FALLS.keys() | {"backoff"} == SCHEDULES.keys()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", FLAT)
def test_one_replica_is_sequential_sgd(name: str, shards: int) -> None:
    task, lr = classes(mlp), LEARNING_RATES[name]
    ours = train(task, SLOW_LINK, optimizer=Optimizer(name, lr), shards=shards, epochs=2)
    assert_same(ours, sequential(task, name, lr=lr, epochs=2))


@pytest.mark.parametrize(
    ("name", "schedule"), [*zip(FLAT, itertools.cycle(["linear", "cosine", "step", "polynomial"]), strict=False)]
)
def test_one_replica_is_sequential_sgd_with_decay_schedule_and_clipping(name: str, schedule: str) -> None:
    task, lr = classes(mlp), LEARNING_RATES[name]
    options = Optimizer(name, lr, {"weight_decay": 0.03})
    ours = train(task, optimizer=options, shards=2, epochs=2, lr_schedule=schedule, clip_norm=0.3)
    theirs = sequential(task, name, lr=lr, epochs=2, schedule=schedule, clip_norm=0.3, weight_decay=0.03)
    assert_same(ours, theirs)
    for less in ({"weight_decay": 0.0}, {"schedule": "constant"}, {"clip_norm": 0.0}):
        other = sequential(
            task, name, lr=lr, epochs=2, **{"schedule": schedule, "clip_norm": 0.3, "weight_decay": 0.03, **less}
        )
        assert any(not torch.equal(ours[key], other[key]) for key in ours), f"{less} makes no difference"


@pytest.mark.parametrize("shards", [2, 3, 7, 103])
@pytest.mark.parametrize("name", FLAT)
def test_any_number_of_shards_gives_the_parameters_of_one(name: str, shards: int) -> None:
    task, optimizer = classes(mlp), Optimizer(name, LEARNING_RATES[name], {"weight_decay": 0.01})
    assert_same(train(task, optimizer=optimizer, shards=shards), train(task, optimizer=optimizer, shards=1))


@pytest.mark.parametrize("name", FLAT)
def test_a_cut_across_large_tensors_gives_the_parameters_of_one_shard(name: str) -> None:
    task = classes(lambda: nn.Sequential(nn.Linear(300, 301), nn.ReLU(), nn.Linear(301, 3)), samples=12, features=300)
    optimizer = Optimizer(name, LEARNING_RATES[name])
    assert_same(train(task, optimizer=optimizer, shards=7), train(task, optimizer=optimizer, shards=1))


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"push_every": 3},
        {"push_every": 4, "local_lr": 0.05, "fetch_every": 4},
        {"fetch_every": 3},
        {"fetch_every": 3, "local_lr": 0.05},
        {"push_every": 2, "fetch_every": 3, "local_lr": 0.05},
        {"prefetch": 1},
        {"prefetch": 1, "fetch_every": 2},
        {"prefetch": 1, "push_every": 2},
        {"prefetch": 1, "fetch_every": 3, "local_lr": 0.05},
        {"prefetch": 1, "push_every": 3, "fetch_every": 2, "local_lr": 0.05},
    ],
    ids=str,
)
def test_pushes_are_sums_and_parameters_are_as_old_as_the_settings_say(options: dict[str, Any], shards: int) -> None:
    task = classes(mlp)
    settings = {"push_every": 1, "fetch_every": 1, "local_lr": 0.0, "prefetch": 0, **options}

    def oracle(prefetch: int, **of: Any) -> dict[str, torch.Tensor]:
        return sequential(task, "momentum", lr=0.05, epochs=2, lag=bool(prefetch), **of)

    ours = train(task, SLOW_LINK, optimizer=Optimizer("momentum", 0.05), shards=shards, epochs=2, **settings)
    assert_same(ours, oracle(**settings))
    for name in options:
        other = oracle(**{**settings, name: 0 if name in ("local_lr", "prefetch") else 1})
        assert any(not torch.equal(ours[key], other[key]) for key in ours), f"{name} makes no difference"


class Norm(nn.Module):
    """Batch norm: buffers of two dtypes, which move with the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10, momentum=0.3), nn.ReLU(), nn.Linear(10, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Tied(nn.Module):
    """One weight under two names, and a buffer under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("also_seen", self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.also_seen.sqrt())


class Frozen(nn.Module):
    """A frozen layer among trained ones, and a frozen scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 3)
        self.first.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale


class Mixed(nn.Module):
    """Parameters of three dtypes, and one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10, dtype=torch.float64), nn.Linear(10, 10)
        self.third = nn.Linear(10, 3, dtype=torch.bfloat16)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.third(torch.tanh(self.second(torch.tanh(self.first(x.double())).float())).bfloat16()).float()
            + self.empty.sum()
        )


def cast(dtype: torch.dtype) -> type[nn.Module]:
    """An MLP of one dtype."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x.to(dtype))

    return Cast


MODELS = {
    "batch norm": Norm, "tied": Tied, "frozen": Frozen, "mixed dtypes": Mixed,
    "float64": cast(torch.float64), "bfloat16 with float32 masters": cast(torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"push_every": 2}, {"prefetch": 1}, {"prefetch": 1, "fetch_every": 2}], ids=str
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.long
def test_every_kind_of_model_trains_as_in_a_plain_loop(model: str, optimizer: str, options: dict[str, int]) -> None:
    task, lr = classes(MODELS[model]), LEARNING_RATES[optimizer]
    ours = train(task, optimizer=Optimizer(optimizer, lr), shards=3, epochs=2, **options)
    lag = {"lag": bool(options.get("prefetch")), **{key: value for key, value in options.items() if key != "prefetch"}}
    assert_same(ours, sequential(task, optimizer, lr=lr, epochs=2, **lag))


@pytest.mark.long
def test_bfloat16_parameters_move_by_less_than_their_spacing() -> None:
    """A dead-knob test of the masters: steps too small for bfloat16 to hold add up on the shards."""
    task = classes(cast(torch.bfloat16))
    once = train(task, optimizer=Optimizer("sgd", 1e-3))
    often = train(task, optimizer=Optimizer("sgd", 1e-3), epochs=60)
    masters = sequential(task, "sgd", lr=1e-3, epochs=60)
    assert_same(often, masters)
    assert sum((often[key] != once[key]).sum() for key in often) > 50


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight.data = model[0].weight.data
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (tied_by_data, "'1.weight' and '0.weight' are two tensors that share memory"),
        (lambda: nn.Linear(6, 3, dtype=torch.complex64), r"'weight' is torch.strided torch.complex64"),
        (
            lambda: nn.Linear(6, 3, device="meta"),
            "cannot be built: NotImplementedError: Cannot copy out of meta tensor",
        ),
        (lambda: nn.Linear(6, 3).requires_grad_(False), "no parameter with requires_grad=True"),
        (lambda: nn.Linear(6, 3).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    ],
    ids=["tied by data", "complex", "meta", "all frozen", "float8"],
)
def test_a_model_that_cannot_be_trained_is_refused(model: Any, says: str) -> None:
    with pytest.raises((UsageError, TrainingError), match=says):
        train(classes(model), optimizer=Optimizer())


def test_more_shards_than_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="--shards 104 is more than the model's 103 parameters"):
        train(classes(mlp), optimizer=Optimizer(), shards=104)
