"""Plan: candidates measured on this machine, prices of those for other machines, their order and its reasons."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from distbelief.core.settings import Settings
from distbelief.errors import DistbeliefError, UsageError
from distbelief.lab.cost import splitting
from distbelief.lab.cost.cost import MARGIN, SPARE, beyond, does_not_fit, held, sample_of
from distbelief.lab.cost.options import PlanRequest, SplitRequest, check_amounts
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
from distbelief.transport.virtual import MEMORY

SPLIT_SECONDS = 3.0
"""Limit of measuring each way to split for prices."""
LONGEST_NUMBERS = 20
SHARED = LinkModel(Handling().message + MEMORY.latency, Handling().memory / 2)
"""Memory that the processes of a split model share on one host."""
CONTENDERS = 5
"""Number of the best candidates that are priced again on changed machines."""
UNSEEN = "time to accuracy is not planned: samples a second measure speed, not how fast a model learns"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a candidate."""

    what: str
    command: str
    machines: str
    replicas: int
    shards: int
    partitions: int
    memory: int
    predicted: Terms | None = None
    measured: Terms | None = None
    reason: str = ""
    """Reason why it is impossible or failed."""

    @property
    def terms(self) -> Terms | None:
        """Return the best known terms: measured, else predicted."""
        return self.measured or self.predicted

    @property
    def strategy(self) -> str:
        """Return the name of its strategy."""
        return self.command.split()[0]

    @property
    def rate(self) -> float:
        """Return the samples a second; 0 if unknown."""
        return self.terms.samples_per_second if self.terms else 0.0


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a task's training."""

    task: str
    machines: str
    batch_size: int
    optimizer: str
    seconds: float
    max_memory: float | None = None
    rows: list[Row]
    """The best first; then impossible ones; then those measured on this machine to check the prices."""
    why: str
    changes: list[str]
    """Sentences on how other networks and stragglers would change the answer."""
    notes: list[str]

    @property
    def first(self) -> Row:
        """Return the row of the best candidate."""
        return self.rows[0]


@halving.only_plan()
def plan(
    task: Task | str, request: PlanRequest | None = None, tell: Callable[[str], None] = lambda _: None
) -> TrainingPlan:
    """Plan the training of a task: run candidates on this machine, and price those for other machines.

    Raises:
        UsageError: a value is out of range, no candidate is possible, or another plan measures here.
        DataError: the task's data are missing.
        TrainingError: the model or the loss raised.
    """
    request = request or PlanRequest()
    began, there, here = time.monotonic(), machines_of(request), this_machine()
    resolved = resolved_task(task, request)
    wanted = _candidates(there, request.strategies or PLANNED, request)
    ComputeModel(slow=dict(request.slow)).check(max(candidate.replicas for candidate in wanted.values()))
    elsewhere = there != here or bool(request.slow)
    local = _candidates(here, ("single", *(request.strategies or PLANNED)), request) if elsewhere else wanted
    needs = Needs(resolved, request, tell)
    if elsewhere or request.max_memory is not None:
        needs.split({candidate.partitions for candidate in (*wanted.values(), *local.values())}, tell)
    notes = [UNSEEN, *needs.notes, *beyond(request.max_memory), *busy_cores()]
    limit, changes = None if elsewhere else request.max_memory, list[str]()
    rows = [needs.row(candidate, here, limit, free_memory()) for candidate in local.values()]
    check_rows(rows)
    fit = [local[row.what] for row in rows if not row.reason]
    rows = measured_rows(rows, halving.measure(task, fit, request, tell))
    if elsewhere and rows[0].measured:
        pricing, cluster = Pricing(resolved, request.batch_size), cluster_of(rows, needs, here, request)
        graded = priced_rows(rows, local, pricing, cluster, tell)
        cluster = dataclasses.replace(
            cluster, machines=there, slow=tuple(request.slow.items()), topology=request.topology
        )
        unpriced = [needs.row(candidate, there, request.max_memory) for candidate in wanted.values()]
        # impossible ones come last, and of equal ones those with fewer processes first
        rows = sorted(
            priced_rows(unpriced, wanted, pricing, cluster, tell),
            key=lambda row: (row.terms is None, -row.rate, row.replicas * row.partitions + row.shards),
        )
        check_rows(rows)
        best = [row for row in rows[:CONTENDERS] if row.predicted]
        changes = _changes(best, wanted, pricing, cluster, tell)
        notes += [f"{row.what}, on {row.predicted.network}" for row in best if row.predicted and row.predicted.network]
        rows += [row for row in graded if row.measured]
    return TrainingPlan(
        task=resolved.reference,
        machines=str(there),
        batch_size=request.batch_size,
        optimizer=request.optimizer.name,
        seconds=time.monotonic() - began,
        max_memory=request.max_memory,
        rows=rows,
        why=_why(rows),
        changes=changes,
        notes=notes,
    )


