"""Features of a user's script, each written once: `replica` is that of a job, or what a plain script has."""

from __future__ import annotations

import copy
import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
    get_worker_info,
)

from distbelief.core.optimizer import Optimizer, optim

MOMENTUM = optim("momentum", lr=0.05)
ALL = tuple(WAYS)
SHARDED = ("served", "direct", "synchronous")
"""The ways in which shards hold the parameters."""


@dataclass(frozen=True)
class Feature:
    """A feature, and what comes of it in each way."""

    section: str
    title: str
    script: Script
    refused: Mapping[str, str] = field(default_factory=dict)
    """By the way: what the sentence that refuses it says, as a regular expression."""
    optimizer: Optimizer = MOMENTUM
    epochs: int = 2
    """Of the job, which 10 steps are; 1 where the script says how many."""
    ways: tuple[str, ...] = ALL
    within: float = 0.0
    """How far a value may be off, as a part of the largest of its tensor; 0 for not a bit."""
    because: str = ""
    """Why it may."""
    long: bool = False
    """Whether it starts processes."""
    says: str = ""
    """What ours says beside the plain script, as a regular expression."""


FEATURES: dict[str, Feature] = {}


def add(
    section: str, name: str, title: str, script: Callable[..., nn.Module], refused: str | Mapping[str, str] = "",
    *, of: Mapping[str, Any] | None = None, **given: Any,
) -> None:  # fmt: skip
    """Have a feature in the table: its script, with what that is given; what refuses it, everywhere or by the way."""
    options = dict(of or {})
    sentences = (
        refused if isinstance(refused, Mapping) else {way: refused for way in options.get("ways", ALL) if refused}
    )
    FEATURES[name] = Feature(section, title, partial(script, **given), sentences, **options)


# what the scripts train, and on what

INPUTS, WIDTH = 3, 16
"""Each tensor of a model has a multiple of 16 elements: a kernel computes those behind the last of them otherwise, and
which these are differs between a tensor and a vector of all. `uneven_sizes` is without.
"""


def data(samples: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(7))
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), *more)


def normed(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH, **options), nn.Linear(WIDTH, WIDTH))


After = Callable[[int, torch.Tensor], object]
"""What a script does after a step, of its number, with its loss."""


def quiet(_model: Any, _optimizer: Any, _seen: Seen) -> After:
    return lambda *_: None


def each(act: Callable[[Any, int], object]) -> Callable[[Any, Any, Seen], After]:
    """Have something done with the model after each step."""
    return lambda model, *_: lambda number, _: act(model, number)


def step(
    replica: Any, seen: Seen, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor,
    change: Callable[[Any], object] = lambda _: None, clear: bool = True,
) -> torch.Tensor:  # fmt: skip
    """A step of a plain loop; `change` is done to what the backward pass has made."""
    optimizer.zero_grad(set_to_none=clear)
    loss = cross_entropy(model(x), y)
    loss.backward()
    seen.see(x, y, loss, change(model))
    optimizer.step()
    replica.report(loss)
    return loss.detach()


def train(
    replica: Any, seen: Seen, model: Callable[[], Any] = net, begin: Callable[[Any, Any, Seen], After] = quiet,
    samples: Callable[[], Any] = data, groups: Callable[[Any], Any] = lambda _: None,
    dtype: torch.dtype = torch.float32, order: Mapping[str, Any] | None = None, **how: Any,
) -> nn.Module:  # fmt: skip
    """A plain loop over minibatches, with what is done in each step."""
    made = model()
    optimizer = replica.optimizer(made, groups(made))
    after = begin(made, optimizer, seen)
    for number, (x, y) in enumerate(replica.batches(samples(), **(order or {}))):
        after(number, step(replica, seen, made, optimizer, x.to(dtype), y, **how))
    return made  # type: ignore[no-any-return]


# tensors


