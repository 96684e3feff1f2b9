"""Prices of candidates on machines beyond this one, from the virtual cluster, which computes nothing.

Replicas report the parts of a step as real processes do. The bound of a step is the cost whose removal from the same
cluster saves the most.
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
"""Steps of each replica in a priced job, and the least with many replicas."""
MOST_SENDS = 2400
"""Limit of all replicas' sends in these steps, as each takes time to simulate."""
NO_NETWORK = NetworkModel(latency=0.0, bandwidth=math.inf, local_latency=1e-12)
"""Network without costs; a local latency of 0 would mean the default inside of hosts."""
TOUCHED = 2
STRAGGLER = "a straggler"
"""Bound of a step with a slower replica, which others wait for, or which brings fewer samples."""


class Counted:
    """Data set of some length without values, for phantom models."""

    def __init__(self, samples: int, examples: Data | None = None) -> None:
        self._samples, self._examples = samples, examples

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Tensor) -> tuple[object, object]:
        """Return examples, or the indices if there are none."""
        if self._examples is None:
            return indices, indices
        return self._examples.batch(indices % len(self._examples))


class Terms(msgspec.Struct, frozen=True):
    """Step of one replica in seconds, as the sum of its parts."""

    compute: float
    update: float
    """Update of parameters by the replica itself, in shared memory or its own."""
    communicate: float
    """Its other work: copying, sending, receiving and summing."""
    wait: float
    samples_per_second: float
    bytes_per_step: float
    """Bytes of gradients, parameters and transfers between partitions: sent, or read in shared memory."""
    network: str = ""
    waits_for: str = ""
    """Sender that ends the longest waits: shard, replica or coordinator."""
    spared: dict[str, float] = {}
    """Seconds of a priced step, by the bound that causes them.

    The step would save them without a network, then with free messages and updates, without a straggler, and without
    the remaining waits. What is left is the processor's.
    """

    @property
    def step(self) -> float:
        """Return the seconds of the whole step."""
        return self.compute + self.update + self.communicate + self.wait

    @property
    def binds(self) -> str:
        """Return the bound whose removal saves the most."""
        return max(self.spared, key=lambda name: self.spared[name], default="")


def terms_of(result: Json, candidate: PlanCandidate, batch_size: int) -> Terms:
    """Derive the parts of a long job's steps from the result of a short job.

    A replica's times run from its first gradient to its last, with one gap fewer than gradients. The short job's first
    fetch and last push do not count: among many steps they are negligible.
    """
    timed = [replica for replica in result["per_replica"] if replica["times"]]
    if not timed:
        raise JobFailed(f"{candidate} ended ({result['reason']}) before a step was timed")
    steps = []
    for replica in timed:
        times = replica["times"]
        count = times["steps"] or replica["steps"]  # a split replica counts shares of steps
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
    """Cluster that prices candidates."""

    machines: Machines
    network: NetworkModel
    step: float
    handling: Handling
    """Costs of messages between processes, and of memory that other processes wrote."""
    private: Handling
    """Cost of memory that no other process writes."""
    together: float = 1.0
    """Speed of a core while all cores of its host compute, over that of a core alone."""
    slow: tuple[tuple[int, float], ...] = ()
    splits: Mapping[int, SplitCost | str] = field(default_factory=dict)
    """Cost of the model split over each number of processes of one host, or why it cannot be."""
    topology: str = ""


