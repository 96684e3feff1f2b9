"""Features that a script of a user's may have, each written once: with `replica` it is the plain script, or that of the
one replica of a job.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from plain.play import WAYS, Script, Seen
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from distbelief.core.optimizer import Optimizer, optim

MOMENTUM = optim("momentum", lr=0.05)
ALL = tuple(WAYS)
SHARDED = ("served", "direct", "synchronous")
"""The ways in which shards hold the parameters."""
STEPS = 10
"""Of a script of two epochs."""


@dataclass(frozen=True)
class Feature:
    """A feature, and what comes of it in each way."""

    script: Script
    section: str
    optimizer: Optimizer = MOMENTUM
    epochs: int = 2
    refused: Mapping[str, str] = field(default_factory=dict)
    """By the way: what the sentence that refuses it says, as a regular expression."""
    ways: tuple[str, ...] = ALL
    within: float = 0.0
    """How far a value may be off, as a part of the largest of its tensor; 0 for not a bit."""
    because: str = ""
    """Why it may."""
    long: bool = False
    """Whether it starts processes."""

    @property
    def title(self) -> str:
        """It in words."""
        return (self.script.__doc__ or self.script.__name__).strip().removesuffix(".")


FEATURES: dict[str, Feature] = {}


def feature(section: str, refused: str | Mapping[str, str] = "", **options: Any) -> Callable[[Script], Script]:
    """Have a script in the table; what refuses it everywhere, or in the ways that are named."""

    def noted(script: Script) -> Script:
        ways = options.get("ways", ALL)
        sentences = dict.fromkeys(ways, refused) if isinstance(refused, str) and refused else dict(refused or {})
        FEATURES[script.__name__] = Feature(script, section, refused=sentences, **options)
        return script

    return noted


def made(name: str, title: str, script: Callable[..., nn.Module | None], *given: Any, **options: Any) -> None:
    """Have one of a family of scripts in the table."""

    def own(replica: Any, seen: Seen) -> nn.Module | None:
        return script(replica, seen, *given)

    own.__name__, own.__doc__ = name, title
    feature(options.pop("section"), **options)(own)


# what the scripts train, and on what


INPUTS, WIDTH = 3, 16
"""Each tensor of a model has a multiple of 16 elements: a kernel computes those behind the last of them otherwise, and
which these are differs between a tensor and a vector of all. `uneven_sizes` is without.
"""


def data(samples: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(7))
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def normed(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16, **options), nn.Linear(16, 16))


def step(replica: Any, seen: Seen, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One step of a plain loop, with what it has seen."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    replica.report(loss)
    seen.see(x, y, loss)
    return loss.detach()


def loop(replica: Any, seen: Seen, model: nn.Module, after: Callable[[int], object] = lambda _: None) -> nn.Module:
    """Train a model, and do something after each step."""
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches(data())):
        step(replica, seen, model, optimizer, x, y)
        after(number)
    return model


# tensors


@feature("tensors")
def a_plain_model(replica: Any, seen: Seen) -> nn.Module:
    """Nothing but a model of layers."""
    return loop(replica, seen, net())


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.register_buffer("mean", torch.zeros(INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.body(x - self.mean)  # type: ignore[no-any-return]


@feature("tensors")
def buffer_assigned(replica: Any, seen: Seen) -> nn.Module:
    """A buffer is assigned anew in each step."""
    return loop(replica, seen, Centred())


@feature("tensors", r"buffer 'kept' is float32 \[5\], and was float32 \[3\]: .* change it before that")
def buffer_resized(replica: Any, seen: Seen) -> nn.Module:
    """A buffer gets another shape."""
    model = net()
    model.register_buffer("kept", torch.zeros(3))
    return loop(replica, seen, model, lambda _: setattr(model, "kept", torch.zeros(5)))


@feature("tensors")
def cache_resized(replica: Any, seen: Seen) -> nn.Module:
    """A buffer that is not saved gets another shape."""
    model = net()
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    return loop(replica, seen, model, lambda n: model.get_buffer("cache").resize_(n + 1))


@feature("tensors", "'late' is new: .* change it before that")
def buffer_late(replica: Any, seen: Seen) -> nn.Module:
    """A buffer is registered in the loop."""
    model = net()
    return loop(replica, seen, model, lambda n: n or model.register_buffer("late", torch.ones(2)))


@feature("tensors")
def cache_late(replica: Any, seen: Seen) -> nn.Module:
    """A buffer that is not saved is registered in the loop."""
    model = net()
    return loop(replica, seen, model, lambda n: n or model.register_buffer("late", torch.ones(2), persistent=False))


@feature("tensors", "'late.weight' is new: .* change it before that")
def layer_late(replica: Any, seen: Seen) -> nn.Module:
    """A layer is added in the loop."""
    model = net()
    return loop(replica, seen, model, lambda n: n or model.add_module("late", nn.Linear(16, 16)))


@feature("tensors", "parameter '2.weight' was replaced: .* change it before that")
def layer_replaced(replica: Any, seen: Seen) -> nn.Module:
    """A layer is replaced in the loop."""
    model = net()
    return loop(replica, seen, model, lambda n: n or model.__setitem__(2, nn.Linear(16, 16)))


@feature("tensors", r"'0.weight' is float64 \[16, 3\], and was float32 \[16, 3\]: .* change it before that")
def dtype_changed(replica: Any, seen: Seen) -> nn.Module:
    """A model is cast in the loop."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x.to(model[0].weight.dtype), y)
        model.double()
    return model


@feature("tensors")
def views_kept(replica: Any, seen: Seen) -> nn.Module:
    """A view of a weight that was taken before the optimizer."""
    model = net()
    view = model[0].weight.detach()[1:, :2]
    return loop(replica, seen, model, lambda _: seen.see(view))


