"""Loops of plain PyTorch that do only the necessary work of a step on each path, without code of ours.

Each is a generator, which yields a step's samples after each step of SGD. A vector is all parameters of a model, one
after the other, in memory that the processes share.
"""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

Loop = Iterator[int]
WORDS = 4096
"""Bytes of the shared integers, which precede the vectors."""


class Shared(NamedTuple):
    """Memory that one of several processes shares with the others."""

    file: int
    """Descriptor of the memory."""
    numbers: memoryview
    vectors: torch.Tensor
    rank: int
    ranks: int


def room(model: nn.Module, vectors: int) -> int:
    """Return the bytes of memory for some vectors."""
    return WORDS + vectors * 4 * sum(parameter.numel() for parameter in model.parameters())


def share(file: int, mapping: memoryview, model: nn.Module, rank: int, ranks: int) -> Shared:
    """Map the numbers and vectors in the memory."""
    length = sum(parameter.numel() for parameter in model.parameters())
    vectors = torch.frombuffer(mapping, dtype=torch.float32, offset=WORDS).view(-1, length)
    return Shared(file, mapping[:WORDS].cast("q"), vectors, rank, ranks)


def gradients(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    batch: Callable[[torch.Tensor], tuple[Any, Any]],
    samples: int,
    size: int,
) -> Loop:
    """Compute the gradient of one minibatch after another."""
    while True:
        for numbers in torch.randperm(samples).split(size):
            inputs, targets = batch(numbers)
            model.zero_grad()
            loss(model(inputs), targets).backward()
            yield len(numbers)


def views(model: nn.Module, vector: torch.Tensor) -> list[torch.Tensor]:
    """Cut a vector into parameters."""
    parts = vector.split([parameter.numel() for parameter in model.parameters()])
    return [part.view_as(parameter) for part, parameter in zip(parts, model.parameters(), strict=True)]


def live_in(model: nn.Module, vector: torch.Tensor, begins: bool = True) -> None:
    """Put a model's parameters into a vector; the first process copies its values there."""
    for parameter, part in zip(model.parameters(), views(model, vector), strict=True):
        if begins:
            part.copy_(parameter.data)
        parameter.data = part


def independent(model: nn.Module, steps: Loop, lr: float, _: Shared) -> Loop:
    """Step alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr, fused=True)
    for samples in steps:
        optimizer.step()
        yield samples


def lockstep(model: nn.Module, steps: Loop, lr: float, shared: Shared) -> Loop:
    """Step in lockstep, to measure the cost of waiting: no process begins a step before all have ended the last."""
    for samples in independent(model, steps, lr, shared):
        _meet(shared)
        yield samples


def hogwild(model: nn.Module, steps: Loop, lr: float, shared: Shared) -> Loop:
    """Step shared parameters without a lock."""
    live_in(model, shared.vectors[0])
    return independent(model, steps, lr, shared)


def two_buffers(model: nn.Module, steps: Loop, lr: float, shared: Shared) -> Loop:
    """Write each update of the newest parameters into a buffer of one's own, and mark it as newest with one store.

    Each process has two buffers: others may read the newest while this process writes its next.
    """
    parameters, numbers = [*model.parameters()], shared.numbers
    buffers = [views(model, vector) for vector in shared.vectors]
    live_in(model, shared.vectors[2 * shared.rank])
    _meet(shared)
    for samples in steps:
        fcntl.lockf(shared.file, fcntl.LOCK_EX, 1)
        now = numbers[shared.ranks]
        to = 2 * shared.rank + (now == 2 * shared.rank)
        for parameter, before, after in zip(parameters, buffers[now], buffers[to], strict=True):
            torch.add(before, parameter.grad, alpha=-lr, out=after)  # type: ignore[arg-type]  # after backward
        numbers[shared.ranks] = to
        fcntl.lockf(shared.file, fcntl.LOCK_UN, 1)
        for parameter, part in zip(parameters, buffers[to], strict=True):
            parameter.data = part
        yield samples


def served(model: nn.Module, steps: Loop, shared: Shared, bell: int, landing: int) -> Loop:
    """Leave each gradient in a slot, notify the server by a stream, and continue when it has answered.

    The shared vectors are a slot for each process, the server's parameters, and space for each process's parameters.
    """
    parameters, slot = [*model.parameters()], views(model, shared.vectors[shared.rank])
    live_in(model, shared.vectors[landing], begins=False)
    for samples in steps:
        for part, parameter in zip(slot, parameters, strict=True):
            part.copy_(parameter.grad)  # type: ignore[arg-type]  # there is one after backward
        os.write(bell, b"!")
        os.read(bell, 1)
        yield samples


def serve(vectors: torch.Tensor, bells: Sequence[int], lr: float, rounds: bool) -> None:
    """Apply gradients that lie in slots until a stream ends: each as it comes, or in rounds all at once.

    In rounds the processes compute on the server's parameters; otherwise the parameters are copied to theirs.
    """
    ranks, epoll, waiting = len(bells), select.epoll(), set[int]()
    ranked = {bell: rank for rank, bell in enumerate(bells)}
    for bell in bells:
        epoll.register(bell, select.EPOLLIN)
    newest = vectors[ranks]
    while True:
        for bell, _ in epoll.poll():
            if not os.read(bell, 1):
                return
            waiting.add(bell)
            if rounds and len(waiting) < ranks:
                continue
            for one in waiting:
                newest.add_(vectors[ranked[one]], alpha=-lr / len(waiting))
            for one in waiting:
                if not rounds:
                    vectors[ranks + 1 + ranked[one]].copy_(newest)
                os.write(one, b"!")
            waiting.clear()


def all_reduce(model: nn.Module, steps: Loop, lr: float, shared: Shared) -> Loop:
    """Add up one part of all gradients in each process, and step with the whole sum."""
    parameters, slot = [*model.parameters()], views(model, shared.vectors[shared.rank])
    total, sums = shared.vectors[shared.ranks], views(model, shared.vectors[shared.ranks])
    parts = [vector.chunk(shared.ranks)[shared.rank] for vector in shared.vectors[: shared.ranks]]
    own = total.chunk(shared.ranks)[shared.rank]
    for samples in steps:
        for part, parameter in zip(slot, parameters, strict=True):
            part.copy_(parameter.grad)  # type: ignore[arg-type]  # there is one after backward
        _meet(shared)
        torch.add(parts[0], parts[1], out=own)
        for more in parts[2:]:
            own.add_(more)
        _meet(shared)
        for parameter, summed in zip(parameters, sums, strict=True):
            parameter.data.add_(summed, alpha=-lr / shared.ranks)
        yield samples


def _meet(shared: Shared) -> None:
    """Wait until all processes have reached this point."""
    numbers, ranks = shared.numbers, shared.ranks
    numbers[shared.rank] += 1
    while min(numbers[:ranks]) < numbers[shared.rank]:
        os.sched_yield()
