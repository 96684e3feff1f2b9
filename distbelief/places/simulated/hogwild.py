"""One run of a simulated job whose replicas update one mapping: updates take time there, wait for their locks, and race
as real ones do.

A gradient is that of the parameters at the moment when its step begins. Its update is made in parts, each at one
moment: the ranges that have locks, or `RANGES` where nothing is locked; `--handling memory=26GB` says how fast, or
`--network reduce=10GB`. Whoever dies leaves what he has made of an update, and his locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from distbelief.core import mapping, roles
from distbelief.core.counts import Counts
from distbelief.core.effects import Batch, Computed, Measured, Story
from distbelief.core.locks import Queues
from distbelief.core.settings import Plan
from distbelief.errors import UsageError
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.simulated.timed import with_data
from distbelief.runtime.player import Worker
from distbelief.sharding.layout import Layout
from distbelief.strategies.shared_memory.mapped import LockedStep, MappedModel
from distbelief.strategies.shared_memory.replica import Hogwild
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import Trainer, measure
from distbelief.transport.base import Arena
from distbelief.transport.virtual import VirtualEndpoint


class Racing(Simulation):
    """A simulation of replicas on one mapping; tests reach into its `memory`, its `locks` and its `peers`."""

    memory: torch.Tensor | None = None
    plan: Plan | None = None

    def _cast(self) -> None:
        self.locks, self.peers = Queues(), dict[str, _Peer]()
        super()._cast()

    def _add_replica(self, index: int, incarnation: int) -> None:
        role = roles.replica(index)
        endpoint = self._endpoint(role, incarnation)
        peer = self.peers[role] = (_Phantom if self.cluster.phantom else _Computing)(self, role, endpoint)
        self._play_story(role, peer.story(incarnation), endpoint, peer, self._store)

    def _watcher(self, flat: FlatModule) -> Worker:
        return _Reader(self, flat)

    def _crash(self, role: str) -> None:
        super()._crash(role)
        if role in self.peers:
            self.peers[role].dead = True
            for other in self.locks.bury(role):
                self.clock.call_later(0.0, self.wake, other)

    def wake(self, role: str) -> None:
        """One has a lock for which it waited."""
        self.peers[role].go_on()

    def vector(self) -> torch.Tensor:
        """The parameters and buffers as they are, 1-D uint8."""
        assert self.memory is not None and self.plan is not None  # noqa: PT018
        return self.memory[: self.plan.layout.total]

    def mapping(self, plan: Plan) -> torch.Tensor:
        """The mapping, which is there once the first replica has a plan."""
        if self.memory is None:
            self.memory, self.plan = torch.zeros(_layout_of(plan).length, dtype=torch.uint8), plan
        return self.memory


def _layout_of(plan: Plan) -> mapping.MappingLayout:
    """Where everything lies in the mapping of a job."""
    settings = plan.settings
    return mapping.mapping_layout(plan.layout, settings.optimizer, settings.shards, settings.replicas)


class _Peer:
    """One life of a replica: its steps take the time that the cluster's compute model has them take, and its updates
    that of their bytes.
    """

    counts: Counts

    def __init__(self, racing: Racing, role: str, endpoint: VirtualEndpoint) -> None:
        self._racing, self._role, self._endpoint, self.dead = racing, role, endpoint, False
        self._stopwatch = racing.cluster.compute.stopwatch(roles.index_of(role), racing.job.seed + endpoint.incarnation)
        self._locked_steps: deque[LockedStep] = deque()
        self._wanted: deque[int] = deque()
        self._then: Callable[[], None]

    def story(self, incarnation: int) -> Story:
        """What it plays."""
        layout, samples = self.layout(), len(self._racing._data)
        return Hogwild(
            self._role, layout, samples, incarnation, lambda: (self.arrays(), self.counts.facts()), self.blocked
        ).story()

    def layout(self) -> Layout:
        raise NotImplementedError

    def arrays(self) -> dict[str, Any]:
        return {}

    def locked_steps(self) -> list[LockedStep]:
        raise NotImplementedError

    def blocked(self) -> str:
        """For which lock it waits."""
        return (
            f"for the lock of range {self._wanted[0]}, which {self._racing.locks.holder(self._wanted[0])} holds"
            if self._wanted
            else ""
        )

    def begin(self, arrays: dict[str, Any] | None, facts: dict[str, Any]) -> None:
        self.counts.begin(facts)

    def measure(self) -> Measured:
        raise UsageError("a replica measures nothing")

    def update(self, samples: int, told: Callable[[], bool], answer: Callable[[bool], None]) -> bool | None:
        """Make one part of the update after the other."""

        def done() -> None:
            self.counts.add(samples)
            self._racing.clock.call_later(0.0, answer, True)

        self._locked_steps.extend(self.locked_steps())
        self._then = done
        self._line_up()
        self._advance()
        return None

    def _line_up(self) -> None:
        """Note which locks the next part needs."""
        self._wanted = deque(self._locked_steps[0].locks) if self._locked_steps else deque()

    def go_on(self) -> None:
        """A lock that was waited for is had, unless that was in another life."""
        if self._wanted and self._racing.locks.holder(self._wanted[0]) == self._role and not self.dead:
            self._wanted.popleft()
            self._advance()

    def _advance(self) -> None:
        """Take the locks of the next part, and make it when its time has passed."""
        while self._locked_steps:
            while self._wanted:
                if not self._racing.locks.ask(self._role, self._wanted[0]):
                    return
                self._wanted.popleft()
            if seconds := self._seconds(self._locked_steps[0].size):
                self._endpoint.thread.do(seconds, self._made, None)
                return
            self._make()
        self._then()

    def _seconds(self, size: int) -> float:
        """How long it takes to update so many bytes of parameters."""
        work, reduction = self._endpoint.work, self._racing.cluster.network.reduction
        return size * reduction if reduction or work is None else work.update(size)

    def _made(self, _: None) -> None:
        if not self.dead:
            self._make()
            self._advance()

    def _make(self) -> None:
        locked_step = self._locked_steps.popleft()
        with torch.no_grad():
            locked_step.act()
        for number in locked_step.locks:
            if other := self._racing.locks.give(self._role, number):
                self._racing.clock.call_later(0.0, self._racing.wake, other)
        self._line_up()


class _Computing(_Peer):
    """Computes real gradients at once, and answers when the simulated step is over."""

    def __init__(self, racing: Racing, role: str, endpoint: VirtualEndpoint) -> None:
        super().__init__(racing, role, endpoint)
        job, settings, model = racing.job, racing.settings, racing._model()
        racing.players.check_model(settings, model)
        self._trainer = Trainer(
            with_data(racing.task, racing._data),
            model,
            settings.data.batch_size,
            job.seed,
            settings.clip_norm,
            settings.data.drop_last,
        )
        self._mapped = MappedModel(racing._flat(model), roles.index_of(role))

    def layout(self) -> Layout:
        return self._mapped.flat.layout

    def arrays(self) -> dict[str, Any]:
        return self._mapped.arrays()

    def locked_steps(self) -> list[LockedStep]:
        return self._mapped.locked_steps()

    def attach(self, plan: Plan, arena: Arena) -> None:
        cut = (
            mapping.ranges(plan.layout, min(mapping.RANGES, plan.layout.parameters))
            if plan.settings.locks == "none"
            else ()
        )
        self._mapped.bind(plan, self._racing.mapping(plan), cut)
        self.counts = self._mapped.counts

    def begin(self, arrays: dict[str, Any] | None, facts: dict[str, Any]) -> None:
        self._mapped.begin(arrays, facts)

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        self._mapped.look()
        computed, seconds = self._trainer.compute(batch), self._stopwatch.draw()
        self._endpoint.thread.step(seconds, answer, Computed(computed.loss, computed.samples, seconds))
        return None


class _Phantom(_Peer):
    """Computes nothing."""

    def layout(self) -> Layout:
        layout = self._racing._layout()
        if any(layout.is_sparse(entry) for entry in mapping.trained(layout)):
            raise UsageError(
                "--phantom computes no gradients, and which rows an update writes to is in them: leave it off"
            )
        return layout

    def locked_steps(self) -> list[LockedStep]:
        locks = self._settings.locks
        return [
            LockedStep(() if locks == "none" else (number,), part.size, lambda: None)
            for number, part in enumerate(self._cut)
        ]

    def attach(self, plan: Plan, arena: Arena) -> None:
        self._settings, racing = plan.settings, self._racing
        count = {"none": mapping.RANGES, "shard": plan.settings.shards, "global": 1}[plan.settings.locks]
        self._cut = mapping.ranges(plan.layout, min(count, plan.layout.parameters))
        layout = _layout_of(plan)
        memory = racing.mapping(plan)[layout.counts : layout.length].numpy().data.cast("q")
        self.counts = Counts(memory, plan.settings.replicas, roles.index_of(self._role))

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        self.counts.look()
        seconds, settings = self._stopwatch.draw(), self._settings
        samples = min(settings.data.batch_size, len(self._racing._data) - batch.index * settings.data.batch_size)
        self._endpoint.thread.step(seconds, answer, Computed(None, samples, seconds))
        return None


class _Reader:
    """Measures for the evaluator; in no simulated time."""

    def __init__(self, racing: Racing, flat: FlatModule) -> None:
        self._racing, self._flat = racing, flat

    def attach(self, plan: Plan, arena: Arena) -> None:
        self._flat.bind((), arena.parameters)
        self._copy = arena.parameters[0]

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        raise UsageError("the evaluator computes no gradients")

    def measure(self) -> Measured:
        self._copy.copy_(self._racing.vector())
        return measure(self._racing.task, self._flat.module)
