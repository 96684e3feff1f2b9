"""Players of batch methods, and the models that these can train."""

from __future__ import annotations

from functools import partial

from torch import nn

from distbelief.coordination.coordinator import Coordinator
from distbelief.coordination.shard_holders import ShardHolders
from distbelief.core.portions import StartingPoint
from distbelief.core.protocol import BATCHED
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.runtime.player import PlayedRole
from distbelief.server.shard import Shard
from distbelief.server.standby import Standby
from distbelief.strategies.context import Context
from distbelief.strategies.players import Players, Servers, served
from distbelief.strategies.sandblaster.batch_work import BatchWork
from distbelief.strategies.sandblaster.replica import WorkUnitTraining
from distbelief.strategies.sandblaster.shard import WorkUnitSums
from distbelief.strategies.sandblaster.vectors import PhantomVectorSlice, TorchVectorSlice


def coordinator(settings: Settings, evaluator: bool, start: StartingPoint) -> Coordinator:
    """Return a coordinator whose shards hold the parameters, and which deals the work units of batches."""
    return Coordinator(settings, evaluator, start, ShardHolders(), BatchWork(), BATCHED)


def replica(context: Context) -> PlayedRole:
    """Return a replica that computes work units."""
    return served(context, WorkUnitTraining)


def check_model(settings: Settings, model: nn.Module) -> None:
    """Refuse a model whose loss on a batch is not the sum over its portions."""
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise UsageError(
                f"{type(part).__name__} {name!r}: with it the loss of a batch is not the sum over its portions, and "
                f"changes with each evaluation; strategy {settings.strategy.name} needs a model without batch norm, "
                "such as one with group norm or layer norm"
            )


PLAYERS = Players(
    coordinator,
    (),
    replica,
    servers=Servers(
        partial(Shard, sums=WorkUnitSums), partial(Standby, sums=WorkUnitSums), TorchVectorSlice, PhantomVectorSlice
    ),
    check_model=check_model,
)
