"""Admission: the first replica fixes the model, the data and the batch size of a job; the others must have the same."""

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
    """Make the plan of a job from its first replica's model and data.

    A model that cannot be cut into so many shards raises a `LayoutError`. Missing data, and options that contradict the
    script, raise a `UsageError`.
    """
    # The job takes batch size, order, epochs and optimizers from a script that names them. If the command names another
    # number of epochs, or another optimizer, the job is refused: neither may win silently.
    if event.batch_size:
        settings = dataclasses.replace(settings, batch_size=event.batch_size)
    if event.order:
        settings = dataclasses.replace(settings, order=event.order)
    stream = event.samples == STREAM
    settings.check_allotted(stream)
    if event.epochs:
        if settings.epochs not in (Settings.epochs, event.epochs):
            raise UsageError(
                f"--epochs {settings.epochs}: the script calls replica.epochs({event.epochs}); leave one of them off"
            )
        settings = dataclasses.replace(settings, epochs=event.epochs)
    if event.optimizers and settings.optimizer != Optimizer():
        raise UsageError(
            f"--optimizer {settings.optimizer.name} --lr {settings.optimizer.lr:g}: the script names the optimizer of "
            "each of its models; leave them off"
        )
    settings = _with_optimizers(settings, event)
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


def _with_optimizers(settings: Settings, event: Join) -> Settings:
    """Return the settings with the optimizers that a script names."""
    if event.local:
        if settings.local and settings.strategy.pushing.local_optimizer != event.local:
            raise UsageError(
                f"--local-optimizer {settings.local.name}: the script names {event.local.name}; leave one off"
            )
        settings = settings.with_optimizers(local_optimizer=event.local)
    if len(event.layout.models) > 1:
        _check_several(settings, event.optimizers)
    elif event.optimizers:
        settings = settings.with_optimizers(optimizer=event.optimizers[0])
    if isinstance(settings.strategy, Accruing):
        settings.strategy.check_local(settings)
    if settings.local:
        _check_local(settings, event)
    return settings


def _check_local(settings: Settings, event: Join) -> None:
    """Refuse data with which a replica cannot make all its local steps, and gradients that are sparse."""
    own = event.samples if settings.own_data else event.samples / settings.replicas
    steps, part = settings.strategy.pushing.push_steps, int(own / settings.batch_size)
    if event.samples > 0 and steps > max(1, part):
        raise UsageError(
            f"--push-every {steps}: a replica's part of an epoch has {part} minibatches, and each epoch ends with a "
            "push: lower --push-every, --batch-size or --replicas"
        )
    if any("rows" in group for group in event.layout.groups):
        raise UsageError("--local-optimizer: the model has sparse gradients, and changes are dense: set sparse=False")


def _check_samples(settings: Settings, samples: int, left_out: int) -> None:
    """Refuse a training set too small for one minibatch, or for one in each replica's part."""
    if samples == STREAM:
        return
    if samples < 1:
        raise UsageError("the training set is empty: there is nothing to train on")
    if left_out == samples:
        raise UsageError(
            f"--drop-last: the {left_out} training samples do not fill one minibatch of {settings.batch_size}: "
            f"lower --batch-size"
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
    """Refuse options that mean nothing if a script trains several models, each with its optimizer."""
    refused = _refused_by_several(settings)
    if not refused and settings.rate_follows:
        raise UsageError(
            "--lr-schedule and --warmup-epochs are for one optimizer, but the script has several models: have it set "
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
    """Return an option that means nothing for several models, whose every step is pushed and fetched; "" for none."""
    strategy, policy = settings.strategy, settings.policy
    # a gathered push is acknowledged with the next update, which may be another model's
    if not isinstance(strategy, Accruing) or (policy.gathers and not policy.rounds):
        return f"strategy {strategy.name}"
    # a round without a replica would leave that replica between the steps of two models
    changed = [name for name in ("backup_workers", "quorum") if getattr(strategy, name, 0)]
    cadence = ("push_every", "fetch_every", "local_optimizer", "local_lr", "prefetch", "warm_start_steps")
    changed += [name for name in cadence if getattr(strategy.pushing, name) != getattr(Pushing, name)]
    return option(changed[0]) if changed else "--standby 1" if settings.standby else ""


def started(plan: Plan, samples: int, done: int) -> Started:
    """Make the record of a job's start, given the samples and the epochs (or iterations) that are already done."""
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

    Another model raises a `LayoutError`. Other data, batches, epochs or optimizers raise a `UsageError`.
    """
    check_same(plan.layout, event.layout, who)
    settings = plan.settings
    _check_data(plan, who, event.samples)
    if event.order not in ("", settings.order):
        raise UsageError(f"{who} asks for order {event.order}, but the job has {settings.order}: all need the same")
    if event.epochs not in (0, settings.epochs):
        raise UsageError(
            f"{who} calls replica.epochs({event.epochs}), but the job has {settings.epochs}: all must have the same "
            "number"
        )
    if event.optimizers != plan.optimizers:
        raise UsageError(f"{who} names other optimizers than the job has: every replica's script must make the same")
    if event.local not in (None, settings.strategy.pushing.local_optimizer):
        raise UsageError(f"{who} names another local optimizer than the job has: every replica's script must name it")
    if event.batch_size not in (0, settings.batch_size):
        raise UsageError(
            f"{who} asks for batches of {event.batch_size}, but the job has {settings.batch_size}: all need the same"
        )


def _check_data(plan: Plan, who: str, samples: int) -> None:
    """Refuse a replica with other data than the job's, or one for which the data have no part."""
    settings = plan.settings
    if settings.own_data:
        _check_samples(settings, samples, samples % settings.batch_size if settings.drop_last else 0)
        return
    if samples != (all_samples := plan.samples + plan.left_out or STREAM):
        has, have = (f"{count} training samples" if count != STREAM else "a stream" for count in (samples, all_samples))
        raise UsageError(
            f"{who} has {has}, but the job has {have}: give every replica the same data, or launch with --data own"
        )
    if plan.allotted and roles.index_of(who) >= plan.settings.replicas:
        raise UsageError(
            f"{who} would get no data: they are divided for {plan.settings.replicas} replicas; join a job whose data "
            "are dealt on demand, or one with --data own"
        )