@feature("tensors")
def array_kept(replica: Any, seen: Seen) -> nn.Module:
    """A numpy array on the memory of a weight, read in the loop."""
    model = net()
    array = model[2].weight.detach().numpy()
    return loop(replica, seen, model, lambda _: seen.see(array.tobytes()))


@feature("tensors")
def addresses_kept(replica: Any, seen: Seen) -> nn.Module:
    """The memory and the identity of each tensor stay."""
    model = net()
    before = [(id(one), one.data_ptr()) for one in model.parameters()]
    return loop(replica, seen, model, lambda _: seen.see(before == [(id(p), p.data_ptr()) for p in model.parameters()]))


@feature("tensors")
def tied(replica: Any, seen: Seen) -> nn.Module:
    """One parameter under two names."""
    model = nn.Sequential(*net(), nn.Tanh(), nn.Linear(16, 16))
    model[4].weight = model[2].weight
    return loop(replica, seen, model)


@feature(
    "tensors", "'[23].weight' and '[23].weight' are two tensors on one memory: tie them by assigning the same parameter"
)
def tied_by_memory(replica: Any, seen: Seen) -> nn.Module:
    """Two parameters on one memory."""
    model = nn.Sequential(*net(), nn.Linear(16, 16))
    model[3].weight.data = model[2].weight.data
    return loop(replica, seen, model)


@feature("tensors")
def frozen(replica: Any, seen: Seen) -> nn.Module:
    """Parameters that are frozen from the start."""
    model = net()
    model[0].requires_grad_(False)
    return loop(replica, seen, model)


@feature("tensors")
def frozen_in_the_loop(replica: Any, seen: Seen) -> nn.Module:
    """Parameters are frozen after some steps, and thawed after some more."""
    model = net()
    return loop(replica, seen, model, lambda n: model[0].requires_grad_(n < 3 or n > 6))


@feature("tensors", "0.weight has a gradient in step .*, and was frozen .*: call that first and freeze it then")
def thawed(replica: Any, seen: Seen) -> nn.Module:
    """Parameters that were frozen when the optimizer was made are thawed in the loop."""
    model = net()
    model[0].weight.requires_grad_(False)
    return loop(replica, seen, model, lambda n: model[0].requires_grad_(n > 3))


@feature("tensors")
def parametrized(replica: Any, seen: Seen) -> nn.Module:
    """A weight that is computed of others (weight norm)."""
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    return loop(replica, seen, model)


@feature("tensors")
def spectral(replica: Any, seen: Seen) -> nn.Module:
    """A parametrization with buffers of its own (spectral norm)."""
    model = net()
    nn.utils.parametrizations.spectral_norm(model[2])
    return loop(replica, seen, model)


class With(nn.Module):
    """A net with a parameter more, that takes part where it has elements."""

    def __init__(self, more: torch.Tensor) -> None:
        super().__init__()
        self.body, self.more = net(), nn.Parameter(more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.more.abs().sum()  # type: ignore[no-any-return]


class Scaled(With):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.more  # type: ignore[no-any-return]


@feature("tensors")
def empty(replica: Any, seen: Seen) -> nn.Module:
    """A parameter without elements."""
    return loop(replica, seen, With(torch.zeros(0, 3)))


@feature("tensors", optimizer=optim("sgd", lr=0.1))
def scalar(replica: Any, seen: Seen) -> nn.Module:
    """A parameter without dimensions."""
    return loop(replica, seen, Scaled(torch.tensor(1.5)))


@feature("tensors")
def uneven_sizes(replica: Any, seen: Seen) -> nn.Module:
    """Tensors of odd sizes."""
    return loop(replica, seen, nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)))


@feature("tensors", "parameter 'more' is torch.strided torch.complex64 on cpu: it must be a dense real tensor")
def complex_parameter(replica: Any, seen: Seen) -> nn.Module:
    """A complex parameter."""
    return loop(replica, seen, With(torch.ones(2, dtype=torch.complex64)))


@feature("tensors")
def double(replica: Any, seen: Seen) -> nn.Module:
    """A model in float64."""
    model = net().double()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x.double(), y)
    return model


@feature("tensors")
def bfloat16(replica: Any, seen: Seen) -> nn.Module:
    """A model in bfloat16."""
    model = net().bfloat16()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x.bfloat16(), y)
    return model


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


@feature("tensors")
def mixed(replica: Any, seen: Seen) -> nn.Module:
    """A model in two dtypes."""
    model = nn.Sequential(nn.Linear(3, 16).double(), Cast(), nn.Linear(16, 16))
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x.double(), y)
    return model


@feature("tensors")
def channels_last(replica: Any, seen: Seen) -> nn.Module:
    """Weights of convolutions in channels_last."""
    conv: nn.Module = nn.Conv2d(3, 16, 2, padding=1)
    model = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), conv, nn.ReLU(), nn.Flatten(), nn.Linear(64, 16))
    model = model.to(memory_format=torch.channels_last)
    return loop(replica, seen, model, lambda _: seen.see(str(conv.weight.stride())))


