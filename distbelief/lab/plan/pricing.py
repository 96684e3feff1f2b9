"""Prices of candidates that this machine cannot run: the virtual cluster plays them, and computes nothing.

The parts of a step are those that a replica tells of, there as on real processes. What binds is what the same cluster
would spare: without a network, and with messages and updates that cost nobody time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from distbelief.core.messages import FETCH
from distbelief.core.optimizer import Optimizer
from distbelief.core.records import Json
from distbelief.errors import Interrupted, JobFailed, UsageError
from distbelief.job import Job
from distbelief.lab.cost.splitting import SplitCost
from distbelief.lab.plan.candidates import Machines, PlanCandidate
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import STATES, Handling
from distbelief.places.simulated.simulated import Simulated
from distbelief.record.summary import PARTS, moved
from distbelief.strategies.base import is_alone
from distbelief.tasks import Data, Task, as_data
from distbelief.tasks.worker import build_model
from distbelief.transport.cluster_model import Hosts, NetworkModel

STEPS, LEAST_STEPS = 24, 4
"""Steps of each replica in a priced job, and at least where there are many replicas."""
MOST_SENDS = 2400
"""To how many others all replicas send in these steps, where they are not the least: a price takes time for each."""
NO_NETWORK = NetworkModel(latency=0.0, bandwidth=math.inf, local_latency=1e-12)
"""A network that costs nothing; inside of hosts too, of which 0 would mean what is usual."""
TOUCHED = 2
"""Vectors that an update reads or writes beside the optimizer's state: gradient and parameters."""


STRAGGLER = "a straggler"
"""Bound of a step where a replica is slower than the others: they wait for it, or it brings fewer samples."""


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
    """Gradient of its minibatch."""
    update: float
    """Update of parameters by the replica itself, in memory that it shares or has alone."""
    communicate: float
    """Its other work: copying, sending, taking what arrives, adding it up."""
    wait: float
    """Until something arrives."""
    samples_per_second: float
    """Samples a second of all replicas."""
    bytes_per_step: float
    """Bytes of gradients, parameters and what crosses between partitions: sent, or read in shared memory."""
    network: str = ""
    """Busiest link of a topology, and who shares it."""
    waits_for: str = ""
    """Sender whose messages end the longest waits: shard, replica or coordinator."""
    spared: dict[str, float] = {}
    """Seconds by which a priced step would be shorter: without a network, with messages and updates that cost nothing,
    without a straggler, and without the waits that are left then.
    """

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.update + self.communicate + self.wait

    @property
    def binds(self) -> str:
        """Bound without which a step would be shortest."""
        return max(self.spared, key=lambda name: self.spared[name], default="")


def terms_of(result: Json, candidate: PlanCandidate, batch_size: int) -> Terms:
    """Take from the result of a short job what the steps of a long one are made of.

    A replica times its steps from its first gradient to its last: what lies between two gradients is there once less
    often than they are. A short job also begins with a fetch and ends with a push, which are nothing beside many steps.

    Args:
        result: what the job has left.
        candidate: how it was trained.
        batch_size: samples in a minibatch of a replica.

    Raises:
        JobFailed: no replica has timed a step.
    """
    timed = [replica for replica in result["per_replica"] if replica["times"]]
    if not timed:
        raise JobFailed(f"{candidate} ended ({result['reason']}) before a step was timed")
    steps = []
    for replica in timed:
        times = replica["times"]
        count = times["steps"] or replica["steps"]  # a split replica times shares of steps
        between = count if is_alone(candidate.strategy) else max(1, count - 1)
        steps.append({part: times[part] / (count if part == "compute" else between) for part in PARTS})
    sent, fetches = moved(result["bytes"]), result["steps"] + len(steps) * (candidate.shards > 0)
    fetched = sent.pop(FETCH)
    return Terms(
        **{part: sum(step[part] for step in steps) / len(steps) for part in PARTS},
        samples_per_second=sum(batch_size / sum(step.values()) for step in steps),
        bytes_per_step=sum(sent.values()) / max(1, result["steps"]) + fetched / max(1, fetches),
        network=result.get("network", {}).get("told", ""),
        waits_for=max((replica["times"] for replica in timed), key=lambda times: times["wait"])["waits_for"],
    )