def resolved_task(task: Task | str, request: PlanRequest) -> Task:
    """Check the amounts and the network of a request, and return its task."""
    check_amounts(request.batch_size, 1, {"seconds": request.seconds, "max-memory": request.max_memory})
    request.network.check()
    return resolve(task, request.data_dir) if isinstance(task, str) else task


def _candidates(machines: Machines, strategies: Sequence[str], request: PlanRequest) -> dict[str, PlanCandidate]:
    if not (known := {str(way): way for way in candidates(machines, strategies, request.optimizer)}):
        raise UsageError(f"--strategies {' '.join(strategies)}: none of them runs on {machines}; name more strategies")
    return known


def check_rows(rows: Sequence[Row]) -> None:
    """Refuse a plan without a possible candidate, with reasons and the least memory that one needs."""
    if all(row.reason for row in rows):
        least = min(rows, key=lambda row: row.memory)
        reasons = "; ".join(f"{row.what}: {row.reason}" for row in rows[:3])
        raise UsageError(
            f"no candidate is possible on {least.machines}: {reasons}; {least.what} needs the least memory, "
            f"{least.memory / 1e9:.2f} GB for a process"
        )


class Needs:
    """Memory that a task's processes need for an iteration, whole or split; a minibatch must fit here."""

    def __init__(self, task: Task, request: PlanRequest, tell: Callable[[str], None]) -> None:
        batch_size, optimizer = request.batch_size, request.optimizer
        tell("following an iteration on fake tensors")
        data, self._process = load(task, "training"), held()
        tracer = Tracer(task, sample_of(data))
        if why := does_not_fit(tracer, batch_size, optimizer):
            raise UsageError(f"--batch-size {batch_size}: {why}; plan with a smaller one")
        # a trainer refuses models and minibatches that no replica could train
        Trainer(with_data(task, data), build_model(task, 0, "cpu"), Settings(batch_size=batch_size))
        self._task, self._batch_size, self.optimizer = task, batch_size, optimizer
        self._trace, self.notes = tracer.follow(batch_size, optimizer), [tracer.note] if tracer.note else []
        self.elements = sum(layer.parameters for layer in tracer.layers)
        self.splits: dict[int, SplitCost | str] = {}

    def split(
        self,
        counts: Iterable[int],
        tell: Callable[[str], None],
        way: Partitions | None = None,
        seconds: float = SPLIT_SECONDS,
        line: LinkModel = SHARED,
    ) -> None:
        """Measure the model split over each number of processes, or note why it cannot be."""
        way = way or Partitions()
        steps = SplitRequest(
            batch_size=self._batch_size, microbatches=way.microbatches, schedule=way.schedule, seconds=seconds
        )
        for count in sorted({*counts} - {1}):
            tell(f"the model split over {count} processes")
            try:
                split = Split.parse(way.split, count, way.chunks, own=self._task.split)
                self.splits[count], *_ = splitting.measure(self._task, split, steps, self.optimizer, line, tell)
            except DistbeliefError as error:  # a model that cannot be split does not end the plan
                self.splits[count] = " ".join(str(error).split())

    def row(self, candidate: PlanCandidate, machines: Machines, limit: float | None, left: float = math.inf) -> Row:
        """Return the row of a candidate, with a reason if a process exceeds the limit or all exceed the free memory."""
        split = self.splits.get(candidate.partitions)
        sizes = memory(candidate, self._trace, self._process, split if isinstance(split, SplitCost) else None)
        kind, size = max(sizes.items(), key=lambda item: item[1])
        needs, reason = round(self._process + MARGIN * (size - self._process) + SPARE), ""
        count = candidate.replicas * candidate.partitions + candidate.shards
        if limit is not None and needs > limit:
            reason = f"its {kind} needs {needs / 1e9:.2f} GB, more than {limit / 1e9:.3g}"
        elif count * needs > left:
            reason = (
                f"its {count} processes need up to {count * needs / 1e9:.2f} GB, and {left / 1e9:.2f} are left here"
            )
        counts = {name: getattr(candidate, name) for name in ("replicas", "shards", "partitions")}
        return Row(
            what=str(candidate),
            command=candidate.command,
            machines=str(machines),
            memory=needs,
            reason=reason,
            **counts,
        )


def busy_cores() -> list[str]:
    """Return a note if other work took some of the cores' time."""
    times = halving.busy()
    note = f"this machine is busy with something else: its cores were free {1 / times:.0%} of the time"
    return [note] if times > BUSY else []


def measured_rows(rows: Iterable[Row], results: halving.Measurements) -> list[Row]:
    """Return rows with their measurements, the best first, or why they have none."""
    known = {row.what: row for row in rows}
    return [msgspec.structs.replace(known[what], measured=terms) for what, terms in results.terms.items()] + [
        msgspec.structs.replace(row, reason=results.failed.get(what, row.reason))
        for what, row in known.items()
        if what not in results.terms
    ]


