"""Admission: the first replica settles the model, the data and the batch size of the job, and every other must have
them.
"""

from __future__ import annotations

import dataclasses

from distbelief.core import roles
from distbelief.core.conversations.membership import Join
from distbelief.core.optimizer import Optimizer
from distbelief.core.portions import STREAM
from distbelief.core.records import Started
from distbelief.core.settings import SEQUENTIAL, Accruing, Holder, Plan, Pushing, Settings, option
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
    # Where a user's own loop names the batch size, the order, the epochs or the optimizers, that counts for the job.
    # Two different numbers of epochs, or two optimizers, are refused: neither may win silently.
    if event.batch_size:
        settings = dataclasses.replace(settings, batch_size=event.batch_size)
    if event.order:
        settings = dataclasses.replace(settings, order=event.order)
    stream = event.samples == STREAM
    settings.check_allotted(stream)
    if event.epochs:
        if settings.epochs not in (Settings.epochs, event.epochs):
            raise UsageError(
                f"--epochs {settings.epochs}: the script goes through replica.epochs({event.epochs}); leave one "
                "of them off"
            )
        settings = dataclasses.replace(settings, epochs=event.epochs)
    if event.optimizers and settings.optimizer != Optimizer():
        raise UsageError(
            f"--optimizer {settings.optimizer.name} --lr {settings.optimizer.lr:g}: the script names the optimizer of "
            "each of its models; leave them off"
        )
    if len(event.layout.models) > 1:
        _check_several(settings, event.optimizers)
    elif event.optimizers:
        settings = settings.with_optimizer(event.optimizers[0])
    left_out = event.samples % settings.batch_size if settings.drop_last else 0
    _check_samples(settings, event.samples, left_out)
    known = not stream and not settings.own_data
    parts = settings.shards if settings.strategy.held_by is Holder.SHARDS else settings.partitions
    return Plan(
        settings,
        event.layout,
        cut(event.layout, settings.partitions, parts),
        event.samples - left_out if known else 0,
        left_out if known else 0,
        event.optimizers,
    )


def _check_samples(settings: Settings, samples: int, left_out: int) -> None:
    """Refuse data of which nothing is dealt, or not a minibatch to each who is to have his own.

    Raises:
        UsageError: naming how many there are.
    """
    if samples == STREAM:
        return
    if samples < 1:
        raise UsageError("the training set is empty: there is nothing to train on")
    if left_out == samples:
        raise UsageError(
            f"--drop-last: all of the {left_out} training samples are less than one minibatch of "
            f"{settings.batch_size}: lower --batch-size"
        )
    batches = -(-(samples - left_out) // settings.batch_size)
    parted = settings.keeps_parts or (settings.order == SEQUENTIAL and not settings.own_data)
    if parted and batches < settings.replicas:
        by = f"--data {settings.data}" if settings.keeps_parts else f"order {settings.order}"
        raise UsageError(
            f"{by}: the {batches} minibatches of an epoch cannot be cut into parts for "
            f"{settings.replicas} replicas: lower --batch-size, or --replicas"
        )


def _check_several(settings: Settings, optimizers: tuple[Optimizer, ...]) -> None:
    """Refuse what means nothing where several models are trained, each with an optimizer of its own.

    Raises:
        UsageError: naming the option, and why.
    """
    refused = _refused_by_several(settings)
    if not refused and settings.rate_follows:
        raise UsageError(
            "--lr-schedule and --warmup-epochs are of one optimizer, and the script has several models: have it set "
            "their rates (torch.optim.lr_scheduler)"
        )
    if refused:
        raise UsageError(
            f"{refused}: the script has several models, and pushes each as it is stepped; use downpour, bounded or "
            "synchronous without it, or give all models to one optimizer in a torch.nn.ModuleList"
        )
    for optimizer in optimizers or (settings.optimizer,):
        optimizer.check(norms=False)


def _refused_by_several(settings: Settings) -> str:
    """Return what means nothing where each step of several models is a push, and what it makes is fetched before the
    next; "" where all does.
    """
    strategy, policy = settings.strategy, settings.policy
    # a gathered push is acknowledged as one of the next update, whichever model that would step
    if not isinstance(strategy, Accruing) or (policy.gathers and not policy.rounds):
        return f"strategy {strategy.name}"
    # a round that is made without a replica would leave it between two models' steps
    changed = [name for name in ("backup_workers", "quorum") if getattr(strategy, name, 0)]
    cadence = ("push_every", "fetch_every", "local_lr", "prefetch", "warm_start_steps")
    changed += [name for name in cadence if getattr(strategy.pushing, name) != getattr(Pushing, name)]
    return option(changed[0]) if changed else "--standby 1" if settings.standby else ""


def started(plan: Plan, samples: int, done: int) -> Started:
    """Make the record of a job's beginning, with so many samples and epochs (or iterations) done before."""
    s = plan.settings
    return Started(
        s.replicas,
        s.shards if s.strategy.held_by is Holder.SHARDS else 0,
        plan.layout.parameters,
        plan.samples,
        s.batch_size,
        s.epochs,
        samples,
        done,
        s.strategy.unit,
        plan.models,
    )


def check(plan: Plan, who: str, event: Join) -> None:
    """Refuse a replica that does not fit a plan.

    Raises:
        LayoutError: its model differs.
        UsageError: it has other data, or asks for other batches or epochs.
    """
    check_same(plan.layout, event.layout, who)
    settings = plan.settings
    _check_data(plan, who, event.samples)
    if event.order not in ("", settings.order):
        raise UsageError(f"{who} asks for order {event.order}, the job has {settings.order}: it is one for all")
    if event.epochs not in (0, settings.epochs):
        raise UsageError(
            f"{who} goes through replica.epochs({event.epochs}), the job through {settings.epochs}: it is one number "
            "for all"
        )
    if event.optimizers != plan.optimizers:
        raise UsageError(f"{who} names other optimizers than the job has: its script makes them alike in every replica")
    if event.batch_size not in (0, settings.batch_size):
        raise UsageError(
            f"{who} asks for batches of {event.batch_size}, the job has {settings.batch_size}: it is one for all"
        )


def _check_data(plan: Plan, who: str, samples: int) -> None:
    """Refuse data that are not those of the job, or of which a replica can have no part.

    Raises:
        UsageError: naming what it has, and what the job has.
    """
    settings = plan.settings
    if settings.own_data:
        _check_samples(settings, samples, samples % settings.batch_size if settings.drop_last else 0)
        return
    if samples != (all_samples := plan.samples + plan.left_out or STREAM):
        has, have = (f"{count} training samples" if count != STREAM else "a stream" for count in (samples, all_samples))
        raise UsageError(
            f"{who} has {has}, the job has {have}: give every replica the same data, or launch with --data own"
        )
    if plan.allotted and roles.index_of(who) >= plan.settings.replicas:
        raise UsageError(
            f"{who} would have no part: the data are cut for {plan.settings.replicas} replicas; join a job whose data "
            "are dealt on demand, or one with --data own"
        )
