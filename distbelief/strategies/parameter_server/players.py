"""Players of parameter servers, and of hogwild, whose replicas update their models in the shard's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from distbelief.coordination.coordinator import Coordinator
from distbelief.coordination.portion_work import PortionWork
from distbelief.coordination.shard_holders import ShardHolders
from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.portions import StartingPoint
from distbelief.core.settings import Plan, Settings
from distbelief.errors import TrainingError, UsageError
from distbelief.replica.downpour import DownpourTraining, HogwildTraining
from distbelief.replica.served_replica import ServedReplica
from distbelief.replica.staggered import begin_staggered
from distbelief.runtime.player import Answer, PlayedRole, Worker
from distbelief.server import optimizers
from distbelief.server.passed import PassedLayout
from distbelief.server.shard import Shard
from distbelief.server.slice import PhantomSlice, slice_of
from distbelief.server.standby import Standby
from distbelief.server.unlocked import SAMPLES, UPDATES, Counts, UnlockedShard, phantom_counts, unlocked_slice
from distbelief.sharding.layout import Entry, Layout
from distbelief.strategies.context import Context, Memory, VirtualStage
from distbelief.strategies.players import COORDINATOR_STATE, Players, Servers, groups_of_entries, served
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.sparse import check_rows
from distbelief.transport.base import Arena


def coordinator(settings: Settings, evaluator: bool, start: StartingPoint) -> Coordinator:
    """Return a coordinator whose shards hold the parameters, and which deals portions."""
    return Coordinator(settings, evaluator, start, ShardHolders(), PortionWork())


def replica(context: Context) -> PlayedRole:
    """Return a replica that pushes and fetches."""
    return served(context, begin_staggered if context.settings.stagger else DownpourTraining)


PLAYERS = Players(
    coordinator,
    COORDINATOR_STATE,
    replica,
    servers=Servers(Shard, Standby, slice_of, PhantomSlice),
)


class Step(NamedTuple):
    """A part of an update: the number of bytes that it writes, and the function that does it."""

    size: int
    act: Callable[[], object]


class InPlace:
    """One replica's optimizer, on a model that is moved to the shard's memory.

    Args:
        gradients: vectors in which the first values are sent.
        apart: whether each parameter is a step of its own.
    """

    def __init__(
        self, flat: FlatModule, plan: Plan, gradients: list[torch.Tensor], memory: Memory, index: int, apart: bool
    ) -> None:
        layout = PassedLayout(plan)
        room = memory(layout.length)
        flat.bind(gradients, [layout.vector(room, 0)])
        self.counts = Counts(layout.rows(room), plan.settings.replicas, index)
        self._plan, self._state, self._factor = plan, layout.state(room), 1.0
        self._counted: list[torch.Tensor] = []
        """Copies, one for each parameter, of the count of all updates, where the learning rate depends on it."""
        self._varies = plan.settings.rate_varies
        entries = list(zip(plan.layout.trained_entries, flat.trained, strict=True))
        dense = [pair for pair in entries if not plan.layout.is_sparse(pair[0])]
        steps = [[pair] for pair in dense] if apart else [dense]
        self._dense = [Step(sum(entry.size for entry, _ in some), self._optimizer(some)) for some in steps if some]
        self._rows = [(*pair, self._optimizer([pair], rows=True)) for pair in entries if plan.layout.is_sparse(pair[0])]
        if self._rows:
            # this is the default, but torch warns unless it is set
            torch.sparse.check_sparse_tensor_invariants.disable()

    def _optimizer(self, some: list[tuple[Entry, torch.Tensor]], rows: bool = False) -> Callable[[], object]:
        """Return a step of torch's optimizer on some parameters, with its state in the memory."""
        settings, groups = self._plan.settings, groups_of_entries(self._plan.layout, some)
        optimizer = optimizers.build(settings.optimizer, groups, rows)
        for entry, parameter in some:
            for key, value in self._state_of(entry, parameter):
                optimizer.state[parameter][key] = value
        stepper, rates = optimizers.stepper(optimizer), [(group, group["lr"]) for group in optimizer.param_groups]

        def step() -> None:
            for group, rate in rates:
                group["lr"] = rate * self._factor
            stepper()

        return step if settings.rate_varies else stepper

    def _state_of(self, entry: Entry, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the optimizer state of a parameter: views of its section's state, and a count."""
        for number, section in enumerate(self._plan.layout.sections):
            if not section.start <= entry.start < section.stop:
                continue
            start = (entry.start - section.start) // parameter.itemsize
            for name, value in self._state.items():
                _, of, key = name.split(".")
                if int(of) != number:
                    continue
                if key == "step":
                    count = value.clone()
                    if self._plan.settings.optimizer.options.get("lr_decay"):
                        self._counted.append(count)
                    yield key, count
                else:
                    yield key, value[start : start + parameter.numel()].view(parameter.shape)

    def steps(self) -> list[Step]:
        """Return the parts of the update with the current gradient; parameters without one are left alone."""
        if self._varies:
            self._factor = self._plan.factor(self.counts.total(SAMPLES))
        if self._counted:
            updates = self.counts.total(UPDATES)
            for count in self._counted:
                count.fill_(updates)
        touched = [
            Step(self._touched(entry, parameter.grad), step)
            for entry, parameter, step in self._rows
            if parameter.grad is not None
        ]
        return [*self._dense, *touched]

    def _touched(self, entry: Entry, gradient: torch.Tensor) -> int:
        if not gradient.is_sparse:
            raise TrainingError(
                f"the gradient of {entry.tensor.name!r} is dense, but its module has sparse=True: use it only as an "
                "embedding"
            )
        return entry.size // entry.shape[0] * gradient._nnz()


class PhantomInPlace:
    """Phantom of `InPlace`: the lengths of an update's parts, and the counts of updates."""

    def __init__(self, plan: Plan, memory: Memory, index: int) -> None:
        if any(plan.layout.is_sparse(entry) for entry in plan.layout.trained_entries):
            raise UsageError("--phantom computes no gradients, which say what rows an update writes to: leave it off")
        self.counts = phantom_counts(plan, memory, index)
        self._steps = [Step(entry.size, lambda: None) for entry in plan.layout.trained_entries]

    def steps(self) -> list[Step]:
        """Return the parts of an update that changes nothing."""
        return self._steps


class HogwildWorker:
    """Worker of one life of a replica: it computes and updates."""

    def __init__(self, context: Context) -> None:
        self._context, self._index = context, roles.index_of(context.role)
        self._compute = context.computes(context.settings.clip_norm)
        self._virtual = context.stage if isinstance(context.stage, VirtualStage) else None
        self.held: InPlace | PhantomInPlace | None = None
        """The model that it updates, once it is attached."""

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Move the model to the shared memory."""
        flat, memory = self._context.flat, self._context.stage.memory
        assert memory is not None
        self.held = (
            PhantomInPlace(plan, memory, self._index)
            if flat is None
            else InPlace(flat, plan, list(arena.gradients), memory, self._index, apart=self._virtual is not None)
        )

    def compute(self, batch: Batch, answer: Answer) -> Computed | None:
        """Compute a gradient at the present parameters."""
        assert self.held is not None
        self.held.counts.look()
        return self._compute(batch, answer)

    def update(self, samples: int, answer: Callable[[bool], None]) -> bool | None:
        """Update the parameters with the gradient, and count that."""
        held, stage = self.held, self._virtual
        assert held is not None
        if stage is None:
            with torch.no_grad():
                for step in held.steps():
                    step.act()
            held.counts.add(samples)
            return True
        self._next(stage, deque(held.steps()), samples, answer)
        return None

    def _next(self, stage: VirtualStage, left: deque[Step], samples: int, answer: Callable[[bool], None]) -> None:
        """Make the parts of a simulated update one by one, each when its time has passed: others may come between."""
        if not left:
            assert self.held is not None
            self.held.counts.add(samples)
            stage.clock.call_later(0.0, answer, True)
            return

        def act(_: None) -> None:
            if not stage.endpoint.ended:
                with torch.no_grad():
                    left.popleft().act()
                self._next(stage, left, samples, answer)

        work, reduction = stage.endpoint.work, stage.endpoint.network.model.reduction
        size = left[0].size
        stage.endpoint.thread.do(size * reduction if reduction or work is None else work.update(size), act, None)


def hogwild_replica(context: Context) -> PlayedRole:
    """Return a replica that updates the shard's memory."""
    worker = HogwildWorker(context)
    story = ServedReplica(HogwildTraining, context.role, context.vectors, context.samples, context.incarnation)
    return PlayedRole(story, Worker(worker.attach, worker.compute, update=worker.update))


def check_in_place(settings: Settings, model: nn.Module) -> None:
    """Refuse a model that cannot be updated in place."""
    layout: Layout = layout_of(model)
    for entry in layout.trained_entries:
        if entry.tensor.dtype in ("bfloat16", "float16"):
            raise UsageError(
                f"parameter {entry.tensor.name!r} is {entry.tensor.dtype}, which needs a float32 master: "
                f"{settings.strategy.name} has none; use float32"
            )
    check_rows(layout, settings)


HOGWILD_PLAYERS = Players(
    coordinator,
    COORDINATOR_STATE,
    hogwild_replica,
    servers=Servers(UnlockedShard, Standby, slice_of, PhantomSlice, unlocked_slice),
    check_model=check_in_place,
    rows=True,
)
