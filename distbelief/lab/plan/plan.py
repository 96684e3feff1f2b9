"""A plan: every candidate with its price, the best first, why that is, and what would change the answer."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from distbelief.core.optimizer import Optimizer, optim
from distbelief.errors import DistbeliefError, Interrupted, UsageError
from distbelief.lab.cost import profile as profiling
from distbelief.lab.cost import splitting, updates
from distbelief.lab.cost.cost import MARGIN, SPARE, beyond, check_amounts, does_not_fit, held, sample_of
from distbelief.lab.cost.profile import BUSY, ladder
from distbelief.lab.cost.splitting import SplitCost
from distbelief.lab.cost.trace import MemoryTrace, Tracer
from distbelief.lab.plan import lockstep, trials, trips
from distbelief.lab.plan import together as side_by_side
from distbelief.lab.plan.candidates import PLANNED, Machines, PlanCandidate, candidates, memory
from distbelief.lab.plan.lockstep import LockstepCosts
from distbelief.lab.plan.pricing import LockstepCost, PricedCluster, Pricing, Terms, memory_speed
from distbelief.lab.plan.together import Steps
from distbelief.lab.plan.trips import DirectHandling
from distbelief.places import topologies
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import Handling
from distbelief.record.limits import cores, free_memory
from distbelief.schedules.price import LinkModel
from distbelief.split.options import AUTO, Split
from distbelief.tasks import Task, resolve
from distbelief.tasks.worker import Trainer, build_model, load, with_data
from distbelief.transport.virtual import MEMORY, NetworkModel

WORTH = 0.05
"""What one more replica is to bring at least, of the samples a second."""
SECONDS, TRIP_SECONDS, SPLIT_SECONDS = 10.0, 3.0, 3.0
"""Of the profile, by itself, of messages beside steps, and of each split."""
LONGEST_STEP = 0.1
"""Seconds of the steps beside which messages are measured: the largest profiled that is no longer."""
LONGEST_NUMBERS = 20
"""Characters of what says how many machines there are."""
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
    partitions: int = 1
    """Processes that each replica is split over."""
    terms: Terms | None = None
    reason: str = ""
    """Why it cannot be done, or could not be run; "" where it can."""
    corrected: float = 1.0
    """What trials on this machine had its rate multiplied with."""
    measured: Terms | None = None
    """Where it was run."""


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned."""

    task: str
    machines: str
    batch_size: int
    optimizer: str
    """Its name."""
    step: float
    """Seconds of a minibatch's gradient, by the profile."""
    together: float
    """The speed of a core while all of a host compute."""
    max_memory: float | None = None
    """Bytes that a process may hold, where that was limited."""
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
    topology: str = "",
    slow: Mapping[int, float] | None = None,
    strategies: Sequence[str] = PLANNED,
    batch_size: int = 64,
    optimizer: Optimizer | None = None,
    max_memory: float | None = None,
    seconds: float = SECONDS,
    data_dir: str | None = None,
    run: int = 0,
    calibration: str | os.PathLike[str] | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> TrainingPlan:
    """Plan the training of a task.

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
        seconds: for the profile.
        data_dir: folder with the data.
        run: so many of the best that this machine can hold are run for a short while, to see how well they are
            predicted.
        calibration: the file that keeps what was seen, which corrects plans for this machine; else one in the cache.
        told: is told what is done.

    Raises:
        UsageError: a value that cannot be, or nothing that can be done.
        DataError: the task's data cannot be had.
        TrainingError: the model or the loss raised.
    """
    there = _there(machines, topology)
    chosen, made = optimizer or optim("sgd"), resolve(task, data_dir) if isinstance(task, str) else task
    check_amounts(batch_size, 1, {"seconds": seconds, "max-memory": max_memory})
    (network or NetworkModel()).check()
    asked = _asked(there, strategies, chosen)
    _check_slow(slow or {}, run, asked.values())
    file = Path(calibration) if calibration else trials.usual_file()
    known = trials.read(file, named=calibration is not None and there == this_machine())
    _check_run(run, there, file)
    pricing = Pricing(made, batch_size)
    direct = any(pricing.is_direct(one, there) for one in asked.values())
    here = _here(task, made, batch_size, chosen, there, seconds, data_dir, direct, told)
    splits = _splits(made, asked.values(), batch_size, chosen, here.handling, told)
    met = _lockstep(task, strategies, batch_size, chosen, asked.values(), pricing, here, splits, data_dir, told)
    cluster = here.cluster(there, network or NetworkModel(), splits, met.found, tuple((slow or {}).items()), topology)
    raw = {name: _row(one, pricing, cluster, here.trace, here.process, max_memory, told) for name, one in asked.items()}
    own = [one for one in known if one.machine == trials.this_kind()] if there == this_machine() else []
    rows = ranked([_corrected(row, own, made.reference, batch_size, chosen) for row in raw.values()])
    _check_first(rows, there)
    changes = _changes([row for row in rows[:CONTENDERS] if row.terms], asked, pricing, cluster, told)
    found = TrainingPlan(
        task=made.reference, machines=str(there), batch_size=batch_size, step=here.step, together=here.together,
        optimizer=chosen.name, max_memory=max_memory, rows=rows, why=_why(rows), changes=changes,
        notes=[UNSEEN, *_busiest(rows), *here.notes, *beyond(max_memory), *_met(met), *_calibrated(rows, known, file)],
    )  # fmt: skip
    if run:
        _try(found, run, task, asked, here, data_dir, told)
        _keep(found, here, {name: row.terms for name, row in raw.items()}, asked, chosen, file)
    return found