class Made(nn.Module):
    """A module of parts, whose forward pass is a function of it and of its input."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.compute, self.calls = compute, 0
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.compute(self, x)


def centre(model: Any, x: torch.Tensor) -> Any:
    model.mean = 0.5 * model.mean + 0.5 * x.mean(0)
    return model.body(x - model.mean)


def centred() -> Any:
    return changed(Made(centre, body=net()), lambda model: model.register_buffer("mean", torch.zeros(INPUTS)))


def scaling(more: torch.Tensor) -> Any:
    """A net with a parameter more, which scales what it gives where it has an element."""
    scaled = lambda model, x: model.body(x) * (model.more.abs().sum() if model.more.numel() else 1)  # noqa: E731
    return Made(scaled, more=nn.Parameter(more), body=net())


def sometimes() -> Any:
    both = lambda model, x: model.body(x) + (model.other(x) if model.calls % 3 else 0)  # noqa: E731
    return Made(both, body=net(), other=nn.Linear(INPUTS, WIDTH))


def embedded(**options: Any) -> Any:
    numbers = lambda x: (x[:, 0] > 0).long() + (x[:, 1] > 0).long()  # noqa: E731
    parts = {"rows": nn.Embedding(16, INPUTS, **options), "head": nn.Linear(INPUTS, WIDTH)}
    return Made(lambda model, x: model.head(model.rows(numbers(x)) + x), **parts)


def coalesces(model: Any) -> None:
    """Have torch add up the rows of a gradient before it steps, in the plain script too."""
    add_up = lambda p: setattr(p, "grad", p.grad.coalesce()) if p.grad.is_sparse else None  # noqa: E731
    model.rows.weight.register_post_accumulate_grad_hook(add_up)


def recurrent() -> Any:
    parts = {"cell": nn.GRU(1, WIDTH, batch_first=True), "head": nn.Linear(WIDTH, WIDTH)}
    return Made(lambda model, x: model.head(model.cell(x.view(-1, INPUTS, 1))[0][:, -1]), **parts)


def recomputed() -> Any:
    parts = {"body": net(), "drop": nn.Dropout(0.3)}
    return Made(lambda model, x: checkpoint(lambda z: model.drop(model.body(z)), x, use_reentrant=False), **parts)


def widened() -> Any:
    return nn.Sequential(net(), Made(lambda model, x: x * model.scale, scale=nn.Parameter(torch.ones(WIDTH))))


def changed(model: Any, change: Callable[[Any], object]) -> Any:
    """A model to which something is done before it has an optimizer."""
    change(model)
    return model


def with_buffer(name: str, **options: Any) -> Any:
    return changed(net(), lambda model: model.register_buffer(name, torch.zeros(3), **options))


def tie(model: Any) -> None:
    model[4].weight = model[2].weight


def tie_memory(model: Any) -> None:
    model[3].weight.data = model[2].weight.data


def traced() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(net(), data()[0])


def convolved() -> nn.Module:
    parts = nn.Unflatten(1, (INPUTS, 1, 1)), nn.Conv2d(INPUTS, WIDTH, 2, padding=1), nn.Flatten(), nn.Linear(64, WIDTH)
    return nn.Sequential(*parts).to(memory_format=torch.channels_last)


def sees(look: Callable[[Any], Callable[[], object]]) -> Callable[[Any, Any, Seen], After]:
    """Have what is looked at before the first step be seen again after each."""

    def begin(model: Any, _: Any, seen: Seen) -> After:
        again = look(model)
        return lambda *_: seen.see(again())

    return begin


def places(model: Any) -> Callable[[], object]:
    before = [(id(one), one.data_ptr()) for one in model.parameters()]
    return lambda: before == [(id(one), one.data_ptr()) for one in model.parameters()]


def fill(model: Any, *_: Any) -> After:
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
    nn.init.zeros_(model[2].bias)
    return lambda *_: None


BEFORE = ": the model has changed since replica.optimizer..; change it before"
DECAYED = optim("momentum", lr=0.05, weight_decay=0.1)
SGD: dict[str, Any] = {"optimizer": optim("sgd", lr=0.1)}


# fmt: off
def tensors() -> None:
    has = partial(add, "tensors", script=train)
    has("a_plain_model", "Nothing but layers")
    has("buffer_assigned", "A buffer is assigned anew in each step", model=centred)
    has("buffer_written", "A buffer is written to between steps", model=centred,
        begin=each(lambda m, n: m.mean.fill_(0.1 * n)))
    has("buffer_resized", "A buffer gets another shape in the loop", model=partial(with_buffer, "kept"),
        begin=each(lambda m, _: setattr(m, "kept", torch.zeros(5))),
        refused=rf"buffer 'kept' is float32 \[5\], and was float32 \[3\]{BEFORE}")
    has("buffer_late", "A buffer is registered in the loop", refused=f"'late' is new{BEFORE}",
        begin=each(lambda m, n: n or m.register_buffer("late", torch.ones(2))))
    has("cache_resized", "A buffer that is not saved gets another shape in the loop",
        model=partial(with_buffer, "kept", persistent=False), begin=each(lambda m, n: m.kept.resize_(n + 1)))
    has("cache_late", "A buffer that is not saved is registered in the loop",
        begin=each(lambda m, n: n or m.register_buffer("late", torch.ones(2), persistent=False)))
    has("layer_late", "A layer is added in the loop", refused=f"'late.weight' is new{BEFORE}",
        begin=each(lambda m, n: n or m.add_module("late", nn.Linear(WIDTH, WIDTH))))
    has("layer_replaced", "A layer is replaced in the loop", refused=f"parameter '2.weight' was replaced{BEFORE}",
        begin=each(lambda m, n: n or m.__setitem__(2, nn.Linear(WIDTH, WIDTH))))
    has("dtype_changed", "A parameter gets another dtype in the loop",
        model=widened, begin=each(lambda m, _: m[1].double()),
        refused=f"parameter '1.scale' is float64 .16., and was float32 .16.{BEFORE}")
    has("view_kept", "A view of a weight, taken before the optimizer is made",
        begin=sees(lambda m: m[0].weight.detach()[1:, :2].clone))
    has("array_kept", "A numpy array in the memory of a weight",
        begin=sees(lambda m: m[2].weight.detach().numpy().tobytes))
    has("places_kept", "The identity and the memory of each parameter", begin=sees(places))
    has("tied", "One parameter under two names", model=lambda: changed(net(nn.Tanh(), nn.Linear(16, 16)), tie))
    has("tied_by_memory", "Two parameters on one memory", model=lambda: changed(net(nn.Linear(16, 16)), tie_memory),
        refused="'[23].weight' and '[23].weight' are two tensors that share memory: tie them by assigning the same")
    has("frozen", "Parameters that are frozen from the start",
        model=lambda: changed(net(), lambda m: m[0].requires_grad_(False)))
    has("frozen_in_the_loop", "Parameters that are frozen after some steps, and thawed after more",
        begin=each(lambda m, n: m[0].requires_grad_(n < 3 or n > 6)))
    has("thawed", "Parameters that were frozen when the optimizer was made are thawed",
        model=lambda: changed(net(), lambda m: m[0].requires_grad_(False)),
        begin=each(lambda m, n: m[0].requires_grad_(n > 3)),
        refused="0.weight has a gradient in step .*, and was frozen .*: call .* first and freeze it afterwards")
    has("parametrized", "A weight computed from others (weight norm)",
        model=lambda: changed(net(), lambda m: nn.utils.parametrizations.weight_norm(m[0])))
    has("spectral", "A parametrization with buffers (spectral norm)",
        model=lambda: changed(net(), lambda m: nn.utils.parametrizations.spectral_norm(m[2])))
    has("empty", "A parameter without elements", model=lambda: scaling(torch.zeros(0, 3)))
    has("scalar", "A parameter without dimensions", model=lambda: scaling(torch.tensor(1.5)), of=SGD)
    has("uneven_sizes", "Tensors of any size", model=lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), of=SGD)
    has("complex", "A complex parameter", model=lambda: scaling(torch.ones(2, dtype=torch.complex64)),
        refused="parameter 'more' is torch.strided torch.complex64 on cpu: it must be a dense real tensor")
    has("double", "A model in float64", model=lambda: net().double(), dtype=torch.float64)
    has("bfloat16", "A model in bfloat16, whose steps are made in float32 copies, as in mixed precision",
        model=lambda: net().bfloat16(), dtype=torch.bfloat16)
    has("mixed", "A model in two dtypes", dtype=torch.float64,
        model=lambda: nn.Sequential(nn.Linear(3, 16).double(), Made(lambda _, x: x.float()), nn.Linear(16, 16)))
    has("channels_last", "Weights in channels_last", model=convolved, begin=sees(lambda m: m[1].weight.stride))
    has("scripted", "A model that TorchScript has traced", model=traced)
    has("batch_norm", "Running statistics", model=normed)
    has("cumulative_norm", "Running statistics that are a cumulative average", model=lambda: normed(momentum=None))
    has("dropout", "Random numbers in the model", model=lambda: net(nn.Dropout(0.4), nn.Linear(16, 16)))
    has("lazy", "A lazy module whose first call is in the loop", model=lambda: nn.Sequential(nn.LazyLinear(16)),
        refused="'0.weight' of a lazy module has no shape yet: run a minibatch through the model first")
    has("unused", "A parameter that never has a gradient, with weight decay", of={"optimizer": DECAYED},
        model=lambda: changed(scaling(torch.zeros(0)), lambda m: m.add_module("unused", nn.Linear(3, 16))))
    has("sometimes_used", "A parameter without a gradient in some steps", model=sometimes)
    has("sparse_rows", "An embedding with sparse gradients, whose rows are added up before the step",
        model=lambda: changed(embedded(sparse=True), coalesces), of=SGD)
    has("renormed", "An embedding that shortens its rows (max_norm)", model=lambda: embedded(max_norm=0.5))
    has("recurrent", "A recurrent layer, which has a list of its weights", model=recurrent)
    has("filled", "Weights are given between the optimizer and the loop", begin=fill)
# fmt: on


# optimizers and schedulers

CLOSE = {"within": 1e-6, "because": "the shards step one flat vector by torch's fused kernels, which round otherwise"}
RATES = {"sgd": 0.1, "momentum": 0.05, "nesterov": 0.05, "adagrad": 0.05, "adadelta": 1.0, "rmsprop": 0.005}
RATES |= {"adam": 0.01, "adamw": 0.01, "nadam": 0.01, "radam": 0.01, "adamax": 0.01, "asgd": 0.01}
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
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10, cycle_momentum=False),
    "OneCycleLR with momentum": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, 4),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}
BY_JOB = {"allreduce": "the script sets the learning rate to .*: with strategy allreduce only the job may change it"}
NO_OPTIONS = {
    "allreduce": "the script sets (momentum|weight_decay) of its parameter groups, and with strategy allreduce"
}
NAMED = {"allreduce": r"optimizer\(optim=...\): strategy allreduce steps with --optimizer; set it there"}
SEVERAL = {
    "allreduce": r"optimizer\(\) of a second model: strategy allreduce trains one",
    "direct": "--path direct: the script has several models, whose updates the shards make; leave it off",
}


def schedule(make: Callable[[Any], Any]) -> Callable[[Any, Any, Seen], After]:
    def begin(_: Any, optimizer: Any, seen: Seen) -> After:
        scheduler = make(optimizer)
        told = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)

        def after(_: int, loss: torch.Tensor) -> None:
            scheduler.step(*([loss] if told else []))
            seen.see(scheduler.get_last_lr(), optimizer.param_groups[0].get("momentum"))

        return after

    return begin


def sets(option: str, value: Callable[[int], Any], group: int = 0) -> Callable[[Any, Any, Seen], After]:
    """Have an option of a group be set before each step but the first."""

    return lambda _m, optimizer, _s: lambda n, _: optimizer.param_groups[group].__setitem__(option, value(n))


def two_groups(model: Any, **options: Any) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), **options}, {"params": model[2].parameters()}]


def closure(replica: Any, seen: Seen) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        seen.see(optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y)))  # type: ignore[misc]  # bound at once
    return model


def optimizer_named(replica: Any, seen: Seen) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model, optim=optim("nesterov", lr=0.03, weight_decay=0.01))
    for x, y in replica.batches(data()):
        step(replica, seen, model, optimizer, x, y)
    return model


def adversaries(replica: Any, seen: Seen, every: int) -> nn.Module:
    maker, critic = net(), nn.Sequential(nn.Linear(WIDTH, WIDTH))
    of_critic = replica.optimizer(critic, optim=optim("momentum", lr=0.05))
    of_maker = replica.optimizer(maker, optim=optim("sgd", lr=0.1))
    for number, (x, _) in enumerate(replica.batches(data())):
        of_critic.zero_grad()
        (critic(maker(x).detach()).mean() - critic(torch.ones(8, WIDTH)).mean()).backward()
        of_critic.step()
        if number % every == 0:
            of_maker.zero_grad()
            loss = -critic(maker(x)).mean()
            loss.backward()
            of_maker.step()
            seen.see(x, loss)
    return nn.ModuleList([maker, critic])


def in_turn(replica: Any, seen: Seen) -> nn.Module:
    models = nn.ModuleList([net(), net()])
    optimizers = [replica.optimizer(model) for model in models]
    for x, y in replica.batches(data()):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(replica, seen, model, optimizer, x, y)
    return models


def averaged(replica: Any, seen: Seen, **options: Any) -> nn.Module:
    """What stands beside the model: its average."""
    model = normed()
    average = swa_utils.AveragedModel(model, **options)
    train(replica, seen, lambda: model, each(lambda m, n: n < 4 or average.update_parameters(m)))
    swa_utils.update_bn([data()], average)
    return average


def swapped(model: Any, *_: Any) -> After:
    average = swa_utils.AveragedModel(model)

    def after(number: int, _: torch.Tensor) -> None:
        average.update_parameters(model)
        if number == 5:
            model.load_state_dict(average.module.state_dict())

    return after


def look_ahead(model: Any, *_: Any) -> After:
    slow = [one.detach().clone() for one in model.parameters()]

    def after(number: int, _: torch.Tensor) -> None:
        for one, kept in zip(model.parameters(), slow, strict=True):
            if number % 3 == 2:
                one.data.copy_(kept.lerp_(one.detach(), 0.5))

    return after


def sharpness_aware(replica: Any, seen: Seen) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        cross_entropy(model(x), y).backward()
        before = [one.detach().clone() for one in model.parameters()]
        for one in model.parameters():
            one.data.add_(one.grad, alpha=0.1)  # type: ignore[arg-type]  # it has one
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        for one, was in zip(model.parameters(), before, strict=True):
            one.data.copy_(was)
        optimizer.step()
        optimizer.zero_grad()
        seen.see(x, loss)
    return model


def clip_array(model: Any, _: int) -> None:
    for one in model.parameters():
        np.clip(one.detach().numpy(), -0.2, 0.2, out=one.detach().numpy())


@torch.no_grad()
def clip(model: Any, _: int) -> None:
    for one in model.parameters():
        one.clamp_(-0.2, 0.2)


def state(model: Any, optimizer: Any, seen: Seen) -> After:
    return lambda *_: seen.see([optimizer.state[one]["momentum_buffer"] for one in model.parameters()])


def options(_: Any, optimizer: Any, seen: Seen) -> After:
    [group] = optimizer.param_groups
    names = ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")
    return lambda *_: seen.see([group[name] for name in names], optimizer.defaults["lr"], len(group["params"]))


def hooked(model: Any, optimizer: Any, seen: Seen) -> After:
    optimizer.register_step_pre_hook(lambda *_: seen.see("before", model[0].bias))
    optimizer.register_step_post_hook(lambda *_: seen.see("after", model[0].bias))
    return lambda *_: None


def save_all(model: Any, optimizer: Any, seen: Seen) -> After:
    return lambda *_: torch.save([model.state_dict(), optimizer.state_dict()], seen.folder / "kept.pt")


# fmt: off
def optimizers() -> None:
    has = partial(add, "optimizer", script=train)
    for title, decay in {"": {}, "these with weight decay": {"weight_decay": 0.05}}.items():
        for name, lr in RATES.items():
            close = {} if name in ("sgd", "momentum", "nesterov") else CLOSE
            made = {"optimizer": optim(name, lr=lr, **decay), "epochs": 4, **close}
            has(f"optimizer_{name}{'_with_weight_decay' if decay else ''}", title or name, of=made)
    for name, make in SCHEDULERS.items():
        title = "Each scheduler of torch.optim, with and without momentum"
        has(f"scheduler_{name.replace(' ', '_')}", title, refused=BY_JOB, begin=schedule(make))
    has("rate_set", "The rate is set in the loop", refused=BY_JOB, begin=sets("lr", lambda n: 0.07 / (n + 1)))
    has("rate_of_one_group_set", "The rate of one of two groups is set in the loop", refused=BY_JOB,
        groups=two_groups, begin=sets("lr", lambda n: 0.07 / (n + 1), 1))
    for option, value in {"momentum": 0.5, "weight_decay": 0.1}.items():
        has(f"set_{option}", f"The script sets {option} in the loop", refused=NO_OPTIONS,
            begin=sets(option, partial(lambda value, _: value, value)))
    has("set_maximize", "The script sets maximize in the loop", begin=sets("maximize", lambda _: True),
        refused="the script sets maximize to True: it began as False, and only numbers can change")
    allowed = {"lr": 0.02, "weight_decay": 0.1}
    foreign = {"momentum": 0.5, "dampening": 0.1, "nesterov": True, "maximize": True, "foreach": False, "fused": False}
    of_adam = {"betas": (0.8, 0.9), "eps": 1e-4, "amsgrad": True}
    for option, value in {**allowed, **foreign, **of_adam}.items():
        says = f"parameter group 0 sets '{option}'; a group may set lr, weight_decay, the rest is the job's"
        made = {"optimizer": optim("adam", lr=0.01)} if option in of_adam else {}
        title = f"{option} of a group" if option in allowed else "Any other option of a group"
        has(f"group_{option}", title, groups=partial(two_groups, **{option: value}), of=made,
            refused="" if option in allowed else says)
    has("group_named", "Groups of named parameters", groups=lambda m: [{"params": [*m.named_parameters()]}])
    has("group_lacks", "A parameter is in no group", groups=lambda m: [{"params": m[0].parameters()}],
        refused="parameter '2.weight' is in no parameter group: put it in one, or set its requires_grad to")
    has("group_added", "A group is added in the loop",
        begin=lambda _m, o, _s: lambda *_: o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        refused=r"add_param_group\(\): the shards' slices are fixed; pass all groups at once")
    add("optimizer", "closure", "A step with a closure", closure,
        r"optimizer.step\(closure\): a push is one gradient, .* for L-BFGS use strategy sandblaster")
    job = {"optimizer": Optimizer()}
    add("optimizer", "optimizer_named", "The script names its optimizer", optimizer_named, NAMED, of=job)
    for every in (1, 3):
        title = "Two models with an optimizer each"
        add("optimizer", f"two_models_{every}", title, adversaries, {**SEVERAL, **NAMED}, of=job, every=every)
    add("optimizer", "two_models_in_turn", "Two models with the job's optimizer", in_turn, SEVERAL)
    ema = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True}
    add("optimizer", "moving_average", "An exponential moving average beside the model", averaged, **ema)
    add("optimizer", "averaged", "SWA: an average beside the model", averaged)
    has("averaged_swapped", "SWA: the model goes on from the average", begin=swapped)
    add("optimizer", "sharpness_aware", "SAM: a gradient beside the weights, which are put back", sharpness_aware)
    has("lookahead", "Lookahead: the weights go back half of their way", begin=look_ahead)
    said = {"says": "the script has written to '0.weight' after its last step: the run's model.safe.*yourself.*\n"}
    has("clipped_by_numpy", "Weights are clipped by numpy after each step", begin=each(clip_array), of=said)
    has("clipped_by_no_grad", "Weights are clipped in no_grad after each step", begin=each(clip), of=said)
    has("written_by_data", "A weight's .data is written to once",
        begin=each(lambda m, n: n != 6 or m[2].bias.data.zero_()))
    has("optimizer_saved", "The optimizer's state is saved", begin=save_all,
        refused=r"optimizer.state_dict\(\) has no state to save: .*--resume")
    has("state_read", "What the optimizer keeps is read in the loop", begin=state,
        refused=r"optimizer.state\[...\] has nothing: the optimizer's state is on the shards")
    has("groups_read", "Options are read from the groups in the loop", begin=options)
    has("step_hooks", "Hooks before and after the step of the optimizer", begin=hooked)
# fmt: on


# gradients

ONE_STEP = {"allreduce": "took the next minibatch without optimizer.step.. for the last: with strategy allreduce each"}


def accumulated(replica: Any, seen: Seen, every: int, make: Callable[[], nn.Module] = net) -> nn.Module:
    model = make()
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches(data())):
        loss = cross_entropy(model(x), y) / every
        loss.backward()
        seen.see(x, loss)
        if number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


def own_backward(replica: Any, seen: Seen, backward: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> nn.Module:
    """A loop whose gradients are made in another way."""
    model = net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(data()):
        seen.see(x, backward(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    return model


def in_parts(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    losses = [cross_entropy(model(some), of) / 2 for some, of in zip(x.split(4), y.split(4), strict=True)]
    return [loss.backward() for loss in losses] and losses


def penalised(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = cross_entropy(model(x.requires_grad_()), y)
    [slope] = torch.autograd.grad(loss, x, create_graph=True)
    whole = loss + slope.square().sum()
    whole.backward()
    return whole


def with_graph(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cycle, which zero_grad breaks
        cross_entropy(model(x), y).backward(create_graph=True)


def taken(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    slopes = torch.autograd.grad(cross_entropy(model(x), y), [*model.parameters()])
    for one, slope in zip(model.parameters(), slopes, strict=True):
        one.grad = slope


def lowered(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(x), y)
    loss.backward()
    return loss


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
        seen.see(x, loss, scaler.get_scale())
    return model


def sign(model: Any) -> None:
    for one in model.parameters():
        one.grad = one.grad.sign()


def noise(model: Any) -> None:
    for one in model.parameters():
        one.grad += 0.01 * torch.randn_like(one)


def drop(model: Any) -> None:
    model[0].bias.grad = None


def unbound(model: Any) -> None:
    model[2].bias.grad.fill_(float("nan"))


def hooks(model: Any, _: Any, seen: Seen) -> After:
    model[0].weight.register_hook(lambda slope: 2 * slope)
    model[0].weight.register_post_accumulate_grad_hook(lambda one: seen.see(one.grad))
    model[2].register_full_backward_hook(lambda *given: seen.see(given[2]))
    model[2].register_forward_pre_hook(lambda _, given: (given[0] + 0.1,))
    return lambda *_: None


# fmt: off
def gradients() -> None:
    has = partial(add, "gradients", script=train)
    for every in (2, 3):
        add("gradients", f"accumulated_{every}", "Accumulated over several minibatches", accumulated, ONE_STEP,
            every=every)
    add("gradients", "accumulated_statistics", "Running statistics, accumulated over 3 minibatches", accumulated,
        ONE_STEP, every=3, make=normed)
    has("clipped_norm", "Clipped to a norm", change=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    has("clipped_value", "Clipped by value", change=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01))
    has("gradient_replaced", "A gradient is another tensor", change=sign)
    has("gradient_noise", "Noise is added to a gradient", change=noise)
    has("gradient_dropped", "A gradient is taken away", change=drop)
    has("gradient_not_finite", "A gradient that is not finite", change=unbound,
        refused="replica 0: the norm of the gradient is nan at step 0 .*; lower --lr")
    has("zeroed_in_place", "Gradients are zeroed where they are", model=sometimes, clear=False)
    has("checkpointed", "Activations that are computed again in the backward pass", model=recomputed)
    has("hooks", "Hooks on parameters and modules", begin=hooks)
    ways = {"in_parts": in_parts, "penalised": penalised, "with_graph": with_graph, "taken": taken, "lowered": lowered}
    titles = ("Several backward passes in a minibatch", "A penalty on the norm of a gradient", "backward(create_graph)",
              "Gradients that the script takes and assigns itself", "A forward pass in bfloat16 (autocast)")
    for (name, backward), title in zip(ways.items(), titles, strict=True):
        add("gradients", f"backward_{name}", title, own_backward, backward=backward)
    add("gradients", "grad_scaler", "GradScaler", scaled, unbounded=-1)
    add("gradients", "grad_scaler_skips", "GradScaler that skips a step", scaled,
        {"allreduce": "the loop took the next minibatch without optimizer.step"}, unbounded=4)
# fmt: on


# data


class Numbered(Dataset[Any]):
    """Samples by number, changed as they are read."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        self.x, self.y = data()
        self.change, self.fetched = change, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        self.fetched += 1
        return self.change(self.x[number]), self.y[number]