@feature("tensors")
def scripted(replica: Any, seen: Seen) -> nn.Module:
    """A model that TorchScript has traced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.trace(net(), data()[0])
    return loop(replica, seen, model)


@feature("tensors")
def batch_norm(replica: Any, seen: Seen) -> nn.Module:
    """Running statistics, a cumulative average among them."""
    return loop(replica, seen, normed(momentum=None))


@feature("tensors")
def dropout(replica: Any, seen: Seen) -> nn.Module:
    """Chance in the model."""
    return loop(replica, seen, nn.Sequential(*net(), nn.Dropout(0.4), nn.Linear(16, 16)))


@feature("tensors", "'0.weight' has no shape yet: it is of a lazy module; run a minibatch through the model first")
def lazy(replica: Any, seen: Seen) -> nn.Module:
    """A lazy module whose first call is in the loop."""
    return loop(replica, seen, nn.Sequential(nn.LazyLinear(16)))


@feature("tensors", optimizer=optim("momentum", lr=0.05, weight_decay=0.1))
def unused(replica: Any, seen: Seen) -> nn.Module:
    """A parameter that never has a gradient, with weight decay."""
    model: Any = With(torch.zeros(0))
    model.unused = nn.Linear(3, 16)
    return loop(replica, seen, model)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.other, self.calls = net(), nn.Linear(3, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.body(x) + self.other(x) if self.calls % 3 else self.body(x)  # type: ignore[no-any-return]


@feature("tensors")
def sometimes_used(replica: Any, seen: Seen) -> nn.Module:
    """A parameter without a gradient in some steps."""
    return loop(replica, seen, Sometimes())


class Rows(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(16, 3, **options), nn.Linear(3, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows((x[:, 0] > 0).long() + (x[:, 1] > 0).long()) + x)  # type: ignore[no-any-return]


@feature("tensors", optimizer=optim("sgd", lr=0.1))
def sparse_rows(replica: Any, seen: Seen) -> nn.Module:
    """An embedding with sparse gradients."""
    return loop(replica, seen, Rows(sparse=True))


@feature("tensors")
def renormed(replica: Any, seen: Seen) -> nn.Module:
    """An embedding whose rows are made shorter as it computes (max_norm)."""
    return loop(replica, seen, Rows(max_norm=0.5))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(1, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x.view(-1, 3, 1))[0][:, -1])  # type: ignore[no-any-return]


@feature("tensors")
def recurrent(replica: Any, seen: Seen) -> nn.Module:
    """A recurrent layer, which has a list of its weights."""
    return loop(replica, seen, Recurrent())


@feature("tensors")
def filled_before_the_loop(replica: Any, seen: Seen) -> nn.Module:
    """Weights are given after the optimizer was made, before the first minibatch."""
    model = net()
    optimizer = replica.optimizer(model)
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
    nn.init.zeros_(model[2].bias)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("tensors")
def buffer_changed(replica: Any, seen: Seen) -> nn.Module:
    """A buffer is written to between steps."""
    model = Centred()
    return loop(replica, seen, model, lambda n: model.mean.fill_(0.1 * n))


# optimizers and schedulers

CLOSE = {"within": 1e-6, "because": "the shards step one flat vector with torch's own kernels, which round otherwise"}


def optimized(replica: Any, seen: Seen) -> nn.Module:
    return loop(replica, seen, net())


def listed_optimizers() -> None:
    exact = {"sgd": 0.1, "momentum": 0.05, "nesterov": 0.05}
    rates = {**exact, "adagrad": 0.05, "adadelta": 1.0, "rmsprop": 0.005, "adam": 0.01, "adamw": 0.01}
    for name, lr in {**rates, "nadam": 0.01, "radam": 0.01, "adamax": 0.01}.items():
        close = {} if name in exact else CLOSE
        options: dict[str, Any] = {"section": "optimizer", "epochs": 4, **close}
        made(f"optimizer_{name}", f"Optimizer {name}", optimized, optimizer=optim(name, lr=lr), **options)
        decayed = optim(name, lr=lr, weight_decay=0.05)
        made(f"decayed_{name}", f"Optimizer {name} with weight decay", optimized, optimizer=decayed, **options)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "CyclicLR with momentum": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, STEPS, cycle_momentum=False),
    "OneCycleLR with momentum": lambda o: lr_scheduler.OneCycleLR(o, 0.1, STEPS),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, 4),
}


def scheduled(replica: Any, seen: Seen, make: Callable[[Any], Any]) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    scheduler = make(optimizer)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
        scheduler.step()
        seen.see(scheduler.get_last_lr(), [group["momentum"] for group in optimizer.param_groups])
    return model


BY_JOB = {"allreduce": "the script sets the learning rate to .*: with strategy allreduce nobody but the job does"}
NO_OPTIONS = {"allreduce": "the script sets (the learning rates of its groups|momentum|weight_decay|maximize) to "}


def listed_schedulers() -> None:
    for name, make in SCHEDULERS.items():
        refused = NO_OPTIONS if name == "OneCycleLR with momentum" else BY_JOB  # which sets that first
        made(f"scheduler_{name.replace(' ', '_')}", name, scheduled, make, section="optimizer", refused=refused)


@feature("optimizer", BY_JOB)
def plateau(replica: Any, seen: Seen) -> nn.Module:
    """ReduceLROnPlateau."""
    model = net()
    optimizer = replica.optimizer(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for x, y in replica.batches(data()):
        scheduler.step(step(replica, seen, model, optimizer, x, y))
        seen.see(scheduler.get_last_lr())
    return model


@feature("optimizer", BY_JOB)
def rate_set(replica: Any, seen: Seen) -> nn.Module:
    """The rate is set in the groups."""
    model = net()
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches(data())):
        optimizer.param_groups[0]["lr"] = 0.07 / (number + 1)
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("optimizer", NO_OPTIONS)
def rate_of_one_group_set(replica: Any, seen: Seen) -> nn.Module:
    """The rate of one of two groups is set."""
    model = net()
    optimizer = replica.optimizer(model, [{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    for number, (x, y) in enumerate(replica.batches(data())):
        optimizer.param_groups[1]["lr"] = 0.07 / (number + 1)
        step(replica, seen, model, optimizer, x, y)
    return model


def grouped(replica: Any, seen: Seen, option: str, value: Any) -> nn.Module:
    model = net()
    groups = [{"params": model[0].parameters(), option: value}, {"params": model[2].parameters()}]
    optimizer = replica.optimizer(model, groups)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


def listed_groups() -> None:
    for option, value in {"lr": 0.02, "weight_decay": 0.1}.items():
        made(f"group_{option}", f"A group's {option}", grouped, option, value, section="optimizer")
    foreign = {"momentum": 0.5, "dampening": 0.1, "nesterov": True, "maximize": True, "foreach": False, "fused": False}
    for option, value in foreign.items():
        says = f"parameter group 0 sets '{option}'; a group may set lr, weight_decay, the rest is the job's"
        made(f"group_{option}", f"A group's {option}", grouped, option, value, section="optimizer", refused=says)
    says = "parameter group 0 sets '{0}'; a group may set lr, weight_decay, the rest is the job's"
    for option, value in {"betas": (0.8, 0.9), "eps": 1e-4, "amsgrad": True}.items():
        adam: dict[str, Any] = {"section": "optimizer", "optimizer": optim("adam", lr=0.01)}
        title = f"A group's {option}"
        made(f"group_{option}", title, grouped, option, value, refused=says.format(option), **adam)


@feature("optimizer")
def named_group(replica: Any, seen: Seen) -> nn.Module:
    """Groups of named parameters."""
    model = net()
    optimizer = replica.optimizer(model, [{"params": [*model.named_parameters()]}])
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("optimizer", "parameter '2.weight' is in no parameter group: put it in one, or set its requires_grad to False")
def parameter_left_out(replica: Any, seen: Seen) -> nn.Module:
    """A parameter that needs a gradient is in no group."""
    model = net()
    optimizer = replica.optimizer(model, [{"params": model[0].parameters()}])
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


NAMED = {"allreduce": r"optimizer\(optim=...\): strategy allreduce steps with --optimizer; give it there"}


def option_set(replica: Any, seen: Seen, option: str, value: Any) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches(data())):
        if number == 3:
            optimizer.param_groups[0][option] = value
        step(replica, seen, model, optimizer, x, y)
    return model


def listed_options() -> None:
    for option, value in {"momentum": 0.5, "weight_decay": 0.1, "maximize": True}.items():
        title = f"The script sets {option} in the loop"
        made(f"set_{option}", title, option_set, option, value, section="optimizer", refused=NO_OPTIONS)


@feature("optimizer", r"optimizer.step\(closure\): a push is one gradient, .* strategy sandblaster")
def closure(replica: Any, seen: Seen) -> nn.Module:
    """A step with a closure."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):

        def again(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        seen.see(optimizer.step(again))
    return model


@feature("optimizer", r"add_param_group\(\): what each shard holds is settled; give all groups at once")
def group_added(replica: Any, seen: Seen) -> nn.Module:
    """A group is added in the loop."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return model


@feature("optimizer", NAMED, optimizer=Optimizer())
def optimizer_named(replica: Any, seen: Seen) -> nn.Module:
    """The script names its optimizer."""
    model = net()
    optimizer = replica.optimizer(model, optim=optim("nesterov", lr=0.03, weight_decay=0.01))
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


def adversaries(replica: Any, seen: Seen, every: int) -> nn.Module:
    maker, critic = net(), nn.Sequential(nn.Linear(16, 16))
    of_critic = replica.optimizer(critic, optim=optim("momentum", lr=0.05))
    of_maker = replica.optimizer(maker, optim=optim("sgd", lr=0.1))
    for number, (x, _) in enumerate(replica.batches(data())):
        of_critic.zero_grad()
        (critic(maker(x).detach()).mean() - critic(torch.ones(8, 16)).mean()).backward()
        of_critic.step()
        if number % every == 0:
            of_maker.zero_grad()
            loss = -critic(maker(x)).mean()
            loss.backward()
            of_maker.step()
            seen.see(loss)
    return nn.ModuleList([maker, critic])


SINGLE = {
    **NAMED,
    "direct": "--path direct: the script has several models, whose updates the shards make; leave it off",
}
for every in (1, 3):
    title = f"Two models with an optimizer each, the second stepped every {every} minibatches"
    made(f"two_models_{every}", title, adversaries, every, section="optimizer", refused=SINGLE, optimizer=Optimizer())


@feature("optimizer", {**SINGLE, "allreduce": "optimizer.. of a second model: strategy allreduce trains one"})
def two_optimizers_of_the_job(replica: Any, seen: Seen) -> nn.Module:
    """Two models whose optimizers are the job's, stepped in turn in each minibatch."""
    models = nn.ModuleList([net(), net()])
    optimizers = [replica.optimizer(model) for model in models]
    for x, y in replica.batches(data()):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(replica, seen, model, optimizer, x, y)
    return models


@feature("optimizer")
def moving_average(replica: Any, seen: Seen) -> nn.Module:
    """An exponential moving average of the weights beside the model."""
    model = net()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    loop(replica, seen, model, lambda _: average.update_parameters(model))
    return average


@feature("optimizer")
def averaged_after(replica: Any, seen: Seen) -> nn.Module:
    """SWA: the average is taken in the loop, and its statistics are made after it."""
    model = normed()
    average = swa_utils.AveragedModel(model)
    loop(replica, seen, model, lambda n: n < 4 or average.update_parameters(model))
    swa_utils.update_bn([data()], average)
    return average


@feature("optimizer")
def averaged_swapped(replica: Any, seen: Seen) -> nn.Module:
    """SWA: the model goes on from the average."""
    model = net()
    average = swa_utils.AveragedModel(model)

    def swap(number: int) -> None:
        average.update_parameters(model)
        if number == 5:
            model.load_state_dict(average.module.state_dict())

    return loop(replica, seen, model, swap)


@feature("optimizer")
def sharpness_aware(replica: Any, seen: Seen) -> nn.Module:
    """SAM: the gradient is taken beside the weights, which are then put back."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        cross_entropy(model(x), y).backward()
        before = [one.detach().clone() for one in model.parameters()]
        with torch.no_grad():
            for one in model.parameters():
                one.add_(one.grad, alpha=0.1)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for one, was in zip(model.parameters(), before, strict=True):
                one.copy_(was)
        optimizer.step()
        optimizer.zero_grad()
        seen.see(loss)
    return model


@feature("optimizer")
def lookahead(replica: Any, seen: Seen) -> nn.Module:
    """Lookahead: every few steps the weights go back half of their way."""
    model = net()
    slow = [one.detach().clone() for one in model.parameters()]

    def look(number: int) -> None:
        if number % 3 == 2:
            with torch.no_grad():
                for one, kept in zip(model.parameters(), slow, strict=True):
                    kept.lerp_(one, 0.5)
                    one.copy_(kept)

    return loop(replica, seen, model, look)


def clipped(model: nn.Module, how: str) -> None:
    for one in model.parameters():
        if how == "data":
            one.data.clamp_(-0.2, 0.2)
        elif how == "numpy":
            np.clip(one.detach().numpy(), -0.2, 0.2, out=one.detach().numpy())
        else:
            with torch.no_grad():
                one.clamp_(-0.2, 0.2)


def weights_clipped(replica: Any, seen: Seen, how: str) -> nn.Module:
    model = net()
    return loop(replica, seen, model, lambda _: clipped(model, how))


for how in ("data", "numpy", "no_grad"):
    made(
        f"clipped_by_{how}", f"Weights are clipped after each step, by {how}", weights_clipped, how, section="optimizer"
    )


@feature("optimizer")
def written_once(replica: Any, seen: Seen) -> nn.Module:
    """A weight is written to once, late in the loop."""
    model = net()
    return loop(replica, seen, model, lambda n: n != 6 or model[2].bias.data.zero_())


@feature("optimizer", r"optimizer.state_dict\(\) has no state to save: .*--resume")
def optimizer_saved(replica: Any, seen: Seen) -> nn.Module:
    """The optimizer's state is saved."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, seen.folder / "kept.pt")
    return model


@feature("optimizer")
def state_read(replica: Any, seen: Seen) -> nn.Module:
    """What the optimizer keeps is read in the loop."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
        seen.see([optimizer.state[one]["momentum_buffer"] for one in model.parameters()])
    return model


@feature("optimizer")
def groups_read(replica: Any, seen: Seen) -> nn.Module:
    """Options are read from the groups in the loop."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
        group = optimizer.param_groups[0]
        seen.see(group["lr"], group["momentum"], group["weight_decay"], optimizer.defaults["lr"], len(group["params"]))
    return model


@feature("optimizer")
def step_hooks(replica: Any, seen: Seen) -> nn.Module:
    """Hooks before and after the step of the optimizer."""
    model = net()
    optimizer = replica.optimizer(model)
    optimizer.register_step_pre_hook(lambda *_: seen.see("before", model[0].bias))
    optimizer.register_step_post_hook(lambda *_: seen.see("after", model[0].bias))
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


# gradients


def accumulated(replica: Any, seen: Seen, every: int) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches(data())):
        loss = cross_entropy(model(x), y) / every
        loss.backward()
        seen.see(x, loss)
        if number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


