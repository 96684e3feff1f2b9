"""LARS (You et al. 2017) and LAMB (You et al. 2020), which torch lacks: each layer steps as its own norm allows.

A layer may be cut across shards or partitions, so a step has two halves. `squares` returns the squared norms of the
parts that are here, in float64, and changes nothing; `finish` takes those of the whole layers. The rate is not folded
into the momentum, which therefore needs no correction when the rate changes (Goyal et al. 2017, remark 2). The paper's
LARS folds it in, and so does this one with `correction` off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distbelief.core.conversations.agreement import Squares
from distbelief.core.norms import layers_in
from distbelief.sharding.layout import ITEM_SIZES, Layout, Range, Section

Group = dict[str, Any]


class Layerwise(torch.optim.Optimizer, ABC):
    """An optimizer whose step of each layer is scaled by a trust ratio; a parameter is a layer, unless it is `cut`."""

    # No state changes before `finish`: if a death delays the norms, the step begins again from unchanged moments.
    def __init__(self, params: ParamsT, defaults: Group) -> None:
        for name, value in defaults.items():
            if name != "betas" and not 0 <= float(value) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, and finite")
        super().__init__(params, defaults)
        self._parts: dict[Tensor, list[tuple[int, bool]]] = {}
        """Parts of layers in each parameter: their elements, and whether their layers have several dimensions."""
        self._moves: dict[Tensor, Tensor] = {}
        """Move of each parameter in the present step."""
        for group in self.param_groups:
            for p in group["params"]:
                self._parts[p] = [(p.numel(), p.ndim > 1)]

    def cut(self, parameter: Tensor, parts: Sequence[tuple[int, bool]]) -> None:
        """Cut a flat parameter into parts of layers: elements, and whether the layer has several dimensions."""
        self._parts[parameter] = list(parts)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's optimizers also take a closure
        """Make both halves of a step of whole layers."""
        self.finish(self.squares())

    @torch.no_grad()
    def squares(self) -> Tensor:
        """Return the squared norms of each part's weights and moves: float64, shape (parts, 2)."""
        rows = []
        self._moves = {}
        for group, p in self._due():
            move = self._moves[p] = self._move(group, p)
            rows += [torch.stack([_square(w), _square(m)]) for w, m, _ in self._split(p, move)]
        return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)

    @torch.no_grad()
    def finish(self, squares: Tensor) -> None:
        """Step, with the squared norms of whole layers."""
        norms = iter(squares.sqrt().tolist())
        for group, p in self._due():
            move = self._scaled(group, p, self._moves[p])
            for _, part, wide in self._split(p, move):
                weights, moves = next(norms)
                if weights and moves and (wide or not group["exempt"]):
                    part.mul_(self._ratio(group, weights, moves))
            self._descend(group, p, move)
        self._moves = {}

    def _due(self) -> Iterator[tuple[Group, Tensor]]:
        return ((group, p) for group in self.param_groups for p in group["params"] if p.grad is not None)

    def _split(self, p: Tensor, move: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        parts = self._parts[p]
        if len(parts) == 1:
            return iter([(p, move, parts[0][1])])
        sizes = [size for size, _ in parts]
        return zip(p.split(sizes), move.split(sizes), (wide for _, wide in parts), strict=True)

    @abstractmethod
    def _move(self, group: Group, p: Tensor) -> Tensor:
        """Return a parameter's move, whose norm is taken."""

    def _scaled(self, group: Group, p: Tensor, move: Tensor) -> Tensor:
        """Return the move that the trust ratio scales in place."""
        return move

    @abstractmethod
    def _ratio(self, group: Group, weights: float, moves: float) -> float:
        """Return the trust ratio of a layer with these norms, both above 0."""

    @abstractmethod
    def _descend(self, group: Group, p: Tensor, move: Tensor) -> None:
        """Step a parameter by its scaled move."""


class LARS(Layerwise):
    """`v = momentum v + ratio (g + decay w); w -= lr v`, where the ratio of a layer is `trust |w| / (|g| + decay |w|)`,
    or 1 where a norm is 0.

    Args:
        lr: the rate, far greater than that of SGD, since the ratio makes it relative to the weights.
        momentum: of `v`.
        weight_decay: of the weights, also in the ratio.
        trust: the coefficient of the ratio.
        exempt: keep biases and the scales of normalisations, of fewer than two dimensions, at a ratio of 1.
        correction: off, `v = momentum v + lr ratio (g + decay w); w -= v` as in the paper: the same until the rate
            changes.

    >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]])); w.grad = torch.tensor([[0.0, 2.0]])
    >>> LARS([w], lr=1.0, trust=0.1, momentum=0.0).step(); w.data
    tensor([[3.0000, 3.5000]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        exempt: bool = False,
        correction: bool = True,
    ) -> None:
        ratio = {"trust": trust, "exempt": exempt, "correction": correction}
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **ratio})

    def _move(self, group: Group, p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad

    def _scaled(self, group: Group, p: Tensor, move: Tensor) -> Tensor:
        return torch.add(move, p, alpha=group["weight_decay"])

    def _ratio(self, group: Group, weights: float, moves: float) -> float:
        return float(group["trust"] * weights / (moves + group["weight_decay"] * weights))

    def _descend(self, group: Group, p: Tensor, move: Tensor) -> None:
        state, lr = self.state[p], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        folded, velocity = not group["correction"], state["momentum_buffer"]
        velocity.mul_(group["momentum"]).add_(move, alpha=lr if folded else 1.0)
        p.add_(velocity, alpha=-1.0 if folded else -lr)


class LAMB(Layerwise):
    """`w -= lr ratio (r + decay w)`, where `r` is Adam's step and the ratio of a layer is `|w| / |r + decay w|`, or 1
    where a norm is 0.

    Args:
        lr: the rate: the length of a layer's step, as a share of its norm.
        betas: of Adam's two averages, with bias correction.
        eps: added to the root of the second average.
        weight_decay: of the weights.
        exempt: keep biases and the scales of normalisations, of fewer than two dimensions, at a ratio of 1.

    >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]])); w.grad = torch.tensor([[2.0, 2.0]])
    >>> LAMB([w], lr=0.1).step(); w.data
    tensor([[2.6464, 3.6464]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.002,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        exempt: bool = False,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas) or len(betas) != 2:
            raise ValueError("betas must be two numbers from 0 up to, not including, 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "exempt": exempt})

    def _move(self, group: Group, p: Tensor) -> Tensor:
        assert p.grad is not None
        state, (first, second) = self.state[p], group["betas"]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        steps = float(state["step"]) + 1
        # Adam's step with its next moments, which are stored in `_descend`
        square = (state["exp_avg_sq"] * second).addcmul_(p.grad, p.grad, value=1 - second)
        square.div_(1 - second**steps).sqrt_().add_(group["eps"])
        adam = torch.lerp(state["exp_avg"], p.grad, 1 - first).div_(1 - first**steps).div_(square)
        return adam.add_(p, alpha=group["weight_decay"])

    def _ratio(self, group: Group, weights: float, moves: float) -> float:
        return weights / moves

    def _descend(self, group: Group, p: Tensor, move: Tensor) -> None:
        assert p.grad is not None
        state, (first, second) = self.state[p], group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
        p.add_(move, alpha=-group["lr"])


def _square(part: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.float64)
    return norm.square()


# A step calls the optimizer twice: `squares` returns the norms of the parts held here, and those of cut layers go to
# the other shards; `step` replaces them by the norms of whole layers, and finishes. Without cut layers `step` does
# both.
class Layers:
    """Layers in one slice; other shards may hold parts of them.

    `pieces` has the trained part of each section, with its parameter in the optimizer.
    """

    def __init__(self, optimizer: Layerwise, layout: Layout, pieces: Sequence[tuple[Section, torch.Tensor]]) -> None:
        self._optimizer = optimizer
        self._squares: torch.Tensor | None = None
        """Squared norms of the present step."""
        self._rows: dict[int, int] = {}
        """Row of each cut layer in these."""
        row = 0
        for section, parameter in pieces:
            parts = []
            for number, part in layers_in(layout, Range(section.start, section.stop)):
                layer = layout.entries[number].tensor
                parts.append((part.size // ITEM_SIZES[section.dtype], len(layer.shape) > 1))
                if part.size < layer.size:
                    self._rows[number] = row
                row += 1
            optimizer.cut(parameter, parts)

    def squares(self) -> Squares:
        """Return the squared norms of the parts that are here of cut layers."""
        self._squares = self._optimizer.squares()
        rows = self._squares.tolist()  # all norms at once, since they may be on a device
        return tuple((number, *rows[row]) for number, row in self._rows.items())

    def step(self, norms: Squares) -> None:
        """Step, with the squared norms of cut layers."""
        squares = self._optimizer.squares() if self._squares is None else self._squares
        self._squares = None
        for number, *both in norms:
            if number in self._rows:
                squares[self._rows[number]] = torch.tensor(both, dtype=squares.dtype)
        self._optimizer.finish(squares)
