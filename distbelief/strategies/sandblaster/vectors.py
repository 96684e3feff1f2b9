"""A shard's slice with named vectors besides its parameters, and operations on them, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from distbelief.core.conversations import operations
from distbelief.core.conversations.operations import HISTORY, AnyCommand
from distbelief.core.effects import Payload
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.server.slice import PhantomSlice, Slice, TorchSlice, state_of
from distbelief.strategies.sandblaster.methods import X0, X

BLOCK = 1 << 14
"""Elements of a vector that dot products convert to float64 at once: few enough for the processor's cache."""

PARAMETERS, ACCEPTED = X, X0
"""Names of the parameters, which a line search tries, and of those where it began, which an evaluator fetches."""


class VectorSlice(Slice, Protocol):
    """Slice of a shard with named vectors; that of a phantom holds nothing."""

    def operate(self, command: AnyCommand) -> list[float]:
        """Execute a command; return its scalars."""

    def contribute(self, payload: Payload, into: str) -> None:
        """Add a work unit's gradient to a vector."""

    def keep(self, payload: Payload) -> Payload:
        """Return a copy of a work unit's gradient, to be added later."""

    def accepted(self) -> Payload:
        """Return the bytes of the moving range as evaluators see them."""

    def everything(self) -> dict[str, torch.Tensor]:
        """Return `arrays` and all vectors."""