def _asked(there: Machines, strategies: Sequence[str], optimizer: Optimizer) -> dict[str, PlanCandidate]:
    """The candidates, by what is told of them.

    Raises:
        UsageError: there is none.
    """
    if not (found := {str(one): one for one in candidates(there, strategies, optimizer)}):
        raise UsageError(f"--strategies {' '.join(strategies)}: there is nothing to choose from on {there}; name more")
    return found


def _check_first(rows: Sequence[Row], there: Machines) -> None:
    """Refuse a plan in which nothing can be done.

    Raises:
        UsageError: saying why, and what needs the least.
    """
    if rows[0].terms is None:
        least = min(rows, key=lambda row: row.memory)
        raise UsageError(
            f"nothing can be done on {there}: {'; '.join(f'{row.what}: {row.reason}' for row in rows[:3])}; least is "
            f"needed by {least.what}, {least.memory / 1e9:.2f} GB in a process"
        )


def _splits(
    task: Task, asked: Iterable[PlanCandidate], batch_size: int, optimizer: Optimizer, handling: Handling,
    told: Callable[[str], None],
) -> dict[int, SplitCost | str]:  # fmt: skip
    """What the model costs when it is split over as many processes as candidates say, or why it cannot be."""
    found: dict[int, SplitCost | str] = {}
    line = LinkModel(handling.message + MEMORY.latency, handling.memory / 2)
    for partitions in sorted({one.partitions for one in asked} - {1}):
        told(f"the model split over {partitions} processes")
        try:
            found[partitions], *_ = splitting.measure(
                task, Split.parse(AUTO, partitions, own=task.split), batch_size=batch_size, optimizer=optimizer,
                link=line, seconds=SPLIT_SECONDS, told=told,
            )  # fmt: skip
        except DistbeliefError as error:  # a model that cannot be split ends no plan
            found[partitions] = " ".join(str(error).split())
    return found


def _lockstep(
    task: Task | str, strategies: Sequence[str], batch_size: int, optimizer: Optimizer,
    asked: Iterable[PlanCandidate], pricing: Pricing, here: _Here, splits: Mapping[int, SplitCost | str],
    data_dir: str | None, told: Callable[[str], None],
) -> LockstepCosts:  # fmt: skip
    """What it costs to wait for each other, of each kind of candidates that is asked for and that fits this machine;
    not beside long steps, of which it is little, nor where something else has the machine.
    """
    if not isinstance(task, str) or here.step > LONGEST_STEP or here.busy:
        return LockstepCosts({}, {})
    machine, kinds = this_machine(), {one.kind for one in asked}
    held = [
        one for one in candidates(machine, strategies, optimizer)
        if one.kind in kinds and (one.partitions == 1 or isinstance(splits.get(one.partitions), SplitCost))
        and not _too_large(one, max(_needs(one, here.trace, here.process, splits).values()))
    ]  # fmt: skip
    held.sort(key=lambda one: one.replicas * one.partitions)
    local = here.cluster(machine, NetworkModel(), splits, {})
    return lockstep.measure(task, held, pricing, local, batch_size, here.samples, data_dir, told)