class Together(Numbered):
    def __getitems__(self, numbers: list[int]) -> Any:
        return [(self.x[number] + len(numbers), self.y[number]) for number in numbers]


class Counted(Numbered):
    """Whose samples say how many were read before them where it is."""

    def __getitem__(self, number: int) -> Any:
        self.fetched += 1
        return self.x[number] + self.fetched, self.y[number]


class Flow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*data(), strict=True)


class InBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*(one.split(9) for one in data()), strict=True)


class OwnSampler(BatchSampler):
    pass


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ((2 * x, y) for x, y in super().__iter__())


def shifted(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x + 1, y


def initialise(number: int) -> None:
    told: Any = get_worker_info()
    told.dataset.x = told.dataset.x + 10 + number


def loader(dataset: Any = None, size: int | None = 8, **given: Any) -> DataLoader[Any]:
    return DataLoader(Numbered() if dataset is None else dataset, size, **given)


GROUP = "means nothing to strategy allreduce; the minibatches of a round are dealt to its whole group"
STREAM = {"allreduce": f"a stream {GROUP}"}
DRAWS = "A transform that draws from torch, Python or numpy"
OWN_ORDER = "the job has its own order, in which each sample goes to one replica"
DATA: dict[str, tuple[str, Callable[[], Any], Any]] = {
    "arrays": ("Arrays in a tuple", lambda: tuple(one.numpy() for one in data()), ""),
    "tensor_dataset": ("A TensorDataset", lambda: TensorDataset(*data()), ""),
    "map": ("A map-style data set", Numbered, ""),
    "list": ("A list of samples", lambda: [*zip(*data(), strict=True)], ""),
    "getitems": ("A data set that reads several samples at once", Together, ""),
    "subset": ("A Subset", lambda: Subset(Numbered(), range(5, 33)), ""),
    "concatenated": ("A ConcatDataset", lambda: ConcatDataset([Numbered(), Together()]), ""),
    "uneven": ("A last minibatch that is smaller", lambda: data(37), ""),
    "one_batch": ("Fewer samples than a minibatch", lambda: data(5), ""),
    "loader": ("A DataLoader, with its batch size", lambda: loader(size=5, shuffle=True), ""),
    "collate": ("A collate_fn", lambda: loader(shuffle=True, collate_fn=shifted), ""),
    "draws_torch": (DRAWS, lambda: Numbered(lambda x: x + torch.randn(3)), ""),
    "draws_python": (DRAWS, lambda: Numbered(lambda x: x + random.random()), ""),
    "draws_numpy": (DRAWS, lambda: Numbered(lambda x: x + float(np.random.rand())), ""),
    "iterable": ("An IterableDataset", Flow, STREAM),
    "loader_of_stream": ("A DataLoader of an IterableDataset", lambda: loader(Flow()), STREAM),
    "batched_stream": ("A stream of minibatches", lambda: loader(InBatches(), None), STREAM),
    "sampler": ("A sampler", lambda: loader(sampler=WeightedRandomSampler([1.0] * 40, 40)),
                f"a DataLoader with a WeightedRandomSampler: {OWN_ORDER}"),
    "batch_sampler": ("A batch sampler",
                      lambda: DataLoader(Numbered(), batch_sampler=OwnSampler(RandomSampler(Numbered()), 8, False)),
                      f"a DataLoader with a OwnSampler: {OWN_ORDER}"),
    "drop_last": ("drop_last", lambda: loader(drop_last=True), r"drop_last=True\): .* launch with --drop-last"),
    "no_batch_size": ("batch_size=None", lambda: loader(size=None), r"batch_size=None\): .* set a batch_size"),
    "loader_class": ("A DataLoader with __iter__", lambda: Doubling(Numbered(), 8), "with its own __iter__"),
    "string": ("A string", lambda: "words", "str cannot be cut into minibatches: pass a map-style data set"),
}  # fmt: skip


def fetched(replica: Any, seen: Seen) -> nn.Module:
    held = Numbered()
    return train(replica, seen, begin=lambda *_: lambda *_: seen.see(held.fetched), samples=lambda: held)


def open_file(replica: Any, seen: Seen) -> nn.Module:
    """A data set that reads an open file, where it is read."""
    path = seen.folder / "samples"
    path.write_bytes(data()[0].numpy().tobytes())
    with open(path, "rb") as file:

        def found(x: torch.Tensor) -> torch.Tensor:
            file.seek(12 * int((data()[0] == x).all(1).nonzero()[0]))
            return torch.frombuffer(bytearray(file.read(12)), dtype=torch.float32)

        return train(replica, seen, begin=lambda *_: lambda *_: seen.see(file.tell()), samples=lambda: Numbered(found))


def dictionary(replica: Any, seen: Seen) -> nn.Module:
    model, (x, y) = net(), data()
    optimizer = replica.optimizer(model)
    for batch in replica.batches({"inputs": x, "targets": y}):
        step(replica, seen, model, optimizer, batch["inputs"], batch["targets"])
    return model


def in_epochs(
    replica: Any, seen: Seen, samples: Callable[..., Any], scheduled: bool = False, grows: bool = False, most: int = 100
) -> nn.Module:
    """Epochs, each of its first minibatches, with validation and a scheduler between them."""
    model = normed()
    optimizer = replica.optimizer(model)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5 if scheduled else 1.0)
    for epoch in replica.epochs(3):
        batches = replica.batches(samples(*([20 + 10 * epoch] if grows else [])))
        for number, (x, y) in enumerate(batches):
            if number == most:
                break
            step(replica, seen, model.train(), optimizer, x, y)
        with torch.no_grad():
            for x, y in DataLoader(TensorDataset(*data(20)), 8, shuffle=True):
                seen.see(epoch, len(batches), x, cross_entropy(model.eval()(x), y))
        scheduler.step()
    return model