ONE_STEP = {"allreduce": "took the next minibatch without optimizer.step.. for the last: with strategy allreduce each"}
for every in (2, 3):
    title = f"Accumulated over {every} minibatches" + (", the last of which are left over" if every == 3 else "")
    made(f"accumulated_{every}", title, accumulated, every, section="gradients", refused=ONE_STEP)


@feature("gradients")
def accumulated_within(replica: Any, seen: Seen) -> nn.Module:
    """Several backward passes in a minibatch."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        optimizer.zero_grad()
        for some, targets in zip(x.split(4), y.split(4), strict=True):
            loss = cross_entropy(model(some), targets) / 2
            loss.backward()
            seen.see(loss)
        optimizer.step()
    return model


def changed(replica: Any, seen: Seen, change: Callable[[nn.Module], object]) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        seen.see(x, loss, change(model))
        optimizer.step()
    return model


def replace(model: nn.Module) -> None:
    for one in model.parameters():
        one.grad = one.grad.sign()  # type: ignore[union-attr]


def noise(model: nn.Module) -> None:
    for one in model.parameters():
        one.grad += 0.01 * torch.randn_like(one)


def drop(model: Any) -> None:
    model[0].bias.grad = None


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "clipped_norm": ("Clipped to a norm", lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
    "clipped_value": ("Clipped by value", lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01)),
    "replaced": ("A gradient is another tensor", replace),
    "noise": ("Noise is added to a gradient", noise),
    "taken_away": ("A gradient is taken away", drop),
}
for name, (title, change) in CHANGES.items():
    made(f"gradient_{name}", title, changed, change, section="gradients")


@feature("gradients")
def zeroed_in_place(replica: Any, seen: Seen) -> nn.Module:
    """Gradients are zeroed where they are."""
    model = Sometimes()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        optimizer.zero_grad(set_to_none=False)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seen.see(x, loss, [one.grad for one in model.parameters()])
    return model


@feature("gradients")
def second_order(replica: Any, seen: Seen) -> nn.Module:
    """A penalty on the norm of the gradient (create_graph)."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        optimizer.zero_grad()
        loss = cross_entropy(model(x.requires_grad_()), y)
        [slope] = torch.autograd.grad(loss, x, create_graph=True)
        whole = loss + slope.square().sum()
        whole.backward()
        optimizer.step()
        seen.see(x, whole)
    return model


