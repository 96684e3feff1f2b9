"""What a step of a candidate takes: the virtual cluster itself, in which nothing is computed, says so.

Its parts are those that a replica tells of, there as on real processes. What binds is what the same cluster would
spare: without a network, and with messages and updates that cost nobody time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from distbelief.core.messages import FETCH
from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.core.settings import Holder
from distbelief.errors import Interrupted, JobFailed, UsageError
from distbelief.job import Job
from distbelief.lab.cost.splitting import SplitCost
from distbelief.lab.plan.candidates import Machines, PlanCandidate
from distbelief.lab.plan.trips import DirectHandling
from distbelief.places.compute_model import ComputeModel
from distbelief.places.paths import DIRECT
from distbelief.places.simulated.handling import STATES, Handling
from distbelief.places.simulated.simulated import Simulated
from distbelief.record.summary import moved
from distbelief.tasks import Data, Task, as_data
from distbelief.tasks.worker import build_model
from distbelief.transport.processors import Hosts
from distbelief.transport.virtual import NetworkModel

STEPS, LEAST_STEPS = 24, 4
"""Steps of each replica in a priced job, and at least where there are many replicas."""
MOST_SENDS = 2400
"""To how many others all replicas send in these steps, where they are not the least: a price takes time for each."""
NO_NETWORK = NetworkModel(latency=0.0, bandwidth=math.inf, local_latency=1e-12)
"""A network that costs nothing; inside of hosts too, of which 0 would mean what is usual."""
TOUCHED = 2
"""Vectors that an update reads or writes beside the optimizer's state: gradient and parameters."""


STRAGGLER = "a straggler"
"""What binds where others wait for a replica that is slower than they are, in all of its steps or now and then; and
where such a one brings fewer samples.
"""
PARTS = ("compute", "update", "communicate", "wait")
"""What a step is made of."""


class Counted:
    """Data that can only be counted: for phantoms.

    Args:
        samples: as many.
        examples: what they look like, where somebody traces a model with them.
    """

    def __init__(self, samples: int, examples: Data | None = None) -> None:
        self._samples, self._examples = samples, examples

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Tensor) -> tuple[object, object]:
        """Examples; nothing that could be computed with, where there are none."""
        if self._examples is None:
            return indices, indices
        return self._examples.batch(indices % len(self._examples))


class Terms(msgspec.Struct, frozen=True):
    """A step of one replica, in seconds, as the sum of what it is made of."""

    compute: float
    """Of its minibatch."""
    update: float
    """Of parameters that it updates itself, in memory that it shares or has alone."""
    communicate: float
    """Its other work: copying, sending, taking what arrives, adding it up."""
    wait: float
    """Until something arrives."""
    samples_per_second: float
    """Of all replicas."""
    bytes_per_step: float
    """Of gradients, parameters and what crosses between partitions: sent, or read in memory that processes share."""
    network: str = ""
    """Of a topology, which link is the busiest, and who shares it."""
    waits_for: str = ""
    """Whose words end the longest waits: shard, replica or coordinator."""
    spared: dict[str, float] = {}
    """What a step would be shorter by, where it is priced: without a network, with messages and updates that cost
    nothing, without a straggler, and without what is left then beside computing.
    """

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.update + self.communicate + self.wait

    @property
    def binds(self) -> str:
        """What a step would be shorter without, most of all."""
        return max(self.spared, key=lambda name: self.spared[name], default="")


def terms_of(result: Json) -> Terms:
    """What the steps of a job were made of, by what it leaves.

    Raises:
        JobFailed: no replica has told.
    """
    told = [one["times"] for one in result["per_replica"] if one["times"]]
    if not told:
        raise JobFailed(f"{result['strategy']} on {result['task']} ended ({result['reason']}) before a step was timed")
    steps = sum(one["steps"] for one in told) or result["steps"]  # a split replica times shares of steps
    sent = sum(moved(result["bytes"]).values()) / max(1, result["steps"])
    longest = max(told, key=lambda one: one["wait"])["waits_for"]
    parts = {part: sum(one[part] for one in told) / steps for part in PARTS}
    rate = float(result["samples_per_second"])
    network = result.get("network", {}).get("told", "")
    return Terms(**parts, samples_per_second=rate, bytes_per_step=sent, network=network, waits_for=longest)


def lasting(result: Json, batch_size: int, fetched_before: bool) -> Terms:
    """What the steps of a long job are made of, by a short one's, which begins with a fetch and ends with a push that
    are no longer beside many steps.

    A replica times its steps from its first gradient to its last, so that what lies between two gradients is there once
    less often than they are.

    Args:
        result: what the short job leaves.
        batch_size: samples in a minibatch of a replica.
        fetched_before: whether its replicas have fetched the parameters once before their first step.

    Raises:
        JobFailed: no replica has told.
    """
    found, steps = terms_of(result), []
    for one in result["per_replica"]:
        if times := one["times"]:
            count = times["steps"] or one["steps"]  # a split replica times shares of steps
            between = max(1, count - 1)
            steps.append({part: times[part] / (count if part == "compute" else between) for part in PARTS})
    parts = {part: statistics.fmean(one[part] for one in steps) for part in PARTS}
    rate = sum(batch_size / sum(one.values()) for one in steps)
    counted, sent = result["steps"], moved(result["bytes"])
    fetched = sent.pop(FETCH)
    bytes_ = sum(sent.values()) / counted + fetched / (counted + len(steps) * fetched_before)
    return msgspec.structs.replace(found, **parts, samples_per_second=rate, bytes_per_step=bytes_)