# fmt: off
def data_sets() -> None:
    for name, (title, make, refused) in DATA.items():
        add("data", f"data_{name}", title, train, refused, samples=make)
    once = lambda: (one for one in zip(*data(), strict=True))  # noqa: E731
    add("data", "data_generator", "A generator of samples", train, STREAM, samples=once, of={"epochs": 1})
    by_processes = {"long": True, "ways": ("served", "allreduce")}
    for name, title, options in (
        ("workers", "Workers", {"num_workers": 2}),
        ("worker_init", "worker_init_fn", {"num_workers": 2, "worker_init_fn": initialise}),
        ("worker_counts", "Workers that count what they read", {"dataset": Counted(), "num_workers": 1}),
    ):
        add("data", f"data_{name}", title, train, of=by_processes, samples=partial(loader, shuffle=True, **options))
    add("data", "data_loader_in_order", "A DataLoader that does not shuffle", train, samples=loader,
        refused="a DataLoader with shuffle=False, but the job shuffles: set shuffle=True, or")
    add("data", "data_fetched", "A data set that counts what is read of it", fetched)
    add("data", "open_file", "A data set that reads an open file", open_file)
    add("data", "dictionary", "Samples in a dictionary", dictionary)
    add("data", "in_order", "Minibatches in the order of the data", train, order={"order": "sequential"},
        refused={"allreduce": f"order sequential {GROUP}"})
    add("data", "batch_size", "A batch size that the script names", train, order={"batch_size": 7})
    one = {"epochs": 1}
    add("data", "epochs_of_tensors", "Epochs of tensors, with validation", in_epochs, of=one, samples=data)
    add("data", "epochs_of_loader", "Epochs of a DataLoader, with validation", in_epochs, of=one,
        samples=partial(loader, shuffle=True))
    add("data", "epochs_left", "Epochs that are left before their end", in_epochs, of=one, samples=data, most=3,
        refused="the loop over the minibatches of epoch 0 was left, which has ended this replica's part: skip")
    add("data", "epochs_of_other_data", "Epochs whose data grow", in_epochs, of=one, samples=data, grows=True,
        refused=r"batches\(\) of 30 samples in epoch 1, and of 20 before: all epochs of a job have the same data")
    add("data", "epochs_scheduled", "A scheduler that is stepped with each epoch", in_epochs, BY_JOB, of=one,
        samples=data, scheduled=True)
