"""What may be done on some machines: strategies and how many replicas and shards they have, and the memory of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distbelief.core.optimizer import Optimizer
from distbelief.costs.trace import GRADIENTS, PARAMETERS, STATE, MemoryTrace
from distbelief.errors import UsageError, unknown
from distbelief.strategies import Allreduce, Downpour, Hogwild, Single, Strategy, Synchronous
from distbelief.strategies.base import Partitioned, Replicated, Served

PLANNED = ("single", "downpour", "synchronous", "allreduce", "hogwild")
"""The strategies that are planned."""
MOST_HOSTS, MOST_CORES = 256, 256
MOST_REPLICAS = 256
"""The most replicas that a candidate has: a plan is to be there in seconds."""
MOST_PARTITIONS = 4
"""The most processes that a model is split over: each number of them is measured."""
REPLICA_VECTORS = {"served": 4, "allreduce": 3, "hogwild": 1, "single": 2}
"""Vectors as long as the parameters that a replica holds, and `SHARD_VECTORS` that a shard does, without the state of
an optimizer: what `bench memory` holds them to.
"""
SHARD_VECTORS = 3


@dataclass(frozen=True)
class Machines:
    """So many hosts, each of so many cores.

    Raises:
        UsageError: numbers that cannot be.
    """

    hosts: int
    cores: int

    def __post_init__(self) -> None:
        for name, number, most in (("hosts", self.hosts, MOST_HOSTS), ("cores", self.cores, MOST_CORES)):
            if not 1 <= number <= most:
                raise UsageError(f"--machines {self}: {number} {name}, must be from 1 to {most}")

    def __str__(self) -> str:
        return f"{self.hosts}x{self.cores}"


@dataclass(frozen=True)
class PlanCandidate:
    """One way of training."""

    strategy: Strategy

    @property
    def replicas(self) -> int:
        """How many there are; 1 where one process plays everything."""
        return self.strategy.replicas if isinstance(self.strategy, Replicated) else 1

    @property
    def shards(self) -> int:
        """Server processes."""
        return self.strategy.shards if isinstance(self.strategy, Served) else 0

    @property
    def partitions(self) -> int:
        """Processes that each replica is split over."""
        return self.strategy.partitions if isinstance(self.strategy, Partitioned) else 1

    def __str__(self) -> str:
        partitions = f", {_times(self.partitions, 'partition')}" if self.partitions > 1 else ""
        shards = f", {_times(self.shards, 'shard')}" if self.shards else ""
        many = f", {_times(self.replicas, 'replica')}" if isinstance(self.strategy, Replicated) else ""
        return f"{self.strategy.name}{many}{partitions}{shards}"

    @property
    def command(self) -> str:
        """The words of it on the command line.

        >>> PlanCandidate(Downpour(replicas=4, shards=1)).command
        'downpour --replicas 4 --shards 1'
        """
        words = [self.strategy.name]
        words += ["--replicas", str(self.replicas)] if isinstance(self.strategy, Replicated) else []
        words += ["--partitions", str(self.partitions)] if self.partitions > 1 else []
        words += ["--shards", str(self.shards)] if self.shards else []
        return " ".join(words)


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def candidates(machines: Machines, names: Sequence[str], optimizer: Optimizer) -> list[PlanCandidate]:
    """Every strategy with as many replicas as the powers of two, and as the machines have cores; a shard on each host.
    One model is also split, in the way that its operations make the best, over as many processes of one host.

    Raises:
        UsageError: a strategy that is not planned.

    >>> [str(one) for one in candidates(Machines(1, 2), ["single", "downpour"], Optimizer())]
    ['single', 'single, 2 partitions', 'downpour, 1 replica, 1 shard', 'downpour, 2 replicas, 1 shard']
    """
    for name in names:
        if name not in PLANNED:
            raise unknown("strategy of a plan", name, PLANNED)
    found: list[PlanCandidate] = []
    for name in dict.fromkeys(names):
        most = machines.cores if name == "hogwild" else machines.hosts * machines.cores
        if name == "single":
            parts = _counts(min(machines.cores, MOST_PARTITIONS))
            found += [PlanCandidate(Single(optimizer=optimizer, partitions=number)) for number in parts]
            continue
        for replicas in _counts(min(most, MOST_REPLICAS)):
            shards = min(machines.hosts, replicas)
            made: dict[str, Strategy] = {
                "downpour": Downpour(replicas=replicas, shards=shards, optimizer=optimizer),
                "synchronous": Synchronous(replicas=replicas, shards=shards, optimizer=optimizer),
                "allreduce": Allreduce(replicas=replicas, optimizer=optimizer),
                "hogwild": Hogwild(replicas=replicas, optimizer=optimizer),
            }
            if replicas > 1 or name in ("downpour", "hogwild"):  # one replica in rounds is single, with messages
                found.append(PlanCandidate(made[name]))
    return found


def _counts(most: int) -> Iterable[int]:
    """The powers of two, and the most.

    >>> list(_counts(6))
    [1, 2, 4, 6]
    """
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def memory(candidate: PlanCandidate, trace: MemoryTrace, process: int) -> dict[str, int]:
    """Bytes of each kind of process of a candidate.

    Args:
        candidate: what is done.
        trace: an iteration of a plain loop, with the optimizer.
        process: bytes of a process without a model.
    """
    parameters, state = trace.memory[PARAMETERS], trace.memory[STATE]
    passing = max(0, trace.peak - parameters - state - trace.memory[GRADIENTS])
    if candidate.shards:
        held = math.ceil((SHARD_VECTORS * parameters + state) / candidate.shards)
        return {
            "replica": process + REPLICA_VECTORS["served"] * parameters + passing,
            "shard": process + held,
        }
    own = REPLICA_VECTORS[candidate.strategy.name] * parameters + passing
    return {"replica": process + own + parameters + state}
