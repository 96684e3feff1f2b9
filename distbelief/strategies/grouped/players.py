"""Players of strategies whose replicas form groups, with the whole model that measures a split replica.

A process adds up gradients with a carrier; a simulated replica has none, and its client sends pieces as messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from distbelief.coordination.coordinator import Coordinator
from distbelief.core import roles
from distbelief.core.conversations.membership import PartPlace
from distbelief.core.effects import Measured
from distbelief.core.portions import StartingPoint
from distbelief.core.protocol import GROUPED
from distbelief.core.settings import Plan, Settings
from distbelief.fabric.base import Carrier
from distbelief.fabric.buckets import Bucket, buckets, shares
from distbelief.fabric.memory import SharedMemory
from distbelief.fabric.process_group import ProcessGroup
from distbelief.fabric.role_links import ChunkedLinks, RoleLinks
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.schedules.allreduce import PLACED, by_host
from distbelief.schedules.price import LinkModel, cheapest
from distbelief.sharding.layout import Layout
from distbelief.strategies.context import Context, ProcessStage, VirtualStage
from distbelief.strategies.grouped.group_holders import GroupHolders, RoundWork
from distbelief.strategies.grouped.replica import AllreduceReplica, GroupSurroundings
from distbelief.strategies.grouped.round_batches import RoundBatches
from distbelief.strategies.grouped.settings import GUESTS, reduction
from distbelief.strategies.grouped.whole import TorchWhole, Whole
from distbelief.strategies.players import COORDINATOR_STATE, Players
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.on_disk import zeros_on_disk
from distbelief.tasks.worker import check_measure, measure
from distbelief.transport.addresses import interface_of
from distbelief.transport.virtual import HEADER


class WholeModel:
    """A whole model, built when first needed, that computes on the values last sent by the partitions.

    These lie in a file, so that the process that measures need not have memory for the whole.
    """

    def __init__(self, task: Task, make: Callable[[], nn.Module], layout: Layout) -> None:
        self._task, self._make, self._layout = task, make, layout

    @functools.cached_property
    def _flat(self) -> FlatModule:
        return FlatModule(self._make(), layout=self._layout)

    @functools.cached_property
    def _vector(self) -> torch.Tensor:
        """The vector of the parameters, in a file; the memory in which the model was built is freed."""
        vector = zeros_on_disk(self._layout.total)
        self._flat.bind([], [vector])
        self._flat.swap(0)
        return vector

    def check(self) -> None:
        """Refuse a model that cannot be measured, as `check_measure` does."""
        check_measure(self._task, self._flat.module)

    def collect(self, start: int, data: bytes) -> None:
        """Take a part of the flat vector, from byte `start` on."""
        vector = self._vector
        if data:
            vector[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def measure(self) -> Measured:
        """Measure the collected model on the test set."""
        with torch.no_grad():
            self._flat.swap(0)  # this joins tensors that are cut over partitions
        return measure(self._task, self._flat.module)


def measured_model(context: Context) -> WholeModel | None:
    """Return the whole model of a split replica, for the partition that leads it; None where it is not split.

    The job's first replica, before it joins, refuses a model that cannot be measured.
    """
    first = context.measured and roles.index_of(context.role) == 0 and roles.is_lead(context.role)
    checks = first and context.flat is not None and not context.incarnation
    if context.part is None:
        if checks:
            check_measure(context.task, context.module.module)
        return None
    model = WholeModel(context.task, context.whole, context.vectors.layout)
    if checks:
        model.check()
    return model


def replica(context: Context) -> PlayedRole:
    """Return a replica of a group, with its worker."""
    stage, split, partition = context.stage, context.split, roles.partition_of(context.role)
    model, flat = measured_model(context), context.flat
    carried = None
    if isinstance(stage, ProcessStage):
        carried = carrier(stage, context.role, context.settings)
        stage.at_end(carried.close)
    # a script's step, and that of a split model, may be several backward passes
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
    surroundings = GroupSurroundings(
        split.siblings.address if split else stage.listen(),
        reduces=carried is not None,
        gradual=split is None,
        store=carried.store if carried else "",
        choose=choose,
        split=split,
        collect=model.collect if model else lambda *_: None,
        fault=(lambda: carried.fault) if carried else str,
        loop=context.loop,
    )
    worker = Worker(
        attach,
        context.computes(0.0),  # not here: the sum is clipped instead
        model.measure if model else lambda: measure(context.task, context.module.module),
        *((carried.form, carried.reduce) if carried else ()),
    )
    return PlayedRole(AllreduceReplica(context.role, whole, context.samples, context.incarnation, surroundings), worker)


def carrier(stage: ProcessStage, role: str, settings: Settings) -> Carrier:
    """Return the carrier that adds up a replica's gradients.

    Inside a host this is shared memory, and between hosts torch's process group. The process group encrypts nothing,
    and has its own algorithms. So where links are encrypted or a schedule is named, role links carry the gradients.
    """
    index, options, device = roles.index_of(role), reduction(settings), stage.device or torch.device("cpu")
    # one replica needs no carrier; where links are encrypted guests may join it, unless it is split
    if settings.replicas == 1 and (settings.partitions > 1 or not stage.encrypted):
        return Carrier(device)
    if stage.transport == "shared":
        return SharedMemory(stage.descriptor(), index, settings.replicas)
    if options.algorithm in PLACED and not stage.encrypted:
        return ProcessGroup(index, device, stage.advertise, interface_of(stage.advertise))
    endpoint, address = stage.open_endpoint()
    links = ChunkedLinks(endpoint, index, settings.replicas + GUESTS)
    return RoleLinks(links, index, device, options.algorithm, options.per_host, address)


def cheapest_here(stage: VirtualStage, bucket: Bucket, ranks: int, per_host: int) -> str:
    """Return the cheapest algorithm for a bucket on the simulated network."""
    network, inside = stage.endpoint.network.model, stage.endpoint.network.inside
    link = LinkModel(network.latency, network.bandwidth, stage.addition, HEADER)
    within = LinkModel(inside.latency, inside.bandwidth, stage.addition, HEADER) if inside else None
    return cheapest(by_host(ranks, per_host), bucket.length, bucket.item, link, within)


def time_steps(stage: VirtualStage, plan: Plan, partition: int) -> None:
    """Set the time of a simulated step beyond its computation.

    A step copies its gradient into the vector that is added up, and pays its share of the update after the round. The
    first bucket of a whole replica is ready before the step's end; the client times the others.
    """
    options = reduction(plan.settings)
    if plan.settings.partitions == 1:
        stage.timing.first = shares([*buckets(plan.layout, options.bucket_mb)])[0]
    if (work := stage.endpoint.work) is not None:
        trained = plan.layout.partitions[partition].trained.size
        stage.timing.more = work.copy(trained) + work.update(trained) / options.accumulate


def coordinator(settings: Settings, measures: bool, start: StartingPoint) -> Coordinator:
    """Return a coordinator whose replicas hold the parameters, and which deals rounds to all of them."""
    holders = GroupHolders()
    job = Coordinator(settings, measures, start, holders, RoundWork(holders), GROUPED)
    job.evaluations.tried = True  # the first replica has checked this before it joins
    return job


PLAYERS = Players(coordinator, (*COORDINATOR_STATE, GroupHolders, RoundWork, RoundBatches, PartPlace), replica)