class _Here(NamedTuple):
    """What is measured on this machine, of a task."""

    step: float
    handling: Handling
    own: Handling
    direct: DirectHandling
    together: float
    variation: float
    trace: MemoryTrace
    process: int
    samples: int
    busy: bool
    notes: list[str]

    def cluster(
        self, there: Machines, network: NetworkModel, splits: Mapping[int, SplitCost | str],
        lockstep: Mapping[tuple[str, bool], LockstepCost], slow: tuple[tuple[int, float], ...] = (), topology: str = "",
    ) -> PricedCluster:  # fmt: skip
        """Machines like this one."""
        return PricedCluster(
            there, network, self.step, self.handling, self.own, self.direct, self.together, self.variation,
            slow=slow, splits=splits, lockstep=lockstep, topology=topology,
        )  # fmt: skip


def _here(
    task: Task | str, made: Task, batch_size: int, optimizer: Optimizer, there: Machines, seconds: float,
    data_dir: str | None, direct: bool, told: Callable[[str], None],
) -> _Here:  # fmt: skip
    """Measure a step of a task, what it holds, what updates and messages cost beside it, and cores that compute
    together.
    """
    data, process = load(made, "training"), held()
    tracer = Tracer(made, sample_of(data))
    if why := does_not_fit(tracer, batch_size, optimizer):
        raise UsageError(f"--batch-size {batch_size}: {why}; plan with a smaller one")
    trace = tracer.follow(batch_size, optimizer)
    Trainer(with_data(made, data), build_model(made, 0, "cpu"), batch_size, seed=0)  # refuses what no replica computes
    names = [layer.name for layer in tracer.layers]
    profile = profiling.measure(made, data, names, ladder(batch_size), seconds, told=told)
    elements = sum(layer.parameters for layer in tracer.layers)
    steps = None
    if isinstance(task, str):
        told("steps of one process, and of as many as there are cores")
        steps = side_by_side.measure(task, data_dir, batch_size, there.cores, optimizer)
    if steps is None:
        steps = Steps(profile.at(batch_size, tracer.mapped).step, updates.measure(optimizer, elements).seconds)
    told("what a push and a fetch add to a step")
    quick = max((point.batch_size for point in profile.points if point.step <= LONGEST_STEP), default=1)
    beside = with_data(made, data), quick, TRIP_SECONDS, optimizer
    handling, passed = trips.measure(*beside), trips.measure_direct(*beside) if direct else DirectHandling()
    notes = [tracer.note] if tracer.note else []
    if steps.speed < 1.0:
        notes.append(f"while all cores compute, each has {steps.speed:.0%} of its speed")
    if steps.variation:
        notes.append(f"a step varies by {steps.variation:.0%}: who waits for others in each waits for the longest")
    if busy := profile.busy > BUSY:
        notes.append(f"the machine is busy ({profile.busy:.2f} times): times are the processor's")
    if batch_size in profile.left_out:
        notes.append(f"a batch of {batch_size} was not profiled: {profile.left_out[batch_size]}")
    own = memory_speed(optimizer, elements, steps.update)
    return _Here(
        steps.step, handling, own, passed, steps.speed, steps.variation, trace, process, len(data), busy, notes
    )


def _there(machines: Machines | str | None, topology: str) -> Machines:
    """The machines that are asked for, for which a topology must have room."""
    there = parse_machines(machines) if isinstance(machines, str) else machines or this_machine()
    if topology and there.hosts == 1:
        raise UsageError(f"--topology {topology}: is between hosts, and there is one; name several, as --machines 4x8")
    if topology:
        topologies.topology(topology).first(there.hosts, f"--machines {there}")
    return there