# fmt: on


# saving


def save(model: Any, _: Any, seen: Seen) -> After:
    def after(number: int, _: torch.Tensor) -> None:
        if number % 4 == 0:
            torch.save(model.state_dict(), seen.folder / f"{number}.pt")
            torch.save(model, seen.folder / f"model-{number}.pt")

    return after


def save_tensors(model: Any, _: Any, seen: Seen) -> After:
    return lambda *_: save_file(model.state_dict(), seen.folder / "model.safetensors")


def through_bytes(model: Any, _: Any, seen: Seen) -> After:
    def after(*_: object) -> None:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        seen.see(torch.load(io.BytesIO(file.getvalue())))

    return after


def read_again(replica: Any, seen: Seen) -> nn.Module:
    other = normed()
    train(replica, seen, normed, save_tensors)
    other.load_state_dict(load_file(seen.folder / "model.safetensors"))
    return other


def copied(replica: Any, seen: Seen) -> nn.Module:
    copies: list[nn.Module] = []
    train(replica, seen, normed, each(lambda model, _: copies.append(copy.deepcopy(model))))
    return nn.ModuleList(copies)


def best(replica: Any, seen: Seen, at: int) -> nn.Module:
    """The weights of step 2 are taken back at another."""
    kept: dict[str, torch.Tensor] = {}

    def after(model: Any, number: int) -> None:
        if number == 2:
            kept.update({name: value.clone() for name, value in model.state_dict().items()})
        if number == at:
            model.load_state_dict(kept)

    model = train(replica, seen, normed, each(after))
    if at < 0:
        model.load_state_dict(kept)
    return model


