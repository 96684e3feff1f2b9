"""A plan: candidates that were run on this machine, and prices of those that it cannot run; the best first, and why."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.settings import Settings
from distbelief.errors import DistbeliefError, UsageError
from distbelief.lab.cost import splitting
from distbelief.lab.cost.cost import MARGIN, SPARE, beyond, check_amounts, does_not_fit, held, sample_of
from distbelief.lab.cost.options import SplitRequest
from distbelief.lab.cost.profile import BUSY
from distbelief.lab.cost.splitting import SplitCost
from distbelief.lab.cost.trace import Tracer
from distbelief.lab.plan import halving
from distbelief.lab.plan.candidates import PLANNED, Machines, PlanCandidate, candidates, memory
from distbelief.lab.plan.pricing import PricedCluster, Pricing, Terms, memory_speed
from distbelief.places import topologies
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import Handling
from distbelief.record.limits import cores, free_memory
from distbelief.schedules.price import LinkModel
from distbelief.split.options import Partitions, Split
from distbelief.tasks import Task, resolve
from distbelief.tasks.worker import Trainer, build_model, load, with_data
from distbelief.transport.cluster_model import NetworkModel
from distbelief.transport.virtual import MEMORY

SECONDS, SPLIT_SECONDS = 30.0, 3.0
"""Limits of all runs together, and of measuring each way to split for prices."""
LONGEST_NUMBERS = 20
"""Characters of what says how many machines there are."""
SHARED = LinkModel(Handling().message + MEMORY.latency, Handling().memory / 2)
"""Memory that the processes of a split model share on one host."""
CONTENDERS = 5
"""Number of the best candidates that are priced again for what would change the answer."""
UNSEEN = "time to accuracy is not planned: samples a second say how fast steps are, not what they are worth"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate."""

    what: str
    command: str
    machines: str
    """On which, as hosts x cores."""
    replicas: int
    shards: int
    partitions: int
    """Processes that each replica is split over."""
    memory: int
    """Bytes of its largest process."""
    predicted: Terms | None = None
    """Price by the virtual cluster, where other machines than this one are planned for."""
    measured: Terms | None = None
    """On this machine."""
    reason: str = ""
    """Why it cannot be done, or has failed; "" where it can."""

    @property
    def terms(self) -> Terms | None:
        """Best known terms: measured, else predicted."""
        return self.measured or self.predicted

    @property
    def strategy(self) -> str:
        """The name of its strategy."""
        return self.command.split()[0]

    @property
    def rate(self) -> float:
        """Samples a second; 0 where nothing is known."""
        return self.terms.samples_per_second if self.terms else 0.0


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of the training of a task."""

    task: str
    machines: str
    batch_size: int
    optimizer: str
    """Its name."""
    seconds: float
    """Seconds that the plan took."""
    max_memory: float | None = None
    """Bytes that a process may hold, where that was limited."""
    rows: list[Row]
    """The best first; then those that cannot be done; then those of this machine by which prices are graded."""
    why: str
    changes: list[str]
    """Sentences on what would change the answer, and what would not."""
    notes: list[str]

    @property
    def first(self) -> Row:
        """Row of the best candidate."""
        return self.rows[0]


@halving.only_plan()
def plan(
    task: Task | str,
    machines: Machines | str | None = None,
    network: NetworkModel | None = None,
    *,
    topology: str = "",
    slow: Mapping[int, float] | None = None,
    strategies: Sequence[str] = PLANNED,
    batch_size: int = 64,
    optimizer: Optimizer | None = None,
    max_memory: float | None = None,
    seconds: float = SECONDS,
    data_dir: str | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> TrainingPlan:
    """Plan the training of a task: run candidates on this machine, and price those of other machines.

    Args:
        task: what is trained.
        machines: hosts and their cores, such as "4x8"; this one where none are given.
        network: between hosts.
        topology: between hosts, such as tree:8x8; none where it is empty.
        slow: replicas that are on slower machines, and how many times longer their steps take.
        strategies: that may be chosen.
        batch_size: samples in a minibatch of a replica.
        optimizer: that steps; sgd where none is given.
        max_memory: bytes that a process may hold.
        seconds: for all runs together.
        data_dir: folder with the data.
        told: is told what is done.

    Raises:
        UsageError: a value that cannot be, nothing that can be done, or another plan that measures here.
        DataError: the task's data cannot be had.
        TrainingError: the model or the loss raised.
    """
    began, there, here = time.monotonic(), machines_of(machines, topology), this_machine()
    chosen, resolved = optimizer or optim("sgd"), resolve(task, data_dir) if isinstance(task, str) else task
    check_amounts(batch_size, 1, {"seconds": seconds, "max-memory": max_memory})
    line = network or NetworkModel()
    line.check()
    asked = _asked(there, strategies, chosen)
    ComputeModel(slow=dict(slow or {})).check(max(one.replicas for one in asked.values()))
    elsewhere = there != here or bool(slow)
    tried = _asked(here, ("single", *strategies), chosen) if elsewhere else asked
    needs = Needs(resolved, batch_size, chosen, told)
    if elsewhere or max_memory is not None:
        needs.split({one.partitions for one in (*asked.values(), *tried.values())}, told)
    notes = [UNSEEN, *needs.notes, *beyond(max_memory), *busy_cores()]
    limit, changes = None if elsewhere else max_memory, list[str]()
    rows = [needs.row(one, here, limit, free_memory()) for one in tried.values()]
    check_rows(rows)
    fit = [tried[row.what] for row in rows if not row.reason]
    rows = measured_rows(rows, halving.measure(task, fit, batch_size, seconds, data_dir, told))
    if elsewhere and rows[0].measured:
        pricing, cluster = Pricing(resolved, batch_size), cluster_of(rows, needs, here, line)
        graded = priced_rows(rows, tried, pricing, cluster, told)
        cluster = dataclasses.replace(cluster, machines=there, slow=tuple((slow or {}).items()), topology=topology)
        own = [needs.row(one, there, max_memory) for one in asked.values()]
        rows = _ranked(priced_rows(own, asked, pricing, cluster, told))
        check_rows(rows)
        best = [row for row in rows[:CONTENDERS] if row.predicted]
        changes = _changes(best, asked, pricing, cluster, told)
        notes += [f"{row.what}, on {row.predicted.network}" for row in best if row.predicted and row.predicted.network]
        rows += [row for row in graded if row.measured]
    return TrainingPlan(
        task=resolved.reference, machines=str(there), batch_size=batch_size, optimizer=chosen.name,
        seconds=time.monotonic() - began, max_memory=max_memory, rows=rows, why=_why(rows), changes=changes,
        notes=notes,
    )  # fmt: skip


def _asked(there: Machines, strategies: Sequence[str], optimizer: Optimizer) -> dict[str, PlanCandidate]:
    """The candidates on some machines, as they are written.

    Raises:
        UsageError: there is none.
    """
    if not (found := {str(one): one for one in candidates(there, strategies, optimizer)}):
        raise UsageError(f"--strategies {' '.join(strategies)}: there is nothing to choose from on {there}; name more")
    return found


def check_rows(rows: Sequence[Row]) -> None:
    """Refuse a plan in which nothing can be done.

    Raises:
        UsageError: saying why, and what needs the least.
    """
    if all(row.reason for row in rows):
        least = min(rows, key=lambda row: row.memory)
        raise UsageError(
            f"nothing can be done on {least.machines}: {'; '.join(f'{row.what}: {row.reason}' for row in rows[:3])}; "
            f"least is needed by {least.what}, {least.memory / 1e9:.2f} GB in a process"
        )


class Needs:
    """Memory that processes of a task need, for an iteration and split over processes.

    Args:
        task: that is trained.
        batch_size: samples in a minibatch.
        optimizer: that steps.
        told: is told what is done.

    Raises:
        UsageError: a minibatch does not fit this machine, or no replica could compute it.
    """

    def __init__(self, task: Task, batch_size: int, optimizer: Optimizer, told: Callable[[str], None]) -> None:
        told("following an iteration on fake tensors")
        data, self._process = load(task, "training"), held()
        tracer = Tracer(task, sample_of(data))
        if why := does_not_fit(tracer, batch_size, optimizer):
            raise UsageError(f"--batch-size {batch_size}: {why}; plan with a smaller one")
        # refuses what cannot be done
        Trainer(with_data(task, data), build_model(task, 0, "cpu"), Settings(batch_size=batch_size))
        self._task, self._batch_size, self.optimizer = task, batch_size, optimizer
        self._trace, self.notes = tracer.follow(batch_size, optimizer), [tracer.note] if tracer.note else []
        self.elements = sum(layer.parameters for layer in tracer.layers)
        self.splits: dict[int, SplitCost | str] = {}

    def split(
        self,
        counts: Iterable[int],
        told: Callable[[str], None],
        way: Partitions | None = None,
        seconds: float = SPLIT_SECONDS,
        line: LinkModel = SHARED,
    ) -> None:
        """Measure the model split over so many processes, for some seconds each, or why it cannot be."""
        way = way or Partitions()
        steps = SplitRequest(
            batch_size=self._batch_size, microbatches=way.microbatches, schedule=way.schedule, seconds=seconds
        )
        for count in sorted({*counts} - {1}):
            told(f"the model split over {count} processes")
            try:
                split = Split.parse(way.split, count, way.chunks, own=self._task.split)
                self.splits[count], *_ = splitting.measure(self._task, split, steps, self.optimizer, line, told)
            except DistbeliefError as error:  # a model that cannot be split ends no plan
                self.splits[count] = " ".join(str(error).split())

    def row(self, one: PlanCandidate, machines: Machines, limit: float | None, left: float = math.inf) -> Row:
        """A candidate, with a reason where a process may not hold so much, or the machine has not so much left."""
        split = self.splits.get(one.partitions)
        sizes = memory(one, self._trace, self._process, split if isinstance(split, SplitCost) else None)
        kind, size = max(sizes.items(), key=lambda item: item[1])
        needs, reason = round(self._process + MARGIN * (size - self._process) + SPARE), ""
        count = one.replicas * one.partitions + one.shards
        if limit is not None and needs > limit:
            reason = f"its {kind} needs {needs / 1e9:.2f} GB, more than {limit / 1e9:.3g}"
        elif count * needs > left:
            reason = (
                f"its {count} processes need up to {count * needs / 1e9:.2f} GB, and {left / 1e9:.2f} are left here"
            )
        return Row(
            what=str(one), command=one.command, machines=str(machines), replicas=one.replicas, shards=one.shards,
            partitions=one.partitions, memory=needs, reason=reason,
        )  # fmt: skip


def busy_cores() -> list[str]:
    """Say how much of the time the cores were free, where something else has them."""
    times = halving.busy()
    told = f"this machine is busy with something else: its cores compute {1 / times:.0%} of the time"
    return [told] if times > BUSY else []


def measured_rows(rows: Iterable[Row], found: halving.Measurements) -> list[Row]:
    """Rows with what was measured, the best first, or why nothing was."""
    known = {row.what: row for row in rows}
    return [msgspec.structs.replace(known[what], measured=terms) for what, terms in found.terms.items()] + [
        msgspec.structs.replace(row, reason=found.failed.get(what, row.reason))
        for what, row in known.items()
        if what not in found.terms
    ]


def priced_rows(
    rows: Iterable[Row],
    asked: Mapping[str, PlanCandidate],
    pricing: Pricing,
    cluster: PricedCluster,
    told: Callable[[str], None],
) -> list[Row]:
    """Rows with their prices, or why they have none."""
    found = []
    for row in rows:
        if not row.reason:
            told(f"{row.what}, simulated on {cluster.machines}")
            try:
                row = msgspec.structs.replace(row, predicted=pricing.terms(asked[row.what], cluster))
            except DistbeliefError as error:  # one that cannot run ends no plan
                row = msgspec.structs.replace(row, reason=" ".join(str(error).split()))
        found.append(row)
    return found


def cluster_of(rows: Sequence[Row], needs: Needs, here: Machines, network: NetworkModel) -> PricedCluster:
    """Describe this machine to the virtual cluster: the measured step, and the carriers' figures.

    Cores that compute at the same time slow each other down. By how much is seen where each has a replica: of such
    candidates, in the one whose gradients are the shortest, since others also wait for each other. The shortest
    counts of all, since whatever else ran here has made others longer.
    """
    whole = [(row.replicas, row.measured) for row in rows if row.measured and row.partitions == 1]
    alone = [one for count, one in whole if count == 1] or [row.measured for row in rows[:1] if row.measured]
    step, update = min(one.compute for one in alone), min((one.update for one in alone if one.update), default=0.0)
    together = step / min((one.compute for count, one in whole if count == here.cores), default=step)
    own = memory_speed(needs.optimizer, needs.elements, update)
    return PricedCluster(here, network, step, Handling(), own, min(1.0, together), splits=needs.splits)


def machines_of(machines: Machines | str | None, topology: str) -> Machines:
    """The machines that are asked for, for which a topology must have room."""
    there = parse_machines(machines) if isinstance(machines, str) else machines or this_machine()
    if topology and there.hosts == 1:
        raise UsageError(f"--topology {topology}: is between hosts, and there is one; name several, as --machines 4x8")
    if topology:
        topologies.topology(topology).first(there.hosts, f"--machines {there}")
    return there


def parse_machines(text: str) -> Machines:
    """Hosts and their cores.

    Raises:
        UsageError: it is no such thing.

    >>> parse_machines("4x8")
    Machines(hosts=4, cores=8)
    """
    hosts, times, cores = text.partition("x")
    if not (times and hosts.isdecimal() and cores.isdecimal() and len(text) <= LONGEST_NUMBERS):
        raise UsageError(f"--machines {text!r}: write hosts and the cores of each, such as 4x8")
    return Machines(int(hosts), int(cores))


def this_machine() -> Machines:
    """One host, with the cores that this process may use."""
    return Machines(1, cores())


def _ranked(rows: Sequence[Row]) -> list[Row]:
    """The most samples a second first; of equals, the fewest processes; what cannot be done last."""
    return sorted(rows, key=lambda row: (row.terms is None, -row.rate, row.replicas * row.partitions + row.shards))


def _why(rows: Sequence[Row]) -> str:
    """Why the first is first."""
    first, terms = rows[0], rows[0].terms
    if terms is None:
        return f"{first.what}, since no candidate has run here: {first.reason}"
    told = (
        f"{first.what}: {terms.samples_per_second:,.0f} samples/s, {'measured' if first.measured else 'predicted'}; "
        f"{terms.compute / terms.step:.0%} of a step computes{f', and what binds is {terms.binds}' * bool(terms.binds)}"
    )
    rows = [row for row in rows if row.terms and bool(row.measured) == bool(first.measured)]
    second = next((row for row in rows if row.strategy != first.strategy), None)
    if second is not None and second.terms is not None:
        told += (
            f"; {first.rate / second.rate:.2f} times {second.what}, of whose step "
            f"{second.terms.compute / second.terms.step:.0%} computes"
        )
    return told


def _changes(
    best: Sequence[Row],
    asked: Mapping[str, PlanCandidate],
    pricing: Pricing,
    cluster: PricedCluster,
    tell: Callable[[str], None],
) -> list[str]:
    """Say what the answer would be with another network, and with a slow replica."""
    tell("what would change the answer")
    network, told = cluster.network, []
    straggler = "without a straggler" if cluster.slow else "with a straggler (replica 0 half as fast)"
    others: Mapping[str, dict[str, Any]] = {
        "with twice the bandwidth": {"network": msgspec.structs.replace(network, bandwidth=2 * network.bandwidth)},
        "with half the latency": {"network": msgspec.structs.replace(network, latency=network.latency / 2)},
        straggler: {"slow": () if cluster.slow else ((0, 2.0),)},
        **({"without the topology": {"topology": ""}} if cluster.topology else {}),
    }
    for what, other in others.items():
        changed = dataclasses.replace(cluster, **other)
        rates = {row.what: pricing.price(asked[row.what], changed).samples_per_second for row in best}
        first = max(rates, key=lambda name: rates[name])
        same = "still " if first == best[0].what else ""
        told.append(f"{what}: {same}{first}, {rates[first]:,.0f} samples/s")
    return told
