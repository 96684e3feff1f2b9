"""A plan: every candidate with its price, the best first, why that is, and what would change the answer."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from distbelief.core.optimizer import Optimizer, optim
from distbelief.costs import profile as profiling
from distbelief.costs.cost import MARGIN, held, sample_of
from distbelief.costs.profile import BUSY, Profile, ladder
from distbelief.costs.trace import Trace, Tracer
from distbelief.errors import DistbeliefError, UsageError
from distbelief.planner.candidates import PLANNED, Candidate, Machines, candidates, memory
from distbelief.planner.pricing import Cluster, Pricing, Terms, handling
from distbelief.tasks import Task, resolve
from distbelief.tasks.worker import load
from distbelief.transport.virtual import NetworkModel

WORTH = 0.05
"""What one more replica is to bring at least, of the samples a second."""
SECONDS = 10.0
"""Of the profile, by itself."""
CONTENDERS = 5
"""Of the best candidates, those that are priced again where something else were so."""
UNSEEN = "time to accuracy is not predicted: a profile knows how fast steps are, not what they are worth"


class Row(msgspec.Struct, frozen=True):
    """One candidate."""

    what: str
    command: str
    replicas: int
    shards: int
    memory: int
    """Bytes of its largest process."""
    terms: Terms | None = None
    reason: str = ""
    """Why it cannot be done; "" where it can."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned."""

    task: str
    machines: str
    batch_size: int
    step: float
    """Seconds of a minibatch's gradient, by the profile."""
    rows: list[Row]
    """The best first; those that cannot be done last."""
    why: str
    changes: list[str]
    """What would change the answer, and what would not."""
    notes: list[str]

    @property
    def first(self) -> Row:
        """What to do."""
        return self.rows[0]


