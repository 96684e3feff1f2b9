"""The builder of a job's roles in every place: coordinator, shard, standby, replica or partition, and evaluator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from distbelief.coordination.coordinator import Coordinator
from distbelief.core import roles
from distbelief.core.effects import Computed
from distbelief.core.portions import OWN, StartingPoint
from distbelief.core.settings import Plan, Settings
from distbelief.replica.evaluator import Evaluator
from distbelief.replica.split_compute import Part
from distbelief.replica.vectors import PhantomVectors, Vectors
from distbelief.runtime.player import Compute, PlayedRole, ScriptedLoop, cannot
from distbelief.server.slice import Slice
from distbelief.sharding.layout import Layout
from distbelief.split.graph import SplitGraph
from distbelief.split.program import SplitProgram, program_of
from distbelief.strategies.base import Strategy
from distbelief.strategies.context import Context, Memory, Stage
from distbelief.strategies.partition import PartitionTrainer, PhantomPart, part_of
from distbelief.strategies.players import Players, Servers
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.sparse import groups_of
from distbelief.tasks.worker import Trainer, check_measure, load, with_data


@dataclass(frozen=True)
class Cast:
    """Builder of the roles of one job."""

    strategy: Strategy
    settings: Settings
    resolve: Callable[[], Task]
    """Returns the job's task; a script's own loop has none."""
    model: Callable[[str], nn.Module]
    """Builds the whole model that a role begins with."""
    graph: Callable[[Task, nn.Module], SplitGraph]
    """Splits the model of a task."""
    measured: bool
    phantom: bool = False
    """True if replicas compute nothing and shards hold nothing."""

    # machines

    def coordinator(self, start: StartingPoint) -> Coordinator:
        """Return the coordinator of a job that goes on from `start`."""
        return self.players.coordinator(self.settings, self.measured, start)

    @property
    def servers(self) -> Servers:
        """The builders of shards and standbys."""
        servers = self.players.servers
        assert servers is not None
        return servers

    def slice(self, plan: Plan, shard: int, memory: Memory | None = None) -> Slice:
        """Return a shard's slice, in its own memory or in memory that it shares with replicas."""
        servers = self.servers
        if servers.unlocked_slice is not None and memory is not None:
            return servers.unlocked_slice(plan, memory, self.phantom)
        if self.phantom:
            return servers.phantom_slice(plan, shard)
        if memory is None:
            return servers.torch_slice(plan, shard, None, None)
        whole, assignment = memory(plan.layout.total), plan.assignments[shard]
        moving, frozen = (whole[part.start : part.stop] for part in (assignment.moving, assignment.frozen))
        return servers.torch_slice(plan, shard, moving, frozen)

    # stories

    def replica(self, role: str, incarnation: int, stage: Stage) -> PlayedRole:
        """Return a replica, or one partition of a replica, that trains the task."""
        settings = self.settings
        model = None if self.phantom else self.model(role)
        if model is not None:
            self.players.check_model(settings, model)
        data = load(self.task, "training")
        task, samples = self.task if model is None else with_data(self.task, data), len(data)
        vectors, part = self._vectors(task, role, model, stage)

        def computes(clip_norm: float) -> Compute:
            if part is not None:
                return cannot("compute")
            if not isinstance(vectors, FlatModule):
                return stage.timed(phantom(samples, settings.batch_size))
            trainer = Trainer(task, vectors.module, settings, clip_norm, settings.arithmetic)
            return stage.timed(lambda batch, _: trainer.compute(batch))

        context = Context(
            role,
            incarnation,
            settings,
            task,
            samples,
            vectors,
            computes,
            stage,
            self.measured,
            part,
            whole=functools.partial(self.model, roles.EVALUATOR),
        )
        played = self.players.replica(context)
        played = played._replace(worker=replace(played.worker, work=stage.work))
        return stage.reach(played, context.flat)

    def scripted(self, role: str, incarnation: int, stage: Stage, loop: ScriptedLoop) -> PlayedRole:
        """Return a replica whose loop is a user's script."""
        flat = loop.flat
        task = Task(model=lambda: flat.module, train=list)  # this is never used: the script brings model and data
        context = Context(
            role,
            incarnation,
            self.settings,
            task,
            loop.samples,
            flat,
            loop.computes,
            stage,
            self.measured,
            part=loop.part,
            loop=loop.request,
        )
        return stage.reach(self.players.replica(context), flat if flat.owned else None)

    def evaluator(self, incarnation: int, stage: Stage) -> PlayedRole:
        """Return the evaluator; refuse a model that cannot be measured."""
        vectors, compute = self.whole(), cannot("compute")
        check_measure(self.task, vectors.module)
        context = Context(
            roles.EVALUATOR, incarnation, self.settings, self.task, 0, vectors, lambda _: compute, stage, self.measured
        )
        return PlayedRole(Evaluator(vectors, incarnation), self.players.reader(context))

    # models and data

    @functools.cached_property
    def players(self) -> Players:
        """Players of the strategy; one that runs in a single process has none."""
        return self.strategy.players()

    @functools.cached_property
    def task(self) -> Task:
        """The job's task."""
        return self.resolve()

    def whole(self) -> FlatModule:
        """Return the whole model, on vectors of the same layout as everywhere."""
        model = self.model(roles.EVALUATOR)
        return self._flat(model, self._layout(model))

    @functools.cached_property
    def layout(self) -> Layout:
        """Layout of the whole model."""
        return self._layout(self.model(roles.EVALUATOR))

    def _layout(self, model: nn.Module) -> Layout:
        pieces = self.graph(self.task, model).pieces if self.settings.partitions > 1 else None
        return layout_of(model, groups_of(model, self.settings.gradient_optimizer), pieces, valued=not self.phantom)

    def _flat(self, model: nn.Module, layout: Layout | None = None) -> FlatModule:
        layout = layout or layout_of(model, groups_of(model, self.settings.gradient_optimizer))
        return FlatModule(model, rows=self.players.rows, layout=layout)

    def _vectors(self, task: Task, role: str, model: nn.Module | None, stage: Stage) -> tuple[Vectors, Part | None]:
        """Return the vectors of a replica or partition, and a partition's part of each step."""
        if self.settings.partitions == 1:
            return PhantomVectors(self.layout) if model is None else self._flat(model), None
        if model is None:
            samples, partition = len(load(task, "training")), roles.partition_of(role)
            return PhantomVectors(self.layout), PhantomPart(self._program, partition, self.settings, samples, stage.now)
        graph, rows = self.graph(task, model), self.players.rows
        flat, program = part_of(graph, model, self.settings, role, rows, stage.device)
        return flat, PartitionTrainer(task, program, self.settings, stage.now)

    @functools.cached_property
    def _program(self) -> SplitProgram:
        """Program that phantoms of the partitions run, the same in all replicas."""
        return program_of(self.graph(self.task, self.model(roles.EVALUATOR)))


def phantom(samples: int, batch_size: int) -> Compute:
    """Return a computation that only counts the samples of a minibatch, given those of an epoch."""
    return lambda batch, _: Computed(None, min(batch_size, samples - batch.index % OWN * batch_size), 0.0)