@feature("gradients")
def graph_of_gradients(replica: Any, seen: Seen) -> nn.Module:
    """Gradients that have a graph (backward with create_graph)."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        loss = cross_entropy(model(x), y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a cycle, which setting them to None breaks
            loss.backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        seen.see(x, loss)
    return model


@feature("gradients")
def taken_by_autograd(replica: Any, seen: Seen) -> nn.Module:
    """Gradients that the script takes and assigns itself."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        loss = cross_entropy(model(x), y)
        for one, slope in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            one.grad = slope
        optimizer.step()
        seen.see(x, loss)
    return model


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = net(), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda z: self.drop(self.body(z)), x, use_reentrant=False)  # type: ignore[no-any-return]


@feature("gradients")
def checkpointed(replica: Any, seen: Seen) -> nn.Module:
    """Activations that are computed again in the backward pass."""
    return loop(replica, seen, Recomputed())


@feature("gradients")
def hooks(replica: Any, seen: Seen) -> nn.Module:
    """Hooks on parameters and modules."""
    model = net()
    model[0].weight.register_hook(lambda slope: 2 * slope)
    model[0].weight.register_post_accumulate_grad_hook(lambda one: seen.see(one.grad))
    model[2].register_full_backward_hook(lambda *given: seen.see(given[2]))
    model[2].register_forward_pre_hook(lambda _, given: (given[0] + 0.1,))
    return loop(replica, seen, model)


