"""One run of a simulated job without a server: its replicas send each other the pieces of their gradients over the virtual network."""

from __future__ import annotations

from collections.abc import Callable

from distbelief.cluster.pace import Stopwatch
from distbelief.cluster.simulation import Simulation, with_data
from distbelief.core import roles
from distbelief.core.algorithms import by_host
from distbelief.core.buckets import Bucket, buckets, shares
from distbelief.core.cost import CHOICES, Link, cheapest
from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Plan
from distbelief.errors import UsageError
from distbelief.replica.allreduce import Allreduce
from distbelief.replica.whole import PhantomWhole
from distbelief.runtime.clock import VirtualClock
from distbelief.runtime.whole import TorchWhole
from distbelief.tasks.worker import Trainer, measure
from distbelief.transport.base import Arena
from distbelief.transport.virtual import HEADER


class Assembled(Simulation):
    """A simulation whose replicas reduce their gradients among themselves; `peers` are their stories."""

    def _cast_servers(self) -> None:
        self.peers: dict[str, Allreduce] = {}

    def _add_replica(self, index: int, incarnation: int = 0) -> None:
        role, samples = roles.replica(index), len(self._data)
        stopwatch = self.cluster.pace.stopwatch(index, self.job.seed + incarnation)
        worker: _Worker | _Phantom
        if self.cluster.phantom:
            worker = _Phantom(self.clock, stopwatch, samples, PhantomWhole(self._layout()))
        else:
            model = self._model()
            trainer = Trainer(with_data(self.task, self._data), model, self.settings.batch_size, self.job.seed)
            worker = _Worker(self.clock, stopwatch, trainer, TorchWhole(self._flat(model)))
        story = self.peers[role] = Allreduce(role, worker.whole, samples, incarnation=incarnation, gradual=True, choose=self._choose)
        self._play_story(role, story.story(), incarnation, worker, self._store)

    def _choose(self, bucket: Bucket, ranks: int) -> str:
        """The cheapest algorithm for a bucket on this network."""
        weather = self.network.weather
        link, inside = Link(weather.latency, weather.bandwidth, weather.reduction), self.network.inside
        within = Link(inside.latency, inside.bandwidth, weather.reduction) if inside else None
        hosts = by_host(ranks, self.settings.per_host)
        return cheapest(ranks, bucket.length, bucket.item, link, within, hosts, CHOICES, HEADER)


class _Gradual:
    """A worker whose first bucket is ready before its step is over; when the others are, its story asks the clock."""

    def __init__(self, clock: VirtualClock, stopwatch: Stopwatch) -> None:
        self._clock, self._stopwatch = clock, stopwatch
        self._first = 1.0

    def attach(self, plan: Plan, arena: Arena) -> None:
        self._first = shares([*buckets(plan.layout, plan.settings.bucket_mb)])[0]

    def _answer(self, loss: float | None, samples: int, answer: Callable[[Computed], None]) -> None:
        seconds = self._stopwatch.draw()
        self._clock.call_later(seconds * self._first, answer, Computed(loss, samples, seconds))


class _Worker(_Gradual):
    """Computes real gradients at once."""

    def __init__(self, clock: VirtualClock, stopwatch: Stopwatch, trainer: Trainer, whole: TorchWhole) -> None:
        super().__init__(clock, stopwatch)
        self._trainer, self.whole = trainer, whole

    def attach(self, plan: Plan, arena: Arena) -> None:
        super().attach(plan, arena)
        self.whole.bind(plan)

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        computed = self._trainer.compute(batch)
        self._answer(computed.loss, computed.samples, answer)
        return None

    def measure(self) -> Measured:
        return measure(self._trainer.task, self._trainer.model)


class _Phantom(_Gradual):
    """Computes nothing."""

    def __init__(self, clock: VirtualClock, stopwatch: Stopwatch, samples: int, whole: PhantomWhole) -> None:
        super().__init__(clock, stopwatch)
        self._samples, self.whole = samples, whole

    def attach(self, plan: Plan, arena: Arena) -> None:
        super().attach(plan, arena)
        self._batch_size = plan.settings.batch_size

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        self._answer(None, min(self._batch_size, self._samples - batch.index * self._batch_size), answer)
        return None

    def measure(self) -> Measured:
        raise UsageError("a phantom measures nothing")