class Pricing:
    """Prices of a task's candidates; the model is built once, for its layout.

    With few steps of each replica, prices on a slow network may be 15 % higher or 10 % lower than with many.
    """

    def __init__(self, task: Task, batch_size: int, least_steps: int = LEAST_STEPS) -> None:
        model, self._train, self._least_steps = build_model(task, 0, "cpu"), task.train, least_steps
        self._task, self._batch_size = dataclasses.replace(task, model=lambda: model, test=None), batch_size

    def terms(self, candidate: PlanCandidate, cluster: PricedCluster) -> Terms:
        """Return the parts of a candidate's step, with what each bound would spare."""
        terms, even = self.price(candidate, cluster), dataclasses.replace(cluster, slow=())
        if not cluster.slow:
            return msgspec.structs.replace(terms, spared=self._spared(candidate, cluster, terms))
        spared = self._spared(candidate, even, self.price(candidate, even))
        late = candidate.replicas * self._batch_size / terms.samples_per_second - sum(spared.values())
        spared[STRAGGLER] = max(0.0, late)
        return msgspec.structs.replace(terms, spared=spared)

    def _spared(self, candidate: PlanCandidate, cluster: PricedCluster, terms: Terms) -> dict[str, float]:
        samples = candidate.replicas * self._batch_size
        seconds = samples / terms.samples_per_second
        free = dataclasses.replace(cluster, network=NO_NETWORK, topology="")
        without = min(seconds, samples / self.price(candidate, free).samples_per_second)
        bare = min(terms.compute, without)
        if candidate.partitions > 1:  # without partitions, nothing waits once messages are free
            free = dataclasses.replace(free, handling=_FREE, private=_FREE)
            bare = min(without, samples / self.price(candidate, free).samples_per_second)
        compute = min(terms.compute, bare)
        parts = {"processor": compute, "memory and messages": without - bare, "network": seconds - without}
        return {**parts, "waiting": bare - compute}

    def price(self, candidate: PlanCandidate, cluster: PricedCluster) -> Terms:
        """Return the parts of a candidate's step on a cluster."""
        job = self._job(candidate, cluster.splits.get(candidate.partitions))
        slow = {replica: factor for replica, factor in cluster.slow if replica < candidate.replicas}
        compute = ComputeModel(_step(candidate, cluster), variation=0.0, slow=slow)
        place = Simulated(compute=compute, phantom=True, handling=Handling(memory=cluster.private.memory))
        if not is_alone(candidate.strategy):
            hosts = _hosts(candidate, cluster.machines, cluster.together)
            handling, topology = _handling(candidate, cluster), cluster.topology if hosts.replicas else ""
            place = Simulated(cluster.network, compute, phantom=True, hosts=hosts, handling=handling, topology=topology)
        try:
            result = place.run(job)
        except Interrupted:  # the error's message is about a job, not the plan
            raise KeyboardInterrupt from None
        return terms_of(result, candidate, self._batch_size)

    @functools.cached_property
    def _examples(self) -> Data:
        return as_data(self._train())

    def _job(self, candidate: PlanCandidate, split: SplitCost | str | None = None) -> Job:
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
    """Return the seconds of a minibatch's gradient; those of a split replica cover all its processes."""
    split = cluster.splits.get(candidate.partitions)
    if not isinstance(split, SplitCost):
        return cluster.step
    whole = split.whole.gathers + split.whole.computes
    return cluster.step / whole * sum(partition.computes + split.whole.gathers for partition in split.partition_costs)


def _hosts(candidate: PlanCandidate, machines: Machines, together: float) -> Hosts:
    per_host = math.ceil(candidate.replicas / machines.hosts) if candidate.strategy.name != "hogwild" else 0
    alone = 0 if per_host == candidate.replicas else per_host
    return Hosts(machines.cores, alone, together=together if machines.cores > 1 else 1.0)


_FREE = Handling(0.0, math.inf)


def _handling(candidate: PlanCandidate, cluster: PricedCluster) -> Handling:
    """Return the costs of a candidate's messages and memory.

    Without shards, a single replica reads only its own memory.
    """
    alone = not candidate.shards and candidate.replicas == 1
    return Handling(cluster.handling.message, (cluster.private if alone else cluster.handling).memory)


def memory_speed(optimizer: Optimizer, elements: int, seconds: float) -> Handling:
    """Return the speed of a process's own memory, from the seconds of an update of these elements.

    >>> round(memory_speed(Optimizer(), 100_000, 1e-4).memory)
    8000000000
    """
    touched = (TOUCHED + STATES.get(optimizer.name, 2)) * elements * torch.float32.itemsize
    return Handling(memory=touched / max(1e-9, seconds))
