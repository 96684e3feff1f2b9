"""Who may take part: the first replica settles the model, the data and the batch size of the job, and every other must
have them.
"""

from __future__ import annotations

from distbelief.core.conversations.membership import Join
from distbelief.core.records import Started
from distbelief.core.settings import DataSettings, Holder, Plan, Settings
from distbelief.errors import UsageError
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import check_same


def plan(settings: Settings, event: Join) -> Plan:
    """The plan of a job, by what its first replica has; which shard holds what follows from that, and is refused here
    where it cannot be.

    Raises:
        UsageError: no data, or none that is dealt, or two numbers of epochs; LayoutError: it cannot be cut into as many
            shards.
    """
    if event.samples < 1:
        raise UsageError("the training set is empty: there is nothing to train on")
    if event.batch_size:
        settings = settings.with_batch_size(event.batch_size)
    if event.epochs:
        if settings.data.epochs not in (DataSettings().epochs, event.epochs):
            raise UsageError(
                f"--epochs {settings.data.epochs}: the script goes through replica.epochs({event.epochs}); leave one "
                "of them off"
            )
        settings = settings.with_epochs(event.epochs)
    left_out = event.samples % settings.data.batch_size if settings.data.drop_last else 0
    if left_out == event.samples:
        raise UsageError(
            f"--drop-last: all of the {left_out} training samples are less than one minibatch of "
            f"{settings.data.batch_size}: lower --batch-size"
        )
    parts = settings.shards if settings.strategy.held_by is Holder.SHARDS else settings.partitions
    return Plan(
        settings,
        event.layout,
        cut(event.layout, settings.mesh, parts),
        event.samples - left_out,
        left_out,
    )


def started(plan: Plan, samples: int, done: int) -> Started:
    """What is written down as a job begins, with so many samples and epochs (or iterations) done before."""
    s = plan.settings
    return Started(
        s.replicas,
        s.shards if s.strategy.held_by is Holder.SHARDS else 0,
        plan.layout.parameters,
        plan.samples,
        s.data.batch_size,
        s.data.epochs,
        samples,
        done,
        s.strategy.unit,
    )


def check(plan: Plan, who: str, event: Join) -> None:
    """Refuse a replica that does not fit a plan.

    Raises:
        LayoutError: its model differs.
        UsageError: it has other data, or asks for other batches or epochs.
    """
    check_same(plan.layout, event.layout, who)
    if event.samples != (samples := plan.samples + plan.left_out):
        raise UsageError(
            f"{who} has {event.samples} training samples, the job has {samples}: give every replica the same data"
        )
    if event.epochs not in (0, plan.settings.data.epochs):
        raise UsageError(
            f"{who} goes through replica.epochs({event.epochs}), the job through {plan.settings.data.epochs}: it is "
            "one number for all"
        )
    if event.batch_size not in (0, plan.settings.data.batch_size):
        raise UsageError(
            f"{who} asks for batches of {event.batch_size}, the job has {plan.settings.data.batch_size}: it is one for "
            "all"
        )