class TorchVectorSlice(TorchSlice):
    """A slice in memory; a vector has a tensor for each run of parameters of one dtype and group, at least float32."""

    def __init__(
        self, plan: Plan, shard: int, moving: torch.Tensor | None = None, frozen: torch.Tensor | None = None
    ) -> None:
        super().__init__(plan, shard, moving, frozen)
        self._accepted = self._moving.clone()
        self._fetched = {PARAMETERS: self._moving, ACCEPTED: self._accepted}
        """Bytes of the vectors that replicas and evaluators fetch."""
        self._named: dict[str, list[torch.Tensor]] = {
            PARAMETERS: [piece.parameter for piece in self._trained if piece.parameter is not None]
        }
        self._named[ACCEPTED] = [
            torch.zeros_like(x) if piece.master else piece.typed(self._accepted)
            for piece, x in zip(self._trained, self._named[PARAMETERS], strict=True)
        ]

    def fill(self, payload: Payload, frozen: bool) -> None:
        super().fill(payload, frozen)
        self._accept()

    def _accept(self) -> None:
        self._accepted.copy_(self._moving)
        for accepted, x in zip(self._named[ACCEPTED], self._named[PARAMETERS], strict=True):
            accepted.copy_(x)

    def vector(self, name: str, create: bool = False) -> list[torch.Tensor]:
        """Return the tensors of a vector.

        A vector that is not here is made, as zeros, with `create`. Without it, the name is refused.
        """
        tensors = self._named.get(name)
        if tensors is None:
            if not create:
                raise RemoteProtocolError(
                    f"there is no vector {name!r} here; there are {', '.join(sorted(self._named))}"
                )
            tensors = self._named[name] = [torch.zeros_like(x) for x in self._named[PARAMETERS]]
        return tensors

    @torch.no_grad()
    def operate(self, command: AnyCommand) -> list[float]:
        match command:
            case operations.Dots():
                return self._dots(command.pairs)
            case operations.AbsoluteNorms():
                return [self._norm(command.kind, name) for name in command.of]
            case operations.Gather():
                for name in command.into:
                    self._each(name, torch.Tensor.zero_)
                return []
            case operations.Zero():
                self._each(command.into, torch.Tensor.zero_)
            case operations.Copy():
                self._each(command.into, torch.Tensor.copy_, command.of)
            case operations.Scale():
                self._each(command.into, lambda into: into.mul_(command.by))
            case operations.Add():
                self._each(command.into, lambda into, of: into.add_(of, alpha=command.by), command.of)
            case operations.Combine():
                self._combine(command)
        self._publish(command.into)
        return []

    def _each(self, into: str, operation: Callable[..., object], *of: str) -> None:
        """Apply an operation to each tensor of a vector, with those of other vectors."""
        for tensors in zip(self.vector(into, create=True), *map(self.vector, of), strict=True):
            operation(*tensors)

    def _combine(self, command: operations.Combine) -> None:
        terms = [(factor, self.vector(name)) for factor, name in command.terms]
        for i, into in enumerate(self.vector(command.into, create=True)):
            # the target's own term comes first, in place: the other terms overwrite the target
            kept = sum(factor for factor, tensors in terms if tensors[i] is into)
            into.mul_(kept) if kept else into.zero_()
            for factor, tensors in terms:
                if tensors[i] is not into:
                    into.add_(tensors[i], alpha=factor)

    def _dots(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Multiply in float64, block by block. Each product is computed alone, so its bits depend on no other."""
        names = sorted({name for pair in pairs for name in pair})
        rows = dict(zip(names, torch.empty(len(names), BLOCK, dtype=torch.float64), strict=True))
        sums = [0.0] * len(pairs)
        for i, x in enumerate(self._named[PARAMETERS]):
            for start in range(0, x.numel(), BLOCK):
                size = min(BLOCK, x.numel() - start)
                part = {
                    name: row[:size].copy_(self.vector(name)[i].view(-1)[start : start + size])
                    for name, row in rows.items()
                }
                for number, (left, right) in enumerate(pairs):
                    sums[number] += torch.dot(part[left], part[right]).item()
        return sums

    def _norm(self, kind: str, name: str) -> float:
        tensors = [t for t in self.vector(name) if t.numel()]
        if kind == "max":
            return max((float(t.abs().max()) for t in tensors), default=0.0)
        return sum(float(t.abs().sum(dtype=torch.float64)) for t in tensors)

    def _publish(self, name: str) -> None:
        """Copy a vector's master values to its parameters of low precision, if others fetch that vector."""
        if (room := self._fetched.get(name)) is not None:
            for piece, value in zip(self._trained, self._named[name], strict=True):
                if piece.master:
                    piece.typed(room).copy_(value)

    @torch.no_grad()
    def contribute(self, payload: Payload, into: str) -> None:
        assert isinstance(payload, torch.Tensor)
        for target, piece in zip(self.vector(into), self._trained, strict=True):
            target.add_(piece.typed(payload))

    def keep(self, payload: Payload) -> Payload:
        assert isinstance(payload, torch.Tensor)
        return payload.clone()

    def accepted(self) -> Payload:
        """Return the bytes of the moving range as they were when the line search began."""
        return self._accepted

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the arrays of every slice, and `state.<section>.history.<name>` for the history's vectors."""
        return super().arrays() | self._vectors(name for name in self._named if name.startswith(HISTORY))

    def everything(self) -> dict[str, torch.Tensor]:
        """Return `arrays` and `state.<section>.<name>` for all other vectors, the accepted parameters included."""
        return super().arrays() | self._vectors(name for name in self._named if name != PARAMETERS)

    def _vectors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {
            f"state.{piece.number}.{name}": tensor
            for name in names
            for piece, tensor in zip(self._trained, self._named[name], strict=True)
        }

    def load(self, arrays: dict[str, torch.Tensor]) -> None:
        super().load({name: value for name, value in arrays.items() if name.partition(".")[0] != "state"})
        self._accept()
        for i, piece in enumerate(self._trained):
            for name, value in state_of(piece.number, arrays).items():
                self.vector(name, create=True)[i].copy_(value)
        self._publish(ACCEPTED)


class PhantomVectorSlice(PhantomSlice):
    """A slice that holds nothing; its scalars are constant, so that a descent never ends."""

    def operate(self, command: AnyCommand) -> list[float]:
        return [1.0] * len(operations.scalars(command))

    def contribute(self, payload: Payload, into: str) -> None:
        """Do nothing."""

    def keep(self, payload: Payload) -> Payload:
        return payload

    def accepted(self) -> Payload:
        return self.moving()

    def everything(self) -> dict[str, torch.Tensor]:
        return {}
