"""One run of a simulated job without a server: its replicas send each other the pieces of their gradients over the
virtual network.
"""

from __future__ import annotations

from collections.abc import Callable

from distbelief.core import roles
from distbelief.core.buckets import Bucket, buckets, shares
from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Plan
from distbelief.errors import UsageError
from distbelief.places.compute_model import Stopwatch
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.simulated.timed import with_data
from distbelief.schedules.allreduce import by_host
from distbelief.schedules.price import CHOICES, Link, cheapest
from distbelief.strategies.allreduce.replica import Allreduce
from distbelief.strategies.allreduce.torch_whole import TorchWhole
from distbelief.strategies.allreduce.whole import PhantomWhole
from distbelief.tasks.worker import Trainer, check_measure, measure
from distbelief.transport.base import Arena
from distbelief.transport.virtual import HEADER, VirtualEndpoint


class Assembled(Simulation):
    """A simulation whose replicas reduce their gradients among themselves; `peers` are their stories."""

    def _cast(self) -> None:
        self.peers: dict[str, Allreduce] = {}
        super()._cast()

    def _add_replica(self, index: int, incarnation: int) -> None:
        role, samples = roles.replica(index), len(self._data)
        stopwatch = self.cluster.compute.stopwatch(index, self.job.seed + incarnation)
        worker: _Worker | _Phantom
        endpoint = self._endpoint(role, incarnation)
        if self.cluster.phantom:
            worker = _Phantom(endpoint, stopwatch, samples, PhantomWhole(self._layout()))
        else:
            model = self._model()
            whole = TorchWhole(self._flat(model))
            settings = self.settings
            trainer = Trainer(
                with_data(self.task, self._data),
                model,
                settings.data.batch_size,
                settings.seed,
                drop_last=settings.data.drop_last,
            )
            if self.evaluates and index == 0 and not incarnation:
                check_measure(self.task, model)
            worker = _Worker(endpoint, stopwatch, trainer, whole)
        story = self.peers[role] = Allreduce(
            role, worker.whole, samples, incarnation=incarnation, gradual=True, choose=self._choose
        )
        self._play_story(role, story.story(), endpoint, worker, self._store)

    def _choose(self, bucket: Bucket, ranks: int) -> str:
        """The cheapest algorithm for a bucket on this network."""
        network = self.network.model
        adding = network.reduction or self.cluster.handling.addition
        link, inside = Link(network.latency, network.bandwidth, adding), self.network.inside
        within = Link(inside.latency, inside.bandwidth, adding) if inside else None
        hosts = by_host(ranks, self.settings.per_host)
        return cheapest(ranks, bucket.length, bucket.item, link, within, hosts, CHOICES, HEADER)


class _Gradual:
    """A worker whose first bucket is ready before its step is over; when the others are, its story asks the clock.

    A step takes longer by the copying of its gradient into the vector that is added up, and by its share of the update
    after its round.
    """

    def __init__(self, endpoint: VirtualEndpoint, stopwatch: Stopwatch) -> None:
        self._endpoint, self._stopwatch = endpoint, stopwatch
        self._first, self._more = 1.0, 0.0

    def attach(self, plan: Plan, arena: Arena) -> None:
        self._first = shares([*buckets(plan.layout, plan.settings.bucket_mb)])[0]
        if (work := self._endpoint.work) is not None:
            trained = plan.layout.trained.size
            self._more = work.copy(trained) + work.update(trained) / plan.settings.push_every

    def _answer(self, loss: float | None, samples: int, answer: Callable[[Computed], None]) -> None:
        seconds = self._stopwatch.draw()
        self._endpoint.thread.owe(self._more)
        self._endpoint.thread.step(seconds * self._first, answer, Computed(loss, samples, seconds))


class _Worker(_Gradual):
    """Computes real gradients at once."""

    def __init__(self, endpoint: VirtualEndpoint, stopwatch: Stopwatch, trainer: Trainer, whole: TorchWhole) -> None:
        super().__init__(endpoint, stopwatch)
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

    def __init__(self, endpoint: VirtualEndpoint, stopwatch: Stopwatch, samples: int, whole: PhantomWhole) -> None:
        super().__init__(endpoint, stopwatch)
        self._samples, self.whole = samples, whole

    def attach(self, plan: Plan, arena: Arena) -> None:
        super().attach(plan, arena)
        self._batch_size = plan.settings.data.batch_size

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        self._answer(None, min(self._batch_size, self._samples - batch.index * self._batch_size), answer)
        return None

    def measure(self) -> Measured:
        raise UsageError("a phantom measures nothing")
