"""A replica without a server, as one process of a machine: it computes, and adds up its gradients with the others'."""

from __future__ import annotations

import torch

from distbelief.core import roles
from distbelief.core.settings import Settings
from distbelief.fabric.base import Carrier
from distbelief.fabric.chunks import ChunkedLinks
from distbelief.fabric.memory import SharedMemory
from distbelief.fabric.process_group import ProcessGroup
from distbelief.fabric.role_links import RoleLinks
from distbelief.runtime.player import Part, Worker
from distbelief.schedules.allreduce import PLACED
from distbelief.strategies.context import Context, ProcessStage
from distbelief.strategies.grouped.measured import measured_model
from distbelief.strategies.grouped.replica import AllreduceReplica
from distbelief.strategies.grouped.settings import GUESTS, reduction
from distbelief.strategies.grouped.torch_whole import TorchWhole
from distbelief.tasks.worker import measure
from distbelief.transport.addresses import interface_of


def process_replica(context: Context, stage: ProcessStage) -> Part:
    """Return what the process of a replica plays.

    In a user's own loop a step may be several backward passes, so that nothing is added up before it is over.
    """
    flat, split, partition = context.module, context.split, roles.partition_of(context.role)
    model = measured_model(context)
    carried = carrier(stage, context.role, context.settings)
    stage.count(carried.traffic)
    # a parameter of a split model may be in several backward passes of a step
    whole = TorchWhole(flat, carried, overlaps=split is None and context.loop is None, partition=partition)
    story = AllreduceReplica(
        context.role,
        whole,
        context.samples,
        context.incarnation,
        split.siblings.address if split else stage.listen(),
        reduces=True,
        store=carried.store,
        fault=lambda: carried.fault,
        split=split,
        loop=context.loop,
        collect=model.collect if model else lambda *_: None,
    )
    worker = Worker(
        lambda plan, _: whole.bind(plan),
        context.computes(0.0),  # the sum is clipped
        model.measure if model else lambda: measure(context.task, flat.module),
        carried.form,
        carried.reduce,
    )
    return Part(story, worker)


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
