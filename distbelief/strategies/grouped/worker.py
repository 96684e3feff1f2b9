"""A replica of a group: it computes, and adds up its gradients with the others' by a carrier of its process.

A simulated one has none: the story sends pieces of its gradients over the virtual network.
"""

from __future__ import annotations

import torch

from distbelief.core import roles
from distbelief.core.settings import Plan, Settings
from distbelief.fabric.base import Carrier
from distbelief.fabric.buckets import Bucket, buckets, shares
from distbelief.fabric.memory import SharedMemory
from distbelief.fabric.process_group import ProcessGroup
from distbelief.fabric.role_links import ChunkedLinks, RoleLinks
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.schedules.allreduce import PLACED, by_host
from distbelief.schedules.price import LinkModel, cheapest
from distbelief.strategies.context import Context, ProcessStage, VirtualStage
from distbelief.strategies.grouped.measured import measured_model
from distbelief.strategies.grouped.replica import AllreduceReplica
from distbelief.strategies.grouped.settings import GUESTS, reduction
from distbelief.strategies.grouped.torch_whole import TorchWhole
from distbelief.strategies.grouped.whole import Whole
from distbelief.tasks.worker import measure
from distbelief.transport.addresses import interface_of
from distbelief.transport.virtual import HEADER


def replica(context: Context) -> PlayedRole:
    """Return what a replica plays."""
    stage, split, partition = context.stage, context.split, roles.partition_of(context.role)
    model, flat = measured_model(context), context.flat
    carried = carrier(stage, context.role, context.settings) if isinstance(stage, ProcessStage) else None
    # in a user's own loop, and of a split model, a step may be several backward passes
    overlaps = carried is not None and split is None and context.loop is None
    whole = Whole(context.vectors.layout) if flat is None else TorchWhole(flat, carried, overlaps, partition)

    def attach(plan: Plan, _: object) -> None:
        if isinstance(stage, VirtualStage):
            time_steps(stage, plan, partition)
        if isinstance(whole, TorchWhole):
            whole.bind(plan)

    def choose(bucket: Bucket, ranks: int) -> str:
        assert isinstance(stage, VirtualStage)
        return cheapest_here(stage, bucket, ranks, reduction(context.settings).per_host)

    if carried:
        stage.count(carried.traffic)
    story = AllreduceReplica(
        context.role, whole, context.samples, context.incarnation,
        split.siblings.address if split else stage.listen(), reduces=carried is not None, gradual=split is None,
        store=carried.store if carried else "", choose=choose, split=split,
        collect=model.collect if model else lambda *_: None, fault=(lambda: carried.fault) if carried else str,
        loop=context.loop,
    )  # fmt: skip
    return PlayedRole(
        story,
        Worker(
            attach,
            context.computes(0.0),  # the sum is clipped
            model.measure if model else lambda: measure(context.task, context.module.module),
            *((carried.form, carried.reduce) if carried else ()),
        ),
    )


def carrier(stage: ProcessStage, role: str, settings: Settings) -> Carrier:
    """Return what adds up the gradients of a replica: memory inside a host; torch's process group, which encrypts
    nothing, in the clear; role links where they are encrypted, or a schedule is named. Nothing does where there is one
    replica, and nobody may join it.
    """
    index, options, device = roles.index_of(role), reduction(settings), stage.device or torch.device("cpu")
    if settings.replicas == 1 and (settings.partitions > 1 or not stage.encrypted):  # and no guest joins
        return Carrier(device)
    if stage.transport == "shared":
        return SharedMemory(stage.descriptor(), index, settings.replicas)
    if options.algorithm in PLACED and not stage.encrypted:
        return ProcessGroup(index, device, stage.advertise, interface_of(stage.advertise))
    endpoint, address = stage.open_endpoint()
    links = ChunkedLinks(endpoint, index, settings.replicas + GUESTS)
    return RoleLinks(links, index, device, options.algorithm, options.per_host, address)


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