# fmt: off
def saving() -> None:
    add("saving", "saved_by_torch", "torch.save of the state and of the whole model", train, begin=save)
    add("saving", "saved_as_safetensors", "A safetensors file in the loop", train, begin=save_tensors)
    add("saving", "saved_as_bytes", "A state that is written and read in the loop", train, begin=through_bytes)
    add("saving", "read_again", "A file that was saved is loaded into another model", read_again)
    add("saving", "copied", "Deep copies of the model, which stay as they were", copied)
    add("saving", "state_kept", "A state dict that was taken once", train, begin=sees(lambda m: m.state_dict().copy))
    add("saving", "best_taken_back", "The best weights are loaded in the loop", best, at=6)
    add("saving", "best_loaded_after", "The best weights are loaded after the loop", best, at=-1)
# fmt: on


# control


def controlled(replica: Any, seen: Seen, what: str) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches(data())):
        if number == 4 and what == "continue":
            continue
        if number == 4 and what == "break":
            break
        try:
            if number == 4 and what in ("error", "caught"):
                raise ValueError("the script's own")
        except ValueError as error:
            if what == "error":
                raise
            seen.see(str(error))
        step(replica, seen, model, optimizer, x, y)
        if number == 4 and "stop" in what:
            replica.stop()
            if "break" in what:
                break
    return model