def _check_slow(slow: Mapping[int, float], run: int, asked: Iterable[PlanCandidate]) -> None:
    """Refuse slow replicas that cannot be."""
    most = max(one.replicas for one in asked)
    ComputeModel(slow=dict(slow)).check(most)
    if slow and run:
        raise UsageError(f"--stragglers: --run {run} runs on this machine, whose replicas are alike; leave one off")


def _check_run(run: int, there: Machines, file: Path | None) -> None:
    """Refuse runs that cannot be, or that could not be kept."""
    if run < 0:
        raise UsageError(f"--run {run}: must be 0 or more")
    if run and there != this_machine():
        raise UsageError(
            f"--run {run}: runs on this machine, which is {this_machine()}, not {there}; leave --machines or --run off"
        )
    if run:
        trials.check_writable(file)


def _try(
    found: TrainingPlan, run: int, task: Task | str, asked: Mapping[str, PlanCandidate], here: _Here,
    data_dir: str | None, told: Callable[[str], None],
) -> None:  # fmt: skip
    """Run the best of a plan that this machine can hold; what was measured goes into the rows, or why nothing was."""
    for at, row in enumerate(found.rows):
        if not run or row.terms is None:
            break
        if why := _too_large(asked[row.what], row.memory):
            found.rows[at] = msgspec.structs.replace(row, reason=why)
            continue
        told(f"training with {row.what}")
        found.rows[at] = _run(row, task, asked[row.what], found.batch_size, here.samples, data_dir)
        run -= 1


def _too_large(one: PlanCandidate, memory: int) -> str:
    """Why this machine has not the memory now for a candidate, whose largest process needs so much; "" where it has."""
    processes = one.replicas * one.partitions + one.shards
    needs, left = processes * memory, free_memory()
    if needs <= left:
        return ""
    return f"its {processes} processes need up to {needs / 1e9:.2f} GB, and {left / 1e9:.2f} GB are left here"


def _keep(
    found: TrainingPlan, here: _Here, priced: Mapping[str, Terms | None], asked: Mapping[str, PlanCandidate],
    optimizer: Optimizer, file: Path | None,
) -> None:  # fmt: skip
    """Keep what was measured beside the prices, which no trial has corrected; not where it is worth nothing."""
    kept = [
        trials.trial(asked[row.what], found.task, found.batch_size, optimizer, predicted, row.measured)
        for row in found.rows
        if row.measured is not None and 0 < row.measured.samples_per_second < math.inf
        and (predicted := priced[row.what]) is not None
    ]  # fmt: skip
    assert file  # it can be written
    if kept and here.busy:
        found.notes.append(f"{file} keeps nothing of these runs, since the machine is busy with something else")
    elif kept:
        trials.add(file, kept)


def _run(
    row: Row, task: Task | str, candidate: PlanCandidate, batch_size: int, samples: int, data_dir: str | None
) -> Row:
    """A candidate that was run, or why it was not."""
    assert row.terms is not None
    try:
        found = trials.run(task, candidate, batch_size, samples / row.terms.samples_per_second, data_dir)
    except Interrupted:
        raise
    except DistbeliefError as error:  # one that fails ends no plan
        return msgspec.structs.replace(row, reason=" ".join(str(error).split()))
    return msgspec.structs.replace(row, measured=found)


def _corrected(row: Row, known: Sequence[trials.PlanTrial], task: str, batch_size: int, optimizer: Optimizer) -> Row:
    """A price, as earlier trials that are alike correct it."""
    alike = trials.Alike(task, batch_size, trials.stepped(optimizer), row.command.split()[0], row.partitions > 1)
    factor, _ = trials.correction(known, alike)
    if row.terms is None or factor == 1.0:
        return row
    return msgspec.structs.replace(row, terms=trials.corrected(row.terms, factor), corrected=factor)


def _busiest(rows: Sequence[Row]) -> list[str]:
    """Which link each of the best loads most, where there is a topology."""
    return [f"{row.what}, on {row.terms.network}" for row in rows[:CONTENDERS] if row.terms and row.terms.network]


