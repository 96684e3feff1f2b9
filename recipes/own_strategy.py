"""A strategy of your own: asynchronous elastic averaging (EASGD; Zhang, Choromanska and LeCun 2015, Algorithm 1).

Each replica trains parameters of its own by plain SGD. Every few steps it moves towards a centre that the shards hold,
and the centre moves towards it. Replicas may differ more than under Downpour, and communicate less.

In the folder of this file:

distbelief train mnist own_strategy:Elastic --replicas 2 --epochs 5
distbelief simulate mnist own_strategy:Elastic --replicas 16 --faults crash=shard0@500
python own_strategy.py

The last command checks what every strategy must do: survive deaths, lose no sample, have no dead option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Pushing, Settings
from distbelief.errors import UsageError
from distbelief.replica.downpour import DownpourTraining
from distbelief.replica.served_replica import ServedReplica
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.sharding.layout import Range
from distbelief.strategies.base import Served
from distbelief.strategies.context import Context
from distbelief.strategies.parameter_server.players import PLAYERS
from distbelief.strategies.players import Players
from distbelief.tasks.flat import FlatModule


@dataclass(frozen=True)
class Elastic(Served):
    """Replicas train by themselves; they and a centre that the shards hold are drawn to each other."""

    name: ClassVar[str] = "elastic"
    meaningless: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("lr_schedule", "lr_steps", "lr_gamma", "lr_power", "warmup", "warmup_epochs"), "replicas step by --step"
    )

    period: int = 10
    """Steps between two meetings of a replica with the centre (the paper's tau)."""
    beta: float = 0.9
    """Fraction of the way that the centre would move if all replicas met it at once; each moves it by beta / replicas
    (alpha)."""
    step: float = 0.05
    """Learning rate of the replicas' own SGD (eta)."""

    @property
    def optimizer(self) -> Optimizer:
        """Return plain SGD of rate 1: each push moves the centre by its value."""
        return Optimizer("sgd", 1.0)

    @property
    def pushing(self) -> Pushing:
        """Fetch the centre, and push its movement, once a period."""
        return Pushing(push_every=self.period, fetch_every=self.period)

    def check(self, settings: Settings) -> None:
        """Refuse impossible values, naming the option and the value."""
        if self.period < 1:
            raise UsageError(f"--period {self.period}: must be 1 or more")
        if not 0 < self.beta <= 1:
            raise UsageError(f"--beta {self.beta}: must be more than 0, and at most 1")
        if not 0 < self.step < float("inf"):
            raise UsageError(f"--step {self.step}: must be more than 0")

    @classmethod
    def players(cls) -> Players:
        """Return the players of a parameter server, with another replica."""
        return ELASTIC


class ElasticVectors:
    """Vectors of a replica that keeps its own parameters, besides those of the centre that it fetches."""

    def __init__(self, flat: FlatModule, alpha: float, step: float) -> None:
        self._flat, self._alpha, self._step = flat, alpha, step
        self.layout, self.initial = flat.layout, flat.initial
        self.outgoing, self.covered, self.carry_buffers = flat.outgoing, flat.covered, flat.carry_buffers
        self.norm, self.free, self.change, self.mix = flat.norm, flat.free, flat.change, flat.mix

    def bind(self, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Bind the vectors: pushes leave from `gradients`, and the centre arrives in `parameters`."""
        self._own, self._centre = torch.zeros_like(parameters[0]), parameters[0]
        self._flat.bind(gradients, [self._own])
        self._begun = False

    def swap(self, landing: int, parts: Sequence[Range] = ()) -> None:
        """Begin at the first centre that has arrived; from then on keep the replica's own parameters."""
        if not self._begun:
            self._own.copy_(self._centre)
            self._flat.swap(0)
            self._begun = True

    def accrue(self, slot: int, first: bool, weight: float = 1.0, model: int = 0) -> None:
        """Set x to x - alpha (x - centre) once a period, then to x - step g(x), with the gradient from before both."""
        if first:
            centre, pushed = self._flat.trained_in(self._centre), self._flat.gradients(slot)
            with torch.no_grad():
                for own, there, gradient in zip(self._flat.trained, centre, pushed, strict=True):
                    torch.sub(there.to(own.device), own, out=gradient).mul_(self._alpha)
                    own.add_(gradient)  # the shard subtracts the push: the centre moves the other way by as much
        self._flat.descend(self._step)

    def descend(self, rate: float, clipping: float = 1.0) -> None:
        """Do nothing: `accrue` has stepped."""


def replica(context: Context) -> PlayedRole:
    """Return a replica's part: Downpour's story, on vectors of its own."""
    if context.flat is None:  # a phantom has no values
        return PLAYERS.replica(context)
    own = context.settings.own(Elastic)
    vectors = ElasticVectors(context.flat, own.beta / context.settings.replicas, own.step)
    role, samples = context.role, context.samples
    story = ServedReplica(DownpourTraining, role, vectors, samples, context.incarnation, loop=context.loop)
    worker = Worker(
        lambda _, arena: vectors.bind(arena.gradients, arena.parameters),
        context.computes(context.settings.clip_norm),
    )
    return PlayedRole(story, worker)


ELASTIC = Players(PLAYERS.coordinator, PLAYERS.state, replica, servers=PLAYERS.servers)


def sequential(task: Any, options: Any, epochs: int, batch_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Run the paper's Algorithm 1 on one worker, in plain PyTorch; return the final centre."""
    from distbelief.tasks.order import Order

    torch.manual_seed(seed)
    model, data = task.model(), task.train()
    order, alpha = Order(len(data), batch_size, seed), options.beta / options.replicas
    own = list(model.parameters())
    centre = [parameter.detach().clone() for parameter in own]
    for number in range(epochs * order.batches):
        inputs, targets = data.batch(order.indices(*divmod(number, order.batches)))
        gradients = torch.autograd.grad(task.loss(model(inputs), targets), own)
        with torch.no_grad():
            for x, centre_x, gradient in zip(own, centre, gradients, strict=True):
                if number % options.period == 0:
                    difference = alpha * (x - centre_x)
                    x -= difference
                    centre_x += difference
                x -= options.step * gradient
    return dict(zip(dict(model.named_parameters()), centre, strict=True))


if __name__ == "__main__":
    from distbelief.testing import Knob, check_strategy

    check_strategy(Elastic(), sequential, {"period": Knob(3), "beta": Knob(0.5), "step": Knob(0.1), "shards": Knob(1)})
    print("elastic averaging holds what a strategy must")
