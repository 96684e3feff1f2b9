"""What a step of a candidate takes: the virtual cluster itself, in which nothing is computed, says so.

Its parts are what the same cluster would spare: without a network, and with messages and updates that cost nobody time.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from distbelief.core.optimizer import Optimizer
from distbelief.costs import updates
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import STATES, Handling
from distbelief.places.simulated.simulated import Simulated
from distbelief.planner.candidates import Candidate, Machines
from distbelief.tasks import Task
from distbelief.tasks.worker import build_model
from distbelief.transport.processors import Hosts
from distbelief.transport.virtual import NetworkModel

STEPS, MOST_STEPS = 24, 800
"""Steps of each replica in a priced job; of all replicas together, at least two each."""
NO_NETWORK = NetworkModel(latency=0.0, bandwidth=math.inf, local_latency=1e-12)
"""A network that costs nothing; inside of hosts too, of which 0 would mean what is usual."""
TOUCHED = 2
"""Vectors that an update reads or writes beside the optimizer's state: gradient and parameters."""


class Counted:
    """Data that can only be counted: for phantoms.

    Args:
        samples: as many.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Nothing that could be computed with."""
        return indices, indices


class Terms(msgspec.Struct, frozen=True):
    """A step of one replica, in seconds, as the sum of its parts."""

    compute: float
    """Of its minibatch."""
    update: float
    """What updates and the handling of messages add."""
    communicate: float
    """What the network adds."""
    wait: float
    """What is left: for others, in rounds and for cores."""
    samples_per_second: float
    """Of all replicas."""
    bytes_per_step: float
    """Of gradients and parameters that a replica pushes and fetches; 0 where that is not through shards."""

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.update + self.communicate + self.wait

    @property
    def binds(self) -> str:
        """What a step would be shorter without, most of all."""
        parts = {"processor": self.compute, "memory and messages": self.update, "network": self.communicate,
                 "waiting": self.wait}  # fmt: skip
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Cluster:
    """What candidates are priced on."""

    machines: Machines
    network: NetworkModel
    step: float
    """Seconds of a minibatch's gradient, by a profile."""
    handling: Handling
    slow: tuple[tuple[int, float], ...] = ()
    """Replicas that are slower, and how many times."""


class Pricing:
    """Prices candidates for a task; the model is built once, for its layout.

    Args:
        task: what is trained.
        batch_size: samples in a minibatch of a replica.
    """

    def __init__(self, task: Task, batch_size: int) -> None:
        model = build_model(task, 0, "cpu")
        self._task, self._batch_size = dataclasses.replace(task, model=lambda: model, test=None), batch_size

    def terms(self, candidate: Candidate, cluster: Cluster) -> Terms:
        """What a step takes, part by part.

        Raises:
            UsageError: it cannot run there.
        """
        rate, sent = self.rate(candidate, cluster)
        seconds = candidate.replicas * self._batch_size / rate
        free = dataclasses.replace(cluster, network=NO_NETWORK)
        spared = [self.rate(candidate, one)[0] for one in (free, dataclasses.replace(free, handling=_FREE))]
        without, bare = (min(seconds, candidate.replicas * self._batch_size / one) for one in spared)
        bare = min(bare, without)
        compute = min(cluster.step, bare)
        return Terms(compute, without - bare, seconds - without, bare - compute, rate, sent)

    def rate(self, candidate: Candidate, cluster: Cluster) -> tuple[float, float]:
        """Samples a second of all replicas, and bytes that a step of one pushes and fetches.

        Raises:
            UsageError: it cannot run there.
        """
        replicas = candidate.replicas
        steps = max(2, min(STEPS, MOST_STEPS // replicas))
        task = dataclasses.replace(self._task, train=lambda: Counted(replicas * steps * self._batch_size))
        job = Job(task, candidate.strategy, batch_size=self._batch_size, evaluate_every=0, checkpoint_every=0,
            snapshot_every="0")  # fmt: skip
        slow = {replica: factor for replica, factor in cluster.slow if replica < replicas}
        compute = ComputeModel(step=cluster.step, spread="constant", slow=slow)
        if not candidate.strategy.coordinated:
            place = Simulated(compute=compute, phantom=True, handling=Handling(memory=cluster.handling.memory))
        else:
            per_host = math.ceil(replicas / cluster.machines.hosts) if candidate.strategy.name != "hogwild" else 0
            hosts = Hosts(cluster.machines.cores, 0 if per_host == replicas else per_host)
            place = Simulated(cluster.network, compute, phantom=True, hosts=hosts, handling=cluster.handling)
        result = place.run(job)
        sent = result["bytes"]["pushed"] + result["bytes"]["fetched"]
        return float(result["samples_per_second"]), sent / max(1, result["steps"])


_FREE = Handling(0.0, math.inf)


def handling(optimizer: Optimizer, elements: int) -> Handling:
    """What messages and bytes cost here: the memory's speed is that of an update, measured.

    >>> handling(Optimizer(), 100_000).memory > 1e8
    True
    """
    taken = updates.measure(optimizer, elements).seconds
    touched = (TOUCHED + STATES.get(optimizer.name, 2)) * elements * torch.float32.itemsize
    return Handling(memory=touched / max(1e-9, taken))