class LockstepCost(NamedTuple):
    """What steps take in which processes wait for each other, as multiples of what the same takes where nobody does."""

    gradient: float = 1.0
    """The gradient of a minibatch."""
    messages: float = 1.0
    """Messages, and the bytes that are read and written because of them."""


@dataclass(frozen=True)
class PricedCluster:
    """What candidates are priced on."""

    machines: Machines
    network: NetworkModel
    step: float
    """Seconds of a minibatch's gradient, by a profile."""
    handling: Handling
    """What messages between processes cost, and memory that another process has written."""
    own: Handling
    """What memory costs that no other process writes."""
    direct: DirectHandling = DirectHandling()
    """What pushes and fetches cost on the direct path."""
    together: float = 1.0
    """The speed of a core while all cores of its host compute, of that of one that computes alone."""
    variation: float = 0.0
    """The deviation of a step's seconds, as a fraction of them, for which those wait who wait for the slowest."""
    slow: tuple[tuple[int, float], ...] = ()
    """Replicas that are slower, and how many times."""
    splits: Mapping[int, SplitCost | str] = field(default_factory=dict)
    """What a model that is split over so many processes of one host costs, or why it cannot be split so."""
    lockstep: Mapping[tuple[str, bool], LockstepCost] = field(default_factory=dict)
    """What it costs to wait for each other, by the kind of candidate."""
    topology: str = ""
    """Between hosts; none where it is empty."""

    def lockstep_of(self, candidate: PlanCandidate) -> LockstepCost:
        """That of a candidate."""
        return self.lockstep.get(candidate.kind, LockstepCost())


