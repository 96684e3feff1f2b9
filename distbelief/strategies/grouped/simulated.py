"""A replica of a simulated job without a server: it sends pieces of gradients over the virtual network."""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.settings import Plan
from distbelief.fabric.buckets import Bucket, buckets, shares
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.schedules.allreduce import by_host
from distbelief.schedules.price import LinkModel, cheapest
from distbelief.strategies.context import Context, VirtualStage
from distbelief.strategies.grouped.measured import measured_model
from distbelief.strategies.grouped.replica import AllreduceReplica
from distbelief.strategies.grouped.settings import reduction
from distbelief.strategies.grouped.torch_whole import TorchWhole
from distbelief.strategies.grouped.whole import PhantomWhole
from distbelief.tasks.worker import measure
from distbelief.transport.base import Arena
from distbelief.transport.virtual import HEADER


def simulated_replica(context: Context, stage: VirtualStage) -> PlayedRole:
    """Return what a simulated replica plays."""
    flat, partition, split = context.flat, roles.partition_of(context.role), context.split
    whole = PhantomWhole(context.vectors.layout) if flat is None else TorchWhole(flat, partition=partition)
    model = measured_model(context)

    def choose(bucket: Bucket, ranks: int) -> str:
        return cheapest_here(stage, bucket, ranks, reduction(context.settings).per_host)

    def attach(plan: Plan, _: Arena) -> None:
        time_steps(stage, plan, partition)
        if isinstance(whole, TorchWhole):
            whole.bind(plan)

    story = AllreduceReplica(
        context.role, whole, context.samples, incarnation=context.incarnation, gradual=split is None, choose=choose,
        split=split, collect=model.collect if model else lambda *_: None,
    )  # fmt: skip
    measures = model.measure if model else lambda: measure(context.task, context.module.module)
    return PlayedRole(story, Worker(attach, context.computes(0.0), measures))


def cheapest_here(stage: VirtualStage, bucket: Bucket, ranks: int, per_host: int) -> str:
    """The cheapest algorithm for a bucket on this network."""
    network, inside = stage.endpoint.network.model, stage.endpoint.network.inside
    link = LinkModel(network.latency, network.bandwidth, stage.addition, HEADER)
    within = LinkModel(inside.latency, inside.bandwidth, stage.addition, HEADER) if inside else None
    return cheapest(by_host(ranks, per_host), bucket.length, bucket.item, link, within)


def time_steps(stage: VirtualStage, plan: Plan, partition: int) -> None:
    """Time a step: a whole replica's first bucket is ready before its end; of the others the story asks the clock.

    A step takes longer by the copying of its gradient into the vector that is added up, and by its share of the update
    after its round.
    """
    options = reduction(plan.settings)
    if plan.settings.partitions == 1:
        stage.timing.first = shares([*buckets(plan.layout, options.bucket_mb)])[0]
    if (work := stage.endpoint.work) is not None:
        trained = plan.layout.partitions[partition].trained.size
        stage.timing.more = work.copy(trained) + work.update(trained) / options.accumulate