def early_stop(replica: Any, seen: Seen) -> nn.Module:
    model = net()
    optimizer = replica.optimizer(model)
    for epoch in replica.epochs(4):
        for x, y in replica.batches(data()):
            step(replica, seen, model, optimizer, x, y)
        if epoch == 1:
            replica.stop()
            break
    return model


def by_hand(replica: Any, seen: Seen, most: int) -> nn.Module:
    """Minibatches that are taken one by one, or the first of them."""
    model = net()
    optimizer = replica.optimizer(model)
    batches = itertools.islice(replica.batches(data()), most)
    while (batch := next(batches, None)) is not None:
        step(replica, seen, model, optimizer, *batch)
    return model


def again(replica: Any, seen: Seen, steps: int = 1, loops: int = 1, before: bool = False) -> nn.Module:
    """More steps in a minibatch than one, more loops, or a step before."""
    model = net()
    optimizer = replica.optimizer(model)
    if before:
        step(replica, seen, model, optimizer, *data())
    for x, y in replica.batches(data()):
        for _ in range(steps):
            step(replica, seen, model, optimizer, x, y)
    if loops > 1:
        for x, y in replica.batches(data()):
            step(replica, seen, model, optimizer, x, y)
    return model


def says(_model: Any, _optimizer: Any, seen: Seen) -> After:
    def after(number: int, _: torch.Tensor) -> None:
        print(f"step {number} of {len(seen)}")
        warnings.warn(f"in step {number}", stacklevel=1)

    return after