class Pricing:
    """Prices candidates for a task; the model is built once, for its layout.

    Args:
        task: what is trained.
        batch_size: samples in a minibatch of a replica.
        least_steps: of each replica in a priced job; a few may be 15 % slower or 10 % faster than many,
            where the network binds.
    """

    def __init__(self, task: Task, batch_size: int, least_steps: int = LEAST_STEPS) -> None:
        model, self._train, self._least_steps = build_model(task, 0, "cpu"), task.train, least_steps
        self._task, self._batch_size = dataclasses.replace(task, model=lambda: model, test=None), batch_size

    def terms(self, candidate: PlanCandidate, cluster: PricedCluster) -> Terms:
        """What a step takes, part by part.

        Raises:
            UsageError: it cannot run there.
        """
        found, even = self.price(candidate, cluster), dataclasses.replace(cluster, slow=())
        if not cluster.slow:
            return msgspec.structs.replace(found, spared=self._spared(candidate, cluster, found))
        spared = self._spared(candidate, even, self.price(candidate, even))
        late = candidate.replicas * self._batch_size / found.samples_per_second - sum(spared.values())
        spared[STRAGGLER] = spared.get(STRAGGLER, 0.0) + max(0.0, late)
        return msgspec.structs.replace(found, spared=spared)

    def _spared(self, candidate: PlanCandidate, cluster: PricedCluster, found: Terms) -> dict[str, float]:
        """What a step would be shorter by without each, on machines that are alike."""
        samples = candidate.replicas * self._batch_size
        seconds = samples / found.samples_per_second
        free = dataclasses.replace(cluster, network=NO_NETWORK, topology="")
        without = min(seconds, samples / self.price(candidate, free).samples_per_second)
        bare = min(found.compute, without)
        varies = cluster.variation > 0 and self.meets(candidate)
        if candidate.partitions > 1 or varies:  # others wait for nobody where messages cost nothing
            free = dataclasses.replace(free, handling=_FREE, own=_FREE, direct=DirectHandling(_FREE, _FREE))
            bare = min(without, samples / self.price(candidate, free).samples_per_second)
        compute = min(found.compute, bare)
        waits = "waiting" if candidate.partitions > 1 else STRAGGLER
        return {"processor": compute, "memory and messages": without - bare, "network": seconds - without,
            waits: bare - compute}  # fmt: skip

    def price(self, candidate: PlanCandidate, cluster: PricedCluster) -> Terms:
        """What the steps of a candidate are made of there.

        Raises:
            UsageError: it cannot run there.
        """
        job = self._job(candidate, cluster.splits.get(candidate.partitions))
        slow = {replica: factor for replica, factor in cluster.slow if replica < candidate.replicas}
        compute = ComputeModel(_step(candidate, cluster), variation=cluster.variation * _meets(job), slow=slow)
        if candidate.strategy.alone:  # whose steps are all alike
            alone = Simulated(compute=compute, phantom=True, handling=Handling(memory=cluster.own.memory))
            return terms_of(_played(alone, job))
        hosts = _hosts(candidate, cluster.machines, cluster.together)
        handling = _handling(candidate, cluster, self.is_direct(candidate, cluster.machines))
        topology = cluster.topology if hosts.replicas else ""
        place = Simulated(
            cluster.network, compute, phantom=True, hosts=hosts, handling=handling, topology=topology
        )  # fmt: skip
        return lasting(_played(place, job), self._batch_size, candidate.shards > 0)

    def is_direct(self, candidate: PlanCandidate, machines: Machines) -> bool:
        """Whether its replicas make the updates themselves, in the memory of one host; not where it cannot run."""
        place = Simulated(hosts=_hosts(candidate, machines))
        try:
            return place.path_of(candidate.strategy, self._job(candidate).settings()) == DIRECT
        except UsageError:  # which its price is too
            return False

    def meets(self, candidate: PlanCandidate) -> bool:
        """Whether processes of it wait for each other in every step; not where it cannot run."""
        try:
            return _meets(self._job(candidate))
        except UsageError:  # which its price is too
            return False

    @functools.cached_property
    def _examples(self) -> Data:
        """What the split model is traced with."""
        return as_data(self._train())

    def _job(self, candidate: PlanCandidate, split: SplitCost | str | None = None) -> Job:
        """A few steps of a candidate.

        Raises:
            UsageError: its model cannot be split so.
        """
        if isinstance(split, str):
            raise UsageError(split)
        partners = candidate.partitions + (candidate.shards or candidate.replicas.bit_length())
        steps = max(self._least_steps, min(STEPS, MOST_SENDS // (candidate.replicas * partners)))
        samples = candidate.replicas * steps * self._batch_size
        task = dataclasses.replace(self._task, train=lambda: Counted(samples, self._examples if split else None))
        strategy: Any = candidate.strategy
        return Job(task, dataclasses.replace(strategy, split=split.split) if split else strategy,
            batch_size=self._batch_size, evaluate_every=0, checkpoint_every=0, snapshot_every="0")  # fmt: skip


def _played(place: Simulated, job: Job) -> Json:
    """What a job leaves there. One that is interrupted is no job of who plans."""
    try:
        return place.run(job)
    except Interrupted:
        raise KeyboardInterrupt from None


def _meets(job: Job) -> bool:
    """Whether processes wait for each other in every step: others lose nothing by steps that vary."""
    settings, own = job.settings(), job.settings().strategy
    return settings.partitions > 1 or (settings.replicas > 1 and (own.rounds or own.held_by is Holder.REPLICAS))


def _step(candidate: PlanCandidate, cluster: PricedCluster) -> float:
    """Seconds of a minibatch's gradient; of a split replica those of all its processes, which each gather it, as they
    were measured beside a step of the whole model.
    """
    found, step = cluster.splits.get(candidate.partitions), cluster.step * cluster.lockstep_of(candidate).gradient
    if not isinstance(found, SplitCost):
        return step
    whole = found.whole.gathers + found.whole.computes
    return step / whole * sum(home.computes + found.whole.gathers for home in found.homes)


def _hosts(candidate: PlanCandidate, machines: Machines, together: float = 1.0) -> Hosts:
    """The machines that the processes of a candidate share."""
    per_host = math.ceil(candidate.replicas / machines.hosts) if candidate.strategy.name != "hogwild" else 0
    alone = 0 if per_host == candidate.replicas else per_host
    return Hosts(machines.cores, alone, together=together if machines.cores > 1 else 1.0)


_FREE = Handling(0.0, math.inf)


def _handling(candidate: PlanCandidate, cluster: PricedCluster, direct: bool) -> Handling:
    """What a candidate's messages and memory cost: who shares memory wakes nobody for what is written there, but the
    other partitions of a replica; and one replica alone finds nothing there that another has written. Nobody waits in
    every step on the direct path.
    """
    several = candidate.replicas > 1
    if direct:
        return cluster.direct.among if several else cluster.direct.alone
    message, memory = cluster.handling.message, cluster.handling.memory
    if not candidate.shards:
        memory = memory if several else cluster.own.memory
        message = message if candidate.partitions > 1 else min(Handling().message, message)
    times = cluster.lockstep_of(candidate).messages
    return Handling(times * message, memory / times)


def memory_speed(optimizer: Optimizer, elements: int, seconds: float) -> Handling:
    """How fast a process's own memory is, by the seconds of an update of so many elements.

    >>> round(memory_speed(Optimizer(), 100_000, 1e-4).memory)
    8000000000
    """
    touched = (TOUCHED + STATES.get(optimizer.name, 2)) * elements * torch.float32.itemsize
    return Handling(memory=touched / max(1e-9, seconds))
