"""Candidates of a plan: strategies with numbers of replicas, shards and partitions, and memory of their processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distbelief.core.optimizer import Optimizer
from distbelief.errors import UsageError, unknown
from distbelief.lab.cost.options import MOST_REPLICAS
from distbelief.lab.cost.splitting import KEPT, SplitCost
from distbelief.lab.cost.trace import GRADIENTS, PARAMETERS, STATE, MemoryTrace
from distbelief.record.summary import many
from distbelief.strategies import Allreduce, Downpour, Hogwild, Single, Strategy, Synchronous
from distbelief.strategies.base import Partitioned, Replicated, Served

PLANNED = ("single", "downpour", "synchronous", "allreduce", "hogwild")
MOST_HOSTS, MOST_CORES = 256, 256
MOST_PARTITIONS = 4
SPLIT = ("single", "downpour", "allreduce")
REPLICA_VECTORS = {"served": 4, "allreduce": 3, "hogwild": 1, "single": 2}
"""Vectors as long as the parameters that a replica and a shard hold, without an optimizer's state."""
SHARD_VECTORS = 3


@dataclass(frozen=True)
class Machines:
    """Hosts with the same number of cores each."""

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
    """Way to train."""

    strategy: Strategy

    @property
    def replicas(self) -> int:
        """Return the number of replicas; 1 if one process plays all roles."""
        return self.strategy.replicas if isinstance(self.strategy, Replicated) else 1

    @property
    def shards(self) -> int:
        """Return the number of server processes."""
        return self.strategy.shards if isinstance(self.strategy, Served) else 0

    @property
    def partitions(self) -> int:
        """Return the number of processes of each replica."""
        return self.strategy.partitions if isinstance(self.strategy, Partitioned) else 1

    def _numbers(self) -> dict[str, int]:
        numbers = {"replica": self.replicas} if isinstance(self.strategy, Replicated) else {}
        more = {"partition": self.partitions * (self.partitions > 1), "shard": self.shards}
        return {**numbers, **{what: number for what, number in more.items() if number}}

    def __str__(self) -> str:
        return ", ".join([self.strategy.name, *(many(number, what) for what, number in self._numbers().items())])

    @property
    def command(self) -> str:
        """Return its words on the command line.

        >>> PlanCandidate(Downpour(replicas=4, shards=1)).command
        'downpour --replicas 4 --shards 1'
        """
        return " ".join([self.strategy.name, *(f"--{what}s {number}" for what, number in self._numbers().items())])


def candidates(machines: Machines, names: Sequence[str], optimizer: Optimizer) -> list[PlanCandidate]:
    """Return each strategy with 1, 2, 4, ... replicas and with one for each core; each host has a shard.

    Models and replicas are also split over up to four processes of one host, in the way with the least price.
    """
    return [
        PlanCandidate(strategy)
        for name in dict.fromkeys(names)
        for partitions in _counts(min(machines.cores, MOST_PARTITIONS) if name in SPLIT else 1)
        for strategy in strategies_of(name, machines, partitions, optimizer)
    ]


def strategies_of(
    name: str, machines: Machines, partitions: int, optimizer: Optimizer, counts: Iterable[int] = ()
) -> Iterator[Strategy]:
    """Yield a strategy with these partitions, and each number of replicas; by default up to one on each core."""
    if name not in PLANNED:
        raise unknown("strategy of a plan", name, PLANNED)
    if name == "single":
        yield Single(optimizer=optimizer, partitions=partitions)
        return
    hosts = 1 if name == "hogwild" else machines.hosts
    for replicas in counts or _counts(min(hosts * (machines.cores // partitions), MOST_REPLICAS)):
        shards = max(partitions, min(machines.hosts, replicas))
        if name == "hogwild":
            yield Hogwild(replicas=replicas, optimizer=optimizer)
        elif name == "downpour":
            yield Downpour(replicas=replicas, shards=shards, optimizer=optimizer, partitions=partitions)
        elif name == "synchronous" and replicas > 1:  # synchronous rounds of one replica are single
            yield Synchronous(replicas=replicas, shards=shards, optimizer=optimizer)
        elif name == "allreduce" and replicas > 1:
            yield Allreduce(replicas=replicas, optimizer=optimizer, partitions=partitions)


def _counts(most: int) -> Iterable[int]:
    """Return the powers of two up to a number, and the number."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def memory(
    candidate: PlanCandidate, trace: MemoryTrace, process: int, split: SplitCost | None = None
) -> dict[str, int]:
    """Return the bytes of each kind of process of a candidate."""
    parameters, state = trace.memory[PARAMETERS], trace.memory[STATE]
    passing = max(0, trace.peak - parameters - state - trace.memory[GRADIENTS])
    count, replica = candidate.partitions, "replica" if candidate.partitions == 1 else "partition"
    parts = [(parameters // count, state // count, passing)]  # an upper bound: partitions keep less than a whole model
    if split is not None:
        parts = [
            (partition.memory[PARAMETERS], partition.memory[STATE], partition.memory[KEPT])
            for partition in split.partition_costs
        ]
    if candidate.shards:
        held = math.ceil((SHARD_VECTORS * parameters + state) / candidate.shards)
        largest = max(REPLICA_VECTORS["served"] * parameters + passing for parameters, _, passing in parts)
        return {replica: process + largest, "shard": process + held}
    # a split single model is an allreduce group of one
    vectors = REPLICA_VECTORS["allreduce" if count > 1 else candidate.strategy.name]
    return {
        replica: process + max((vectors + 1) * parameters + state + passing for parameters, state, passing in parts)
    }