def scaled(replica: Any, seen: Seen, unbounded: int) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for number, (x, y) in enumerate(replica.batches(data())):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if number == unbounded else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.see(x, loss, scaler.get_scale(), [one.grad for one in model.parameters()])
    return model


made("grad_scaler", "GradScaler", scaled, -1, section="gradients")
made("grad_scaler_skips", "GradScaler that skips a step", scaled, 4, section="gradients")


@feature("gradients")
def autocast(replica: Any, seen: Seen) -> nn.Module:
    """A forward pass in bfloat16."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seen.see(x, loss)
    return model


# data


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples by number, with what else a script does as it reads them."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        self.x, self.y = data()
        self.change = change

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.change(self.x[number]), self.y[number]


class Together(Numbered):
    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(self.x[number] + len(numbers), self.y[number]) for number in numbers]


class Flow(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(*data(), strict=True)


class InBatches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(*(one.split(9) for one in data()), strict=True)


def read(replica: Any, seen: Seen, make: Callable[[], Any], **options: Any) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(make(), **options):
        step(replica, seen, model, optimizer, x, y)
    return model


def shifted(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x + 1, y


def weighted() -> DataLoader[Any]:
    return DataLoader(Numbered(), 8, sampler=WeightedRandomSampler([1.0] * 40, 40))


def by_batches() -> DataLoader[Any]:
    return DataLoader(Numbered(), batch_sampler=BatchSampler(RandomSampler(Numbered()), 8, drop_last=True))


class Itself(BatchSampler):
    pass


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ((2 * x, y) for x, y in super().__iter__())


DATA: dict[str, tuple[str, Callable[[], Any]]] = {
    "tensors": ("Tensors in a tuple", data),
    "arrays": ("Arrays in a tuple", lambda: tuple(one.numpy() for one in data())),
    "tensor_dataset": ("A TensorDataset", lambda: TensorDataset(*data())),
    "map": ("A map-style data set", Numbered),
    "list": ("A list of samples", lambda: [*zip(*data(), strict=True)]),
    "getitems": ("A data set that reads several samples at once", Together),
    "subset": ("A Subset", lambda: Subset(Numbered(), range(5, 33))),
    "concatenated": ("A ConcatDataset", lambda: ConcatDataset([Numbered(), Together()])),
    "uneven": ("A last minibatch that is smaller", lambda: data(37)),
    "one_batch": ("Fewer samples than a minibatch", lambda: data(5)),
    "loader": ("A DataLoader", lambda: DataLoader(Numbered(), 5, shuffle=True)),
    "collate": ("A collate_fn", lambda: DataLoader(Numbered(), 8, shuffle=True, collate_fn=shifted)),
    "draws_torch": ("A transform that draws from torch", lambda: Numbered(lambda x: x + torch.randn(3))),
    "draws_python": ("A transform that draws from Python", lambda: Numbered(lambda x: x + random.random())),
    "draws_numpy": ("A transform that draws from numpy", lambda: Numbered(lambda x: x + float(np.random.rand()))),
}
REFUSED_DATA: dict[str, tuple[str, Callable[[], Any], str]] = {
    "sampler": ("A sampler", weighted, "a DataLoader with a WeightedRandomSampler of its own: the order is the job's"),
    "batch_sampler": (
        "A class of batch sampler",
        lambda: DataLoader(Numbered(), batch_sampler=Itself(RandomSampler(Numbered()), 8, False)),
        "a DataLoader with a Itself of its own: the order is the job's",
    ),
    "drop_last": ("drop_last", lambda: DataLoader(data(), 8, drop_last=True), r"drop_last=True\): .* --drop-last"),
    "drop_last_sampler": ("A batch sampler that drops the last", by_batches, r"drop_last=True|batch_size=None"),
    "no_batch_size": (
        "batch_size=None",
        lambda: DataLoader(Numbered(), batch_size=None),
        r"DataLoader\(batch_size=None\): .* give it a batch_size",
    ),
    "loader_class": (
        "A DataLoader with __iter__",
        lambda: Doubling(Numbered(), 8),
        "a DataLoader with __iter__ of its",
    ),
    "string": ("A string", lambda: "words", "str cannot be dealt out in minibatches: pass a map-style data set"),
}
STREAMED = {"allreduce": "a stream: strategy allreduce deals the minibatches of a round to its whole group"}
ORDERED = {"allreduce": "order sequential: strategy allreduce deals the minibatches of a round to its whole group"}


def listed_data() -> None:
    for name, (title, make) in DATA.items():
        made(f"data_{name}", title, read, make, section="data")
    for name, (title, make, says) in REFUSED_DATA.items():
        made(f"data_{name}", title, read, make, section="data", refused=says)
    streams: dict[str, tuple[str, Callable[[], Any]]] = {
        "iterable": ("An IterableDataset", Flow),
        "loader_of_stream": ("A DataLoader of an IterableDataset", lambda: DataLoader(Flow(), 8)),
        "batched_stream": ("A stream of minibatches", lambda: DataLoader(InBatches(), batch_size=None)),
    }
    for name, (title, make) in streams.items():
        made(f"data_{name}", title, read, make, section="data", refused=STREAMED)
    once = lambda: (one for one in zip(*data(), strict=True))  # noqa: E731
    made("data_generator", "A generator of samples", read, once, section="data", refused=STREAMED, epochs=1)
    workers: dict[str, tuple[str, Callable[[], Any]]] = {
        "workers": ("Workers", lambda: DataLoader(Numbered(), 8, shuffle=True, num_workers=2)),
        "worker_init": (
            "worker_init_fn",
            lambda: DataLoader(Numbered(), 8, shuffle=True, num_workers=2, worker_init_fn=initialise),
        ),
        "worker_fetches": (
            "How often each sample is fetched by a worker",
            lambda: DataLoader(Counted(), 8, shuffle=True, num_workers=1),
        ),
    }
    for name, (title, make) in workers.items():
        made(f"data_{name}", title, read, make, section="data", long=True, ways=("served", "allreduce"))


def initialise(number: int) -> None:
    told = torch.utils.data.get_worker_info()
    told.dataset.x = told.dataset.x + 10 + number


class Counted(Numbered):
    """Whose samples say how many were fetched before them where it is."""

    fetched = 0

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.fetched += 1
        return self.x[number] + self.fetched, self.y[number]


@feature("data")
def fetched_as_read(replica: Any, seen: Seen) -> nn.Module:
    """A data set that counts what is read of it."""
    held = Counted()
    return loop_over(replica, seen, held, lambda: seen.see(held.fetched))


def loop_over(replica: Any, seen: Seen, some: Any, after: Callable[[], object]) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(some):
        step(replica, seen, model, optimizer, x, y)
        after()
    return model


@feature("data")
def open_file(replica: Any, seen: Seen) -> nn.Module:
    """A data set that reads an open file."""
    path = seen.folder / "samples"
    path.write_bytes(data()[0].numpy().tobytes())
    with open(path, "rb") as file:

        def found(x: torch.Tensor) -> torch.Tensor:
            file.seek(12 * int((data()[0] == x).all(1).nonzero()[0]))
            return torch.frombuffer(bytearray(file.read(12)), dtype=torch.float32)

        return loop_over(replica, seen, Numbered(found), lambda: seen.see(file.tell()))


@feature("data")
def dictionary(replica: Any, seen: Seen) -> nn.Module:
    """Samples in a dictionary."""
    model = net()
    optimizer = replica.optimizer(model)
    x, y = data()
    for batch in replica.batches({"inputs": x, "targets": y}):
        step(replica, seen, model, optimizer, batch["inputs"], batch["targets"])
    return model


@feature("data", ORDERED)
def in_order(replica: Any, seen: Seen) -> nn.Module:
    """Minibatches in the order of the data."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data(), order="sequential"):
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("data")
def batch_size(replica: Any, seen: Seen) -> nn.Module:
    """A batch size that the script names, and the number of minibatches."""
    model = net()
    optimizer = replica.optimizer(model)
    batches = replica.batches(data(), batch_size=7)
    seen.see(len(batches))
    for x, y in batches:
        step(replica, seen, model, optimizer, x, y)
    return model