def _met(met: LockstepCosts) -> list[str]:
    """What was seen of processes that wait for each other."""
    seen = "; ".join(
        f"{name}{', split' if split else ''}: gradients {one.gradient:.2f} times as long, messages {one.messages:.2f}"
        for (name, split), one in met.found.items()
    )
    notes = [f"who waits for others in each step, by a short job of each kind: {seen}"] if seen else []
    return notes + [f"{what} was not tried for that, and is priced without: {why}" for what, why in met.failed.items()]


def _calibrated(rows: Sequence[Row], known: Sequence[trials.PlanTrial], file: Path | None) -> list[str]:
    """What earlier trials have to do with a plan."""
    others = sum(one.machine != trials.this_kind() for one in known)
    factors = {
        f"{row.command.split()[0]}{', split' * (row.partitions > 1)}": row.corrected
        for row in rows if row.corrected != 1.0
    }  # fmt: skip
    told = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    notes = [f"corrected by trials of this task on this machine, in {file}: {told} times the rate"] if told else []
    if others:
        notes.append(f"{others} trials in {file} are of another machine, or another torch, and count for nothing")
    return notes


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


def _row(
    one: PlanCandidate, pricing: Pricing, cluster: PricedCluster, trace: MemoryTrace, process: int, limit: float | None,
    told: Callable[[str], None],
) -> Row:  # fmt: skip
    """A candidate's price, or why it has none."""
    told(str(one))
    needs = _needs(one, trace, process, cluster.splits)
    largest = max(needs, key=lambda kind: needs[kind])
    row = Row(str(one), one.command, one.replicas, one.shards, needs[largest], one.partitions)
    if limit is not None and needs[largest] > limit:
        reason = f"its {largest} needs {needs[largest] / 1e9:.2f} GB, more than {limit / 1e9:.3g}"
        return msgspec.structs.replace(row, reason=reason)
    try:
        return msgspec.structs.replace(row, terms=pricing.terms(one, cluster))
    except DistbeliefError as error:  # one that cannot run ends no plan
        return msgspec.structs.replace(row, reason=" ".join(str(error).split()))


def _needs(
    one: PlanCandidate, trace: MemoryTrace, process: int, splits: Mapping[int, SplitCost | str]
) -> dict[str, int]:
    """Bytes of each kind of process of a candidate, with what is kept in reserve."""
    split = splits.get(one.partitions)
    held = memory(one, trace, process, split if isinstance(split, SplitCost) else None)
    return {kind: round(process + MARGIN * (bytes_ - process) + SPARE) for kind, bytes_ in held.items()}


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The most samples a second first; of equals, the fewest processes; what cannot be done last."""

    def order(row: Row) -> tuple[bool, float, int]:
        return (
            row.terms is None,
            -(row.terms.samples_per_second if row.terms else 0.0),
            row.replicas * row.partitions + row.shards,
        )

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
    if first.command.startswith("single") and first.partitions > 1:
        return f"{told}; one model on {first.partitions} processes has no more replicas"
    return f"{told}; {_enough(rows, first.command.split()[0], first.partitions)}"


def _enough(rows: Sequence[Row], name: str, partitions: int = 1) -> str:
    """From how many replicas on one more brings too little, of those of one strategy that are split alike."""
    rates = sorted(
        (row.replicas, row.terms.samples_per_second)
        for row in rows
        if row.terms is not None and row.partitions == partitions and row.command.split()[0] == name
    )
    for (few, rate), (many, more) in itertools.pairwise(rates):
        # what each one more brings, where so many more bring so much
        if (more / rate) ** (1 / (many - few)) - 1 < WORTH:
            return f"from {few} replicas on, one more brings under {WORTH:.0%}"
    return f"one more replica brings {WORTH:.0%} or more up to {rates[-1][0]}, the most there can be"


def _changes(
    best: Sequence[Row], asked: Mapping[str, PlanCandidate], pricing: Pricing, cluster: PricedCluster,
    tell: Callable[[str], None],
) -> list[str]:  # fmt: skip
    """What the answer would be with another network, and with a slow replica."""
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
        rates = {row.what: row.corrected * pricing.price(asked[row.what], changed).samples_per_second for row in best}
        first = max(rates, key=lambda name: rates[name])
        same = "still " if first == best[0].what else ""
        told.append(f"{what}: {same}{first}, {rates[first]:,.0f} samples/s")
    return told