@dataclass(frozen=True)
class PricedCluster:
    """Cluster on which candidates are priced."""

    machines: Machines
    network: NetworkModel
    step: float
    """Seconds of a minibatch's gradient, as one process of this machine takes them."""
    handling: Handling
    """Costs of messages between processes, and of memory that another process has written: the carriers' figures."""
    own: Handling
    """Cost of memory that no other process writes."""
    together: float = 1.0
    """The speed of a core while all cores of its host compute, of that of one that computes alone."""
    slow: tuple[tuple[int, float], ...] = ()
    """Replicas that are slower, and how many times."""
    splits: Mapping[int, SplitCost | str] = field(default_factory=dict)
    """Cost of a model that is split over so many processes of one host, or why it cannot be split so."""
    topology: str = ""
    """Between hosts; none where it is empty."""


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
        """Price a candidate's step, part by part.

        Raises:
            UsageError: it cannot run there.
        """
        terms, even = self.price(candidate, cluster), dataclasses.replace(cluster, slow=())
        if not cluster.slow:
            return msgspec.structs.replace(terms, spared=self._spared(candidate, cluster, terms))
        spared = self._spared(candidate, even, self.price(candidate, even))
        late = candidate.replicas * self._batch_size / terms.samples_per_second - sum(spared.values())
        spared[STRAGGLER] = max(0.0, late)
        return msgspec.structs.replace(terms, spared=spared)

    def _spared(self, candidate: PlanCandidate, cluster: PricedCluster, terms: Terms) -> dict[str, float]:
        """Return the seconds by which a step would be shorter without each bound, on machines that are alike."""
        samples = candidate.replicas * self._batch_size
        seconds = samples / terms.samples_per_second
        free = dataclasses.replace(cluster, network=NO_NETWORK, topology="")
        without = min(seconds, samples / self.price(candidate, free).samples_per_second)
        bare = min(terms.compute, without)
        if candidate.partitions > 1:  # others wait for nobody where messages cost nothing
            free = dataclasses.replace(free, handling=_FREE, own=_FREE)
            bare = min(without, samples / self.price(candidate, free).samples_per_second)
        compute = min(terms.compute, bare)
        parts = {"processor": compute, "memory and messages": without - bare, "network": seconds - without}
        return {**parts, "waiting": bare - compute}

    def price(self, candidate: PlanCandidate, cluster: PricedCluster) -> Terms:
        """Return the parts of a candidate's steps on a cluster.

        Raises:
            UsageError: it cannot run there.
        """
        job = self._job(candidate, cluster.splits.get(candidate.partitions))
        slow = {replica: factor for replica, factor in cluster.slow if replica < candidate.replicas}
        compute = ComputeModel(_step(candidate, cluster), variation=0.0, slow=slow)
        place = Simulated(compute=compute, phantom=True, handling=Handling(memory=cluster.own.memory))
        if not is_alone(candidate.strategy):
            hosts = _hosts(candidate, cluster.machines, cluster.together)
            handling, topology = _handling(candidate, cluster), cluster.topology if hosts.replicas else ""
            place = Simulated(cluster.network, compute, phantom=True, hosts=hosts, handling=handling, topology=topology)
        try:
            result = place.run(job)
        except Interrupted:  # of the simulated job, where the plan is meant
            raise KeyboardInterrupt from None
        return terms_of(result, candidate, self._batch_size)

    @functools.cached_property
    def _examples(self) -> Data:
        """Samples with which the split model is traced."""
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
        if split:
            strategy = dataclasses.replace(strategy, split=split.split.text)
        size = self._batch_size
        return Job(task, strategy, batch_size=size, evaluate_every=0, checkpoint_every=0, snapshot_every="0")


def _step(candidate: PlanCandidate, cluster: PricedCluster) -> float:
    """Seconds of a minibatch's gradient; of a split replica, of all its processes as timed beside the whole model."""
    split = cluster.splits.get(candidate.partitions)
    if not isinstance(split, SplitCost):
        return cluster.step
    whole = split.whole.gathers + split.whole.computes
    return cluster.step / whole * sum(partition.computes + split.whole.gathers for partition in split.partition_costs)


def _hosts(candidate: PlanCandidate, machines: Machines, together: float = 1.0) -> Hosts:
    """The machines that the processes of a candidate share."""
    per_host = math.ceil(candidate.replicas / machines.hosts) if candidate.strategy.name != "hogwild" else 0
    alone = 0 if per_host == candidate.replicas else per_host
    return Hosts(machines.cores, alone, together=together if machines.cores > 1 else 1.0)


_FREE = Handling(0.0, math.inf)


def _handling(candidate: PlanCandidate, cluster: PricedCluster) -> Handling:
    """Return the costs of a candidate's messages and memory.

    Without shards, one replica alone finds nothing in its memory that another process has written.
    """
    alone = not candidate.shards and candidate.replicas == 1
    return Handling(cluster.handling.message, (cluster.own if alone else cluster.handling).memory)


def memory_speed(optimizer: Optimizer, elements: int, seconds: float) -> Handling:
    """Derive the speed of a process's own memory from the seconds of an update of so many elements.

    >>> round(memory_speed(Optimizer(), 100_000, 1e-4).memory)
    8000000000
    """
    touched = (TOUCHED + STATES.get(optimizer.name, 2)) * elements * torch.float32.itemsize
    return Handling(memory=touched / max(1e-9, seconds))
