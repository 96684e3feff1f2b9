"""Twins of shards, stepped by plain `torch.optim` with every push that a shard is handed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from distbelief.core import roles
from distbelief.core.conversations import initialising, membership, pushing
from distbelief.core.messages import Message
from distbelief.core.settings import Plan
from distbelief.server.layerwise import Group
from distbelief.sharding.layout import Range
from distbelief.transport.virtual import VirtualNetwork

MakeOptimizer = Callable[[list[Group]], torch.optim.Optimizer]


class _Piece(NamedTuple):
    bytes: slice
    dtype: torch.dtype
    parameter: torch.nn.Parameter | None


class _Part:
    """What moves of one model at a shard, stepped by plain `torch.optim`."""

    def __init__(self, plan: Plan, own: Range, values: torch.Tensor, optimizer: MakeOptimizer) -> None:
        self.values = values
        self.pieces: list[_Piece] = []
        groups = []
        for section in plan.layout.sections_in(own):
            where, dtype = slice(section.start - own.start, section.stop - own.start), getattr(torch, section.dtype)
            parameter = None
            if section.kind == "parameter":
                parameter = torch.nn.Parameter(self.values[where].view(dtype).clone().to(_stepped(dtype)))
                groups.append({"params": [parameter], **plan.layout.stepped(section.group)})
            self.pieces.append(_Piece(where, dtype, parameter))
        self.optimizer = optimizer(groups) if groups else None

    def step(self, payload: torch.Tensor) -> None:
        for piece in self.pieces:
            if piece.parameter is not None:
                piece.parameter.grad = payload[piece.bytes].clone().view(piece.dtype).to(piece.parameter.dtype)
        if self.optimizer is not None:
            self.optimizer.step()
        for piece in self.pieces:
            here = self.values[piece.bytes]
            if piece.parameter is None:
                here.copy_(payload[piece.bytes])
            else:
                here.view(piece.dtype).copy_(piece.parameter.detach())


class _Twin:
    """A shard's moving range, of which each model is stepped by itself."""

    def __init__(self, plan: Plan, shard: int, values: torch.Tensor, optimizer: MakeOptimizer) -> None:
        self.values, self.start = values.clone(), plan.assignments[shard].moving.start
        self.parts = {part: _Part(plan, part, self._of(part), optimizer) for part in plan.parts(shard)}
        self.history = [self.values.clone()]

    def _of(self, part: Range) -> torch.Tensor:
        return self.values[part.start - self.start : part.stop - self.start] if part.size else self.values[:0]

    def step(self, part: Range, payload: torch.Tensor) -> None:
        self.parts[part].step(payload)
        self.history.append(self.values.clone())


def _stepped(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class Replay:
    """Applies every push that a shard is handed to a twin of it, and holds against the twin all that the shard answers,
    bit for bit.

    Beside that, a push must still hold when it is read what it held when it was sent.

    Args:
        network: whose arenas it reads.
        optimizer: makes the twin's optimizer from parameter groups, as `torch.optim` classes do; a constant learning
            rate.
    """

    def __init__(self, network: VirtualNetwork, optimizer: MakeOptimizer) -> None:
        self.twins: dict[str, _Twin] = {}
        self._network, self._optimizer = network, optimizer
        self._plan: Plan | None = None
        self._sent: dict[tuple[str, str, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._initial: dict[tuple[str, str, int], torch.Tensor] = {}

    def sent(self, sender: str, to: str, message: Message) -> None:
        """Note the plan, and what a push holds."""
        if isinstance(message, membership.Welcome):
            self._plan = message.plan
        elif isinstance(message, initialising.Initialise):
            self._initial[sender, to, message.start] = self._payload(sender, message)
        elif isinstance(message, pushing.Push):
            payload = self._payload(sender, message)
            self._sent[sender, to, message.incarnation, message.clock] = payload, payload.clone()

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """Step the twin with a push, and compare what was fetched."""
        match message:
            case initialising.Initialise():
                own = self._own(to)
                if to not in self.twins and (message.start, message.stop) == (own.start, own.stop):
                    assert self._plan is not None
                    index, values = roles.index_of(to), self._initial[sender, to, message.start]
                    self.twins[to] = _Twin(self._plan, index, values, self._optimizer)
            case pushing.Push():
                payload, was = self._sent.pop((sender, to, message.incarnation, message.clock))
                assert torch.equal(payload, was), f"push {message.clock} of {sender} was overwritten"
                self.twins[to].step(Range(message.start, message.stop), payload)
            case pushing.Fetched():
                own = self._own(sender)
                if own.start <= message.start < message.stop <= own.stop:
                    here = self._network.endpoints[to].arena.parameters[message.slot][message.start : message.stop]
                    expected = self.twins[sender].history[message.version.updates]
                    expected = expected[message.start - own.start : message.stop - own.start]
                    assert torch.equal(here, expected), f"{to} fetched from {sender} what is not its {message.version}"

    def _own(self, shard: str) -> Range:
        return self._plan.assignments[roles.index_of(shard)].moving

    def _payload(self, sender: str, message: pushing.Push | initialising.Initialise) -> torch.Tensor:
        return self._network.endpoints[sender].arena.gradients[message.slot][message.start : message.stop]
