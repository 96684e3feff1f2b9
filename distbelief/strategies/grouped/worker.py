"""A replica without a server, as one process of a machine: it computes, and adds up its gradients with the others'."""

from __future__ import annotations

import os

import torch

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.settings import Settings
from distbelief.fabric.base import Told
from distbelief.fabric.in_order import InOrder
from distbelief.fabric.link_lines import LinkLines
from distbelief.fabric.links import Links
from distbelief.fabric.process_group import ProcessGroup
from distbelief.fabric.shared_memory import SharedMemory
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.strategies.context import Context, ProcessStage
from distbelief.strategies.grouped.gradients import OwnVector
from distbelief.strategies.grouped.measured import measured_model
from distbelief.strategies.grouped.replica import AllreduceReplica
from distbelief.strategies.grouped.settings import GUESTS, reduction
from distbelief.strategies.grouped.torch_whole import TorchWhole
from distbelief.tasks.worker import measure
from distbelief.transport.addresses import interface_of


def process_replica(context: Context, stage: ProcessStage) -> PlayedRole:
    """Return what the process of a replica plays.

    In a user's own loop a step may be several backward passes, so that nothing is added up before it is over.
    """
    flat, split, partition = context.module, context.split, roles.partition_of(context.role)
    model = measured_model(context)
    carried = carrier(stage, context.role, context.settings)
    if isinstance(carried, SharedMemory | ProcessGroup):
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
        store=carried.store if isinstance(carried, Links | ProcessGroup) else "",
        fault=(lambda: carried.fault) if isinstance(carried, InOrder) else str,
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
    return PlayedRole(story, worker)


class OneRank(OwnVector):
    """Vector of a job of one replica, which has nobody to add up with."""

    def form(self, group: Assemble, interrupted: Told) -> bool:
        """It is all of the group."""
        return True

    def reduce(self) -> bool:
        """The sum is its gradient."""
        return True


Carrier = SharedMemory | Links | ProcessGroup | OneRank


def carrier(stage: ProcessStage, role: str, settings: Settings) -> Carrier:
    """Return what adds up the gradients of a replica: shared memory inside a host; over a network links of ours where
    they are encrypted, else torch.distributed; nothing where there is one replica and nobody may join it.
    """
    index, options, device = roles.index_of(role), reduction(settings), stage.device or torch.device("cpu")
    if settings.replicas == 1 and (settings.partitions > 1 or not stage.encrypted):  # and no guest joins
        return OneRank(device)
    if stage.transport == "shared":
        return SharedMemory(stage.descriptor(), index, settings.replicas, options.algorithm, options.per_host)
    if stage.encrypted:
        endpoint, address = stage.open_endpoint()
        lines = LinkLines(endpoint, index, settings.replicas + GUESTS)
        return Links(lines, index, device, options.algorithm, options.per_host, address)
    if interface := interface_of(stage.advertise):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return ProcessGroup(index, device, options.algorithm, options.per_host, stage.advertise)