# fmt: off
def control() -> None:
    whats = {"continue": "A minibatch is skipped", "break": "The loop is left", "stop": "stop()",
             "stop, break": "stop(), and the loop is left", "error": "An error in the loop that nobody catches",
             "caught": "An error in the loop that the script catches"}
    for what, title in whats.items():
        refused = ONE_STEP if what == "continue" else {}
        add("control", f"control_{what.replace(', ', '_')}", title, controlled, refused, what=what)
    add("control", "early_stop", "Early stopping between epochs", early_stop, of={"epochs": 1})
    add("control", "by_hand", "Minibatches that are taken one by one", by_hand, most=100)
    add("control", "sliced", "Only the first minibatches (itertools.islice)", by_hand, most=6)
    add("control", "loops", "A second loop over batches(), without one over epochs", again, loops=2,
        refused=r"batches\(\) a second time: the first yields the minibatches of all epochs .* replica.epochs\(n\)")
    add("control", "steps", "Two steps in one minibatch", again, steps=2,
        refused=r"optimizer.step\(\) twice in one minibatch of replica.batches\(\): each minibatch is one step")
    add("control", "step_before", "A step before the loop", again, before=True,
        refused=r"optimizer.step\(\) outside of a minibatch of replica.batches\(\): there is no gradient to")
    add("control", "printed", "Lines and warnings that the script prints", train, begin=says)
    add(
        "control",
        "chance",
        "Random numbers drawn in the loop",
        train,
        begin=sees(lambda _: partial(torch.rand, 2)),
    )
# fmt: on


for section in (tensors, optimizers, gradients, data_sets, saving, control):
    section()