def plan(
    task: Task | str,
    machines: Machines | str | None = None,
    network: NetworkModel | None = None,
    *,
    strategies: Sequence[str] = PLANNED,
    batch_size: int = 64,
    optimizer: Optimizer | None = None,
    max_memory: float | None = None,
    seconds: float = SECONDS,
    data_dir: str | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan the training of a task.

    Args:
        task: what is trained.
        machines: hosts and their cores, such as "4x8"; this one where none are given.
        network: between hosts.
        strategies: that may be chosen.
        batch_size: samples in a minibatch of a replica.
        optimizer: that steps; sgd where none is given.
        max_memory: bytes that a process may hold.
        seconds: for the profile.
        data_dir: folder with the data.
        told: is told what is done.

    Raises:
        UsageError: a value that cannot be, or nothing that can be done.
        DataError: the task's data cannot be had.
        TrainingError: the model or the loss raised.
    """
    there = parse_machines(machines) if isinstance(machines, str) else machines or this_machine()
    chosen, made = optimizer or optim("sgd"), resolve(task, data_dir) if isinstance(task, str) else task
    (network or NetworkModel()).check()
    asked = candidates(there, strategies, chosen)
    data = load(made, "training")
    process = held()
    tracer = Tracer(made, sample_of(data))
    trace = tracer.follow(batch_size, chosen)
    names = [layer.name for layer in tracer.layers]
    profile = profiling.measure(made, data, names, ladder(batch_size), seconds, told=told)
    elements = sum(layer.parameters for layer in tracer.layers)
    step = profile.at(batch_size).step
    cluster = Cluster(there, network or NetworkModel(), step, handling(chosen, elements))
    pricing = Pricing(made, batch_size)
    rows = ranked([_row(one, pricing, cluster, trace, process, max_memory, told) for one in asked])
    if rows[0].terms is None:
        least = min(rows, key=lambda row: row.memory)
        raise UsageError(
            f"nothing can be done on {there}: {'; '.join(f'{row.what}: {row.reason}' for row in rows[:3])}; least is "
            f"needed by {least.what}, {least.memory / 1e9:.2f} GB in a process"
        )
    best = {str(one): one for one in asked}
    told("what would change the answer")
    changes = _changes([best[row.what] for row in rows[:CONTENDERS] if row.terms], pricing, cluster)
    return Plan(
        task=made.reference, machines=str(there), batch_size=batch_size, step=step, rows=rows, why=_why(rows),
        changes=changes, notes=_notes(profile, batch_size, tracer.note),
    )  # fmt: skip


def parse_machines(text: str) -> Machines:
    """Hosts and their cores.

    Raises:
        UsageError: it is no such thing.

    >>> parse_machines("4x8")
    Machines(hosts=4, cores=8)
    """
    hosts, times, cores = text.partition("x")
    if not (times and hosts.isdecimal() and cores.isdecimal()):
        raise UsageError(f"--machines {text!r}: write hosts and the cores of each, such as 4x8")
    return Machines(int(hosts), int(cores))


def this_machine() -> Machines:
    """One host, with the cores that this process may use."""
    return Machines(1, len(os.sched_getaffinity(0)))


def _notes(profile: Profile, batch_size: int, traced: str) -> list[str]:
    """What is to be known of a plan."""
    notes = [UNSEEN, traced]
    if profile.busy > BUSY:
        notes.append(f"the machine is busy ({profile.busy:.2f} times): times are the processor's")
    if batch_size in profile.left_out:
        notes.append(f"a batch of {batch_size} was not profiled: {profile.left_out[batch_size]}")
    return [note for note in notes if note]


def _row(
    one: Candidate, pricing: Pricing, cluster: Cluster, trace: Trace, process: int, limit: float | None,
    told: Callable[[str], None],
) -> Row:  # fmt: skip
    """A candidate's price, or why it has none."""
    told(str(one))
    needs: Mapping[str, int] = {kind: round(MARGIN * bytes_) for kind, bytes_ in memory(one, trace, process).items()}
    largest = max(needs, key=lambda kind: needs[kind])
    row = Row(str(one), one.command, one.replicas, one.shards, needs[largest])
    if limit is not None and needs[largest] > limit:
        reason = f"its {largest} needs {needs[largest] / 1e9:.2f} GB, more than {limit / 1e9:.2f}"
        return msgspec.structs.replace(row, reason=reason)
    try:
        return msgspec.structs.replace(row, terms=pricing.terms(one, cluster))
    except DistbeliefError as error:  # one that cannot run ends no plan
        return msgspec.structs.replace(row, reason=" ".join(str(error).split()))


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The most samples a second first; of equals, the fewest processes; what cannot be done last."""

    def order(row: Row) -> tuple[bool, float, int]:
        return row.terms is None, -(row.terms.samples_per_second if row.terms else 0.0), row.replicas + row.shards

    return sorted(rows, key=order)


def _why(rows: Sequence[Row]) -> str:
    """Why the first is first, and from where on one more replica brings too little."""
    first, terms = rows[0], rows[0].terms
    assert terms is not None
    second = next((row for row in rows[1:] if row.terms and row.command.split()[0] != first.command.split()[0]), None)
    told = (
        f"{first.what}: {terms.samples_per_second:,.0f} samples/s; {terms.compute / terms.step:.0%} of a step "
        f"computes, and what binds is {terms.binds}"
    )
    if second is not None and second.terms is not None:
        more = terms.samples_per_second / second.terms.samples_per_second
        told += (
            f"; {more:.2f} times {second.what}, of whose step {second.terms.compute / second.terms.step:.0%} computes"
        )
    return f"{told}; {_enough(rows, first.command.split()[0])}"


def _enough(rows: Sequence[Row], name: str) -> str:
    """From how many replicas on one more brings too little, of those of one strategy."""
    rates = sorted(
        (row.replicas, row.terms.samples_per_second)
        for row in rows
        if row.terms is not None and row.command.split()[0] == name
    )
    for (few, rate), (many, more) in itertools.pairwise(rates):
        # what each one more brings, where so many more bring so much
        if (more / rate) ** (1 / (many - few)) - 1 < WORTH:
            return f"from {few} replicas on, one more brings under {WORTH:.0%}"
    return f"one more replica brings {WORTH:.0%} or more up to {rates[-1][0]}, the most there can be"


def _changes(best: Sequence[Candidate], pricing: Pricing, cluster: Cluster) -> list[str]:
    """What the answer would be with another network, and with a slow replica."""
    network, told = cluster.network, []
    others: Mapping[str, dict[str, Any]] = {
        "with twice the bandwidth": {"network": msgspec.structs.replace(network, bandwidth=2 * network.bandwidth)},
        "with half the latency": {"network": msgspec.structs.replace(network, latency=network.latency / 2)},
        "with replica 0 half as fast": {"slow": ((0, 2.0),)},
    }
    for what, other in others.items():
        rates = {str(one): pricing.rate(one, dataclasses.replace(cluster, **other))[0] for one in best}
        first = max(rates, key=lambda name: rates[name])
        same = "still " if first == str(best[0]) else ""
        told.append(f"{what}: {same}{first}, {rates[first]:,.0f} samples/s")
    return told