def validated(replica: Any, seen: Seen, make: Callable[[], Any]) -> nn.Module:
    model = normed()
    optimizer = replica.optimizer(model)
    for epoch in replica.epochs(3):
        model.train()
        for x, y in replica.batches(make()):
            step(replica, seen, model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            for x, y in DataLoader(TensorDataset(*data(20)), 8, shuffle=True):
                seen.see(epoch, x, cross_entropy(model(x), y))
    return model


for name, (title, make) in {"tensors": DATA["tensors"], "loader": DATA["loader"]}.items():
    made(f"epochs_of_{name}", f"Epochs of {title.lower()}, with validation", validated, make, section="data", epochs=1)


@feature("data", BY_JOB, epochs=1)
def schedule_of_epochs(replica: Any, seen: Seen) -> nn.Module:
    """A scheduler that is stepped with each epoch."""
    model = net()
    optimizer = replica.optimizer(model)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    batches = replica.batches(data())
    for _ in replica.epochs(3):
        for x, y in batches:
            step(replica, seen, model, optimizer, x, y)
        scheduler.step()
    return model


# saving


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@feature("saving")
def saved_by_torch(replica: Any, seen: Seen) -> nn.Module:
    """torch.save of the state and of the whole model."""
    model = net()

    def save(number: int) -> None:
        if number % 4 == 0:
            torch.save(model.state_dict(), seen.folder / f"{number}.pt")
            torch.save(model, seen.folder / f"model-{number}.pt")

    return loop(replica, seen, model, save)


@feature("saving")
def saved_as_safetensors(replica: Any, seen: Seen) -> nn.Module:
    """A safetensors file in the loop."""
    model = net()
    return loop(replica, seen, model, lambda _: save_file(model.state_dict(), seen.folder / "model.safetensors"))


@feature("saving")
def read_again(replica: Any, seen: Seen) -> nn.Module:
    """A file that was saved in the loop is loaded into another model."""
    model, other = normed(), normed()
    loop(replica, seen, model, lambda n: n != 4 or save_file(model.state_dict(), seen.folder / "kept"))
    other.load_state_dict(load_file(seen.folder / "kept"))
    return other


@feature("saving")
def copied(replica: Any, seen: Seen) -> nn.Module:
    """Deep copies of the model, which stay as they were."""
    model = normed()
    copies: list[nn.Module] = []
    loop(replica, seen, model, lambda _: copies.append(copy.deepcopy(model)))
    return nn.ModuleList(copies)


@feature("saving")
def state_kept(replica: Any, seen: Seen) -> nn.Module:
    """A state dict that was taken once follows the model."""
    model = net()
    held = model.state_dict()
    return loop(replica, seen, model, lambda _: seen.see(held))


@feature("saving")
def best_taken_back(replica: Any, seen: Seen) -> nn.Module:
    """The best weights are loaded in the loop."""
    model = net()
    kept: list[dict[str, torch.Tensor]] = []

    def keep(number: int) -> None:
        if number == 2:
            kept.append(states(model))
        if number == 6:
            model.load_state_dict(kept[0])

    return loop(replica, seen, model, keep)


@feature("saving")
def best_loaded_after(replica: Any, seen: Seen) -> nn.Module:
    """The best weights are loaded after the loop."""
    model = normed()
    kept: list[dict[str, torch.Tensor]] = []
    loop(replica, seen, model, lambda n: n != 5 or kept.append(states(model)))
    model.load_state_dict(kept[0])
    return model


@feature("saving")
def pickled_between(replica: Any, seen: Seen) -> nn.Module:
    """Bytes that a model is written to and read from in the loop."""
    model = normed()

    def through(_: int) -> None:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        seen.see(torch.load(file))

    return loop(replica, seen, model, through)


# control


def controlled(replica: Any, seen: Seen, does: Callable[[int], str]) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches(data())):
        what = does(number)
        if what == "continue":
            seen.see(x)
            continue
        if what == "break":
            break
        step(replica, seen, model, optimizer, x, y)
        if what == "stop":
            replica.stop()
        if what == "stop and break":
            replica.stop()
            break
    return model


