"""Oracles: training loops in plain PyTorch, which owe nothing to distbelief, and small tasks for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from distbelief.tasks import Task
from distbelief.tasks.task import TensorData, as_data

FUSED = {"fused": True}
STEPPERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups, **o: torch.optim.SGD(groups, **o, **FUSED),
    "momentum": lambda groups, **o: torch.optim.SGD(groups, momentum=0.9, **o, **FUSED),
    "nesterov": lambda groups, **o: torch.optim.SGD(groups, momentum=0.9, nesterov=True, **o, **FUSED),
    "adagrad": lambda groups, **o: torch.optim.Adagrad(groups, **o, **FUSED),
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "adam": lambda groups, **o: torch.optim.Adam(groups, **o, **FUSED),
    "adamw": lambda groups, **o: torch.optim.AdamW(groups, **o, **FUSED),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
}
FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "step": lambda p: 1.0 if p < 0.5 else 0.1 if p < 0.75 else 0.1 * 0.1,
    "polynomial": lambda p: (1.0 - p) ** 2,
}


def minibatches(samples: int, batch_size: int, epochs: int, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The key of each minibatch's chance, and its samples, in the order of one worker."""

    def key(epoch: int, index: int) -> int:
        return int.from_bytes(blake2b(b"%d/%d/%d" % (seed, epoch, index), digest_size=8).digest(), "little")

    for epoch in range(epochs):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(key(epoch, -1)))
        for index, numbers in enumerate(order.split(batch_size)):
            yield key(epoch, index), numbers


def sequential(
    task: Task,
    optimizer: str,
    *,
    lr: float,
    epochs: int = 1,
    batch_size: int = 4,
    seed: int = 0,
    push_every: int = 1,
    fetch_every: int = 1,
    lag: bool = False,
    local_lr: float = 0.0,
    schedule: str = "constant",
    clip_norm: float = 0.0,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """One worker and a server that is one flat parameter per (dtype, group): the server's state dict at the end.

    With `lag`, a fetch gives what the server held at the start of the step before.
    """
    torch.manual_seed(seed)
    model, data = task.model().train(), as_data(task.train())
    state = model.state_dict(keep_vars=True)
    makers = groups(model) if groups else [{"params": list(model.parameters())}]
    flats, members = [], []
    for group in makers:
        trained = [p for p in group["params"] if p.requires_grad]
        for dtype in sorted({str(p.dtype) for p in trained}):
            mine = [p for p in trained if str(p.dtype) == dtype]
            flat = torch.cat([p.detach().reshape(-1) for p in mine])
            flat = nn.Parameter(flat.float() if flat.dtype is torch.bfloat16 else flat)
            flats.append({**group, "params": [flat]})
            members.append((flat, mine))
    stepper = STEPPERS[optimizer](flats, lr=lr, **options)
    bases = [group["lr"] for group in stepper.param_groups]
    carried = {name: value.clone() for name, value in state.items() if not isinstance(value, nn.Parameter)}

    def snapshot() -> list[torch.Tensor]:
        return [flat.detach().clone() for flat, _ in members] + [value.clone() for value in carried.values()]

    def load(values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for (_, mine), value in zip(members, values, strict=False):
                for p, part in zip(mine, value.split([p.numel() for p in mine]), strict=True):
                    p.copy_(part.view(p.shape))
            for name, value in zip(carried, values[len(members) :], strict=True):
                state[name].copy_(value)

    def push() -> None:
        nonlocal accrued, waiting, applied
        for (flat, mine), gradient in zip(members, accrued, strict=True):
            flat.grad = torch.cat([g.reshape(-1) for g in gradient]).to(flat.dtype)
            assert len(gradient) == len(mine)
        for group, base in zip(stepper.param_groups, bases, strict=True):
            group["lr"] = base * FALLS[schedule](min(1.0, applied / (epochs * len(data))))
        stepper.step()
        applied += waiting
        accrued, waiting = None, 0
        for name in carried:
            carried[name] = state[name].detach().clone()

    accrued: Any = None
    waiting = applied = 0
    snapshots = []
    for step, (key, numbers) in enumerate(minibatches(len(data), batch_size, epochs, seed)):
        snapshots.append(snapshot())
        if step % fetch_every == 0:
            load(snapshots[max(0, step - 1) if lag else step])
        model.zero_grad()
        torch.manual_seed(key)
        inputs, targets = data.batch(numbers)
        task.loss(model(inputs), targets).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip_norm)
        here = [[torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in mine] for _, mine in members]
        accrued = (
            here
            if accrued is None
            else [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(accrued, here, strict=True)]
        )
        waiting += len(numbers)
        if local_lr:
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-local_lr)
        if (step + 1) % push_every == 0:
            push()
    if waiting:
        push()
    load(snapshot())
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def classes(
    model: Callable[[], nn.Module], samples: int = 22, features: int = 6, dtype: torch.dtype = torch.float32
) -> Task:
    """A task whose last minibatch of four has two samples, unless there are more of them."""

    def data(seed: int) -> TensorData:
        chance = torch.Generator().manual_seed(seed)
        return TensorData(
            torch.randn(samples, features, generator=chance).to(dtype),
            torch.randint(0, 3, (samples,), generator=chance),
        )

    return Task(model=model, train=lambda: data(7), test=lambda: data(8))


def mlp() -> nn.Module:
    """103 parameters; over four shards, one holds seven of them."""
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.2), nn.Linear(10, 3))


def calm_mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same without chance, so that its gradient on a union is the mean of those on the parts."""
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


def smooth(samples: int = 22, dtype: torch.dtype = torch.float32) -> Task:
    """The task of that model."""
    return classes(lambda: calm_mlp(dtype), samples, dtype=dtype)