def priced_rows(
    rows: Iterable[Row],
    ways: Mapping[str, PlanCandidate],
    pricing: Pricing,
    cluster: PricedCluster,
    tell: Callable[[str], None],
) -> list[Row]:
    """Return rows with their prices, or why they have none."""
    priced = []
    for row in rows:
        if not row.reason:
            tell(f"{row.what}, simulated on {cluster.machines}")
            try:
                row = msgspec.structs.replace(row, predicted=pricing.terms(ways[row.what], cluster))
            except DistbeliefError as error:  # a candidate that cannot run does not end the plan
                row = msgspec.structs.replace(row, reason=" ".join(str(error).split()))
        priced.append(row)
    return priced


def cluster_of(rows: Sequence[Row], needs: Needs, here: Machines, request: PlanRequest) -> PricedCluster:
    """Describe this machine to the virtual cluster: the measured step, and the carriers' figures.

    Cores that compute at the same time slow each other down. Candidates with a replica on each core show by how much:
    the shortest gradient counts, since waits and other work on this machine only lengthen the others.
    """
    whole = [(row.replicas, row.measured) for row in rows if row.measured and row.partitions == 1]
    alone = [terms for count, terms in whole if count == 1] or [row.measured for row in rows[:1] if row.measured]
    step = min(terms.compute for terms in alone)
    update = min((terms.update for terms in alone if terms.update), default=0.0)
    together = step / min((terms.compute for count, terms in whole if count == here.cores), default=step)
    speed = memory_speed(needs.optimizer, needs.elements, update)
    return PricedCluster(here, request.network, step, Handling(), speed, min(1.0, together), splits=needs.splits)


def machines_of(request: PlanRequest) -> Machines:
    """Return the named machines, else this one; its topology must have room for them."""
    there = parse_machines(request.machines) if request.machines else this_machine()
    if request.topology and there.hosts == 1:
        raise UsageError(
            f"--topology {request.topology}: connects hosts, and there is one; name several, as --machines 4x8"
        )
    if request.topology:
        topologies.topology(request.topology).first(there.hosts, f"--machines {there}")
    return there


def parse_machines(text: str) -> Machines:
    """Return hosts and their cores."""
    hosts, times, cores = text.partition("x")
    if not (times and hosts.isdecimal() and cores.isdecimal() and len(text) <= LONGEST_NUMBERS):
        raise UsageError(f"--machines {text!r}: write hosts and the cores of each, such as 4x8")
    return Machines(int(hosts), int(cores))


def this_machine() -> Machines:
    """Return one host with the cores that this process may use."""
    return Machines(1, cores())


def _why(rows: Sequence[Row]) -> str:
    first, terms = rows[0], rows[0].terms
    if terms is None:
        return f"{first.what}, since no candidate has run here: {first.reason}"
    why = (
        f"{first.what}: {terms.samples_per_second:,.0f} samples/s, {'measured' if first.measured else 'predicted'}; "
        f"computing takes {terms.compute / terms.step:.0%} of a step"
        f"{f', and its bound is {terms.binds}' * bool(terms.binds)}"
    )
    rows = [row for row in rows if row.terms and bool(row.measured) == bool(first.measured)]
    second = next((row for row in rows if row.strategy != first.strategy), None)
    if second is not None and second.terms is not None:
        why += (
            f"; {first.rate / second.rate:.2f} times {second.what}, in which computing takes "
            f"{second.terms.compute / second.terms.step:.0%}"
        )
    return why


def _changes(
    best: Sequence[Row],
    ways: Mapping[str, PlanCandidate],
    pricing: Pricing,
    cluster: PricedCluster,
    tell: Callable[[str], None],
) -> list[str]:
    """Say which candidate would be first with another network, and with a slow replica."""
    tell("what would change the answer")
    network, changes = cluster.network, []
    straggler = "without a straggler" if cluster.slow else "with a straggler (replica 0 half as fast)"
    others: Mapping[str, dict[str, Any]] = {
        "with twice the bandwidth": {"network": msgspec.structs.replace(network, bandwidth=2 * network.bandwidth)},
        "with half the latency": {"network": msgspec.structs.replace(network, latency=network.latency / 2)},
        straggler: {"slow": () if cluster.slow else ((0, 2.0),)},
        **({"without the topology": {"topology": ""}} if cluster.topology else {}),
    }
    for what, other in others.items():
        changed = dataclasses.replace(cluster, **other)
        rates = {row.what: pricing.price(ways[row.what], changed).samples_per_second for row in best}
        first = max(rates, key=lambda name: rates[name])
        same = "still " if first == best[0].what else ""
        changes.append(f"{what}: {same}{first}, {rates[first]:,.0f} samples/s")
    return changes