for title, at in {"continue": 3, "break": 4, "stop": 4, "stop and break": 4}.items():
    refused = ONE_STEP if title == "continue" else {}
    does = functools.partial(lambda number, at, what: what if number == at else "", at=at, what=title)
    made(f"control_{title.replace(' ', '_')}", f"The loop is left or cut by {title}", controlled, does,
         section="control", refused=refused)  # fmt: skip


@feature("control", epochs=1)
def early_stop(replica: Any, seen: Seen) -> nn.Module:
    """Early stopping between epochs."""
    model = net()
    optimizer = replica.optimizer(model)
    for epoch in replica.epochs(4):
        for x, y in replica.batches(data()):
            step(replica, seen, model, optimizer, x, y)
        if epoch == 1:
            replica.stop()
            break
    return model


@feature("control")
def raised(replica: Any, seen: Seen) -> nn.Module:
    """An error in the loop that nobody takes."""

    def fail(number: int) -> None:
        if number == 4:
            raise ValueError("the script's own")

    return loop(replica, seen, net(), fail)


@feature("control")
def error_taken(replica: Any, seen: Seen) -> nn.Module:
    """An error before a step that the script takes, to go on."""
    model = net()
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches(data())):
        try:
            if number == 4:
                raise ValueError("the script's own")
        except ValueError as error:
            seen.see(str(error))
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("control")
def by_hand(replica: Any, seen: Seen) -> nn.Module:
    """Minibatches that are taken one by one, by next()."""
    model = net()
    optimizer = replica.optimizer(model)
    batches = iter(replica.batches(data()))
    while (batch := next(batches, None)) is not None:
        step(replica, seen, model, optimizer, *batch)
    return model


@feature("control")
def sliced(replica: Any, seen: Seen) -> nn.Module:
    """The first minibatches alone, by itertools.islice."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in itertools.islice(replica.batches(data()), 6):
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("control", "batches.. a second time: the first hands out the minibatches of all epochs of the job .--epochs.")
def gone_through_again(replica: Any, seen: Seen) -> nn.Module:
    """A second loop over batches(), without a loop over epochs."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("control", r"optimizer.step\(\) twice for one minibatch of replica.batches\(\): each minibatch is one step")
def stepped_twice(replica: Any, seen: Seen) -> nn.Module:
    """Two steps in one minibatch."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("control", r"optimizer.step\(\) outside of a minibatch of replica.batches\(\): there is no gradient to push")
def stepped_outside(replica: Any, seen: Seen) -> nn.Module:
    """A step before the loop."""
    model = net()
    optimizer = replica.optimizer(model)
    step(replica, seen, model, optimizer, *data())
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


@feature("control")
def printed(replica: Any, seen: Seen) -> nn.Module:
    """Lines and warnings of the script."""
    model = net()

    def say(number: int) -> None:
        print(f"step {number} of {len(seen)}")
        warnings.warn(f"in step {number}", stacklevel=1)

    return loop(replica, seen, model, say)


@feature("control")
def chance_beside(replica: Any, seen: Seen) -> nn.Module:
    """Chance that the script draws before the loop and in it."""
    seen.see(torch.rand(2))
    return loop(replica, seen, net(), lambda _: seen.see(torch.rand(2)))


listed_optimizers()
listed_schedulers()
listed_groups()
listed_options()
listed_data()
