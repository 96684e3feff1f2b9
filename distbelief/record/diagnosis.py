"""Diagnoses of a job: what is probably wrong, one sentence each, with the evidence and an option that may help.

Each rule reads the sums of a job's records, and nothing else. A rule that is not sure finds nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from statistics import median

import msgspec

from distbelief.core import roles
from distbelief.core.records import Cause, StepsTimed
from distbelief.record.summary import Mean, Summary
from distbelief.record.timeline import Timeline

NAMES = 8
"""Most names of replicas in one sentence."""
# thresholds, each with its reason
GRACE = 5.0  # seconds of training: roles start one after another, and the first steps are slow
SURE = 10.0  # pushes at the usual rate: who makes so many by chance makes none once in 22,000 times
RISES = 0.5  # part of its fall that the loss loses again: a new phase of the learning rate may cost some
NOISE = 0.15  # of the best loss: a loss that has hardly fallen is only noise
LOSSES = 20  # losses in a mean: those of single minibatches differ by half
LAST = 3  # means in a row that have risen: one bad stretch says nothing
BURST = 2.0  # times the first loss: no step in the right direction leads there
STALE = 1.0  # mean staleness of two asynchronous replicas: pushes of fewer are not stale
HEAVY = 0.5  # momentum below which most of an update is new
FAR = 5.0  # times the usual staleness: exponential step times exceed it in one push of 150
TAIL = 10  # pushes that are far too stale: a few come from a pause, such as an evaluation
SLOW = 0.25  # of a fair share of samples: above it a slow machine is worth having
IDLE = 0.1  # of a fair share: below it a replica costs more than it brings
CROWD = 4  # replicas: of fewer, half is one or two
STARVED = 0.25  # of a replica's time for loading: a quarter more machines would do as much
WAITS = 0.3  # of a replica's time for the shards: below it more shards gain little
BUSY = 0.8  # of the time that a shard works: a queue grows without end near 1
NETWORK = 0.7  # of an asynchronous replica's time for messages: less is usual for small models
ROUNDS = 0.9  # the same in rounds: of 200 replicas with exponential times, each waits 83 % for the slowest
BESIDE = 0.1  # of the time for evaluations or checkpoints: more is seldom meant
FASTER = 1.25  # times as fast: below it, other work of one process may take what it gains
SCARCE = 0.05  # of the memory: the kernel keeps a part free, and kills when it cannot
ROOM = 100e6  # bytes of the disk besides the next two checkpoints: metrics, logs and events grow
STATES, FLOAT = 3, 4  # vectors of a checkpoint (parameters and two states of Adam), and bytes of an element


class Level(StrEnum):
    """Weight of a diagnosis."""

    WRONG = "wrong"
    """The job fails, or wastes much of its time; it is told while the job runs."""
    ADVICE = "advice"
    """Another choice may be better; it is told at the end."""


class Diagnosis(msgspec.Struct, frozen=True):
    """Probable cause of a failure or of wasted time."""

    level: Level
    rule: str
    sentence: str
    evidence: dict[str, float]
    """Numbers that the rule has compared."""
    remedy: str
    """Options that may help; "" where none does."""


class Evidence:
    """Facts that several rules read, derived from the sums of a job."""

    def __init__(self, sums: Summary, timeline: Timeline | None) -> None:
        assert sums.started is not None
        self.sums, self.settings, self.started, self.timeline = sums, sums.settings, sums.started, timeline
        self.by_steps = sums.started.unit == "epoch"
        """False for a batch method, whose replicas make no steps of their own."""
        self.optimizer = self.settings.get("optimizer") or {}
        self.gradients = not self.settings.get("local_optimizer")
        """True where replicas push gradients, and no changes by steps of their own."""
        self.staleness = sums.staleness()
        self.stale: float = self.staleness["mean"] or 0.0
        self.present = {i: counts for i, counts in sorted(sums.replicas.items()) if counts.joined is not None}
        self.times = [
            counts.times for _, counts in sorted(sums.replicas.items()) if counts.times and counts.times.steps
        ]

    def offers(self, remedy: str) -> bool:
        """Return whether the strategy has the option of a remedy."""
        name = remedy.split()[0].removeprefix("--").replace("-", "_")
        several = self.started.replicas > 1
        # settings have these names for all strategies
        some = {"lr": self.by_steps, "optimizer": self.by_steps, "replicas": several, "shards": self.started.shards}
        return bool(some.get(name, name in self.settings or name in ("snapshot_every", "out", "threads", "single")))

    def diagnosis(
        self,
        rule: str,
        sentence: str,
        numbers: Mapping[str, float],
        remedies: Iterable[str],
        level: Level = Level.WRONG,
    ) -> Diagnosis:
        """Make a diagnosis, with those remedies that the strategy has."""
        return Diagnosis(level, rule, sentence, dict(numbers), " or ".join(filter(self.offers, remedies)))

    def count(self, option: str) -> int:
        """Return an option's number, such as 50 of auto:50; 1 without one."""
        digits = re.search(r"\d+", str(self.settings.get(option) or ""))
        return max(1, int(digits[0])) if digits else 1

    @property
    def trend(self) -> str:
        """Phrase on a loss that rises or is not finite; "" if it does neither."""
        if self.sums.cause == Cause.LOSS_NOT_FINITE and self.by_steps:
            return "is not finite"
        losses, first = self.losses if self.by_steps else [], self.sums.first_loss
        if len(losses) <= LAST:
            return ""
        best, last = min(losses[:-LAST]), min(losses[-LAST:])
        if first and last > BURST * abs(first):
            best = first
        elif last - best <= max(RISES * (losses[0] - best), NOISE * abs(best)):
            return ""
        return f"has risen from {best:.3g} to {last:.3g}"

    @property
    def losses(self) -> list[float]:
        """Means of training losses in the order of time."""
        if self.timeline is None:
            return [row["train_loss"] for row in self.sums.history if row["train_loss"] is not None]
        means, mean, weight = list[float](), Mean(), 0.0
        for bin in self.timeline.amounts.between(0.0, math.inf):
            if bin.sums.losses:
                mean.add(bin.sums.loss / bin.sums.losses, round(bin.sums.losses))
                weight += bin.sums.losses
            if weight >= LOSSES and (value := mean.take()) is not None:
                means.append(value)
                weight = 0.0
        return means

    @cached_property
    def shares(self) -> dict[int, float]:
        """Samples of each replica in the last window, as a part of a fair share, where chance can be left out."""
        sums, present, started = self.sums, self.present, self.started
        whole = sum(counts.recent + counts.older for counts in present.values())
        # where each replica has its own samples, one that is done with them waits for the others
        dealt = self.settings.get("data", "shared") == "shared" and self.settings.get("order") != "sequential"
        warm = sums.steps > 2 * int(self.settings.get("warm_start_steps", 0))
        if not (whole and dealt and warm and self.by_steps and started.samples_per_epoch and sums.window > 0):
            return {}
        push = self.count("push_every") * self.count("accumulate") * started.batch_size
        stays = {i: min(1.0, (sums.seconds - (counts.joined or 0.0)) / sums.window) for i, counts in present.items()}
        fair = {i: stay * whole / len(present) for i, stay in stays.items()}
        return {i: (present[i].recent + present[i].older) / fair[i] for i in fair if fair[i] >= SURE * push}


def _learning(e: Evidence) -> Iterator[Diagnosis]:
    """Find a loss that rises, by momentum on stale pushes or by a rate that is too high for so many replicas."""
    trend, rate, implied = e.trend, float(e.optimizer.get("lr") or 0.0), e.stale / (1 + e.stale)
    # that of Adam has another meaning, as its step is scaled
    usual = 0.9 if e.optimizer.get("name") in ("momentum", "nesterov") else 0.0
    momentum = float((e.optimizer.get("options") or {}).get("momentum", usual))
    if e.stale >= STALE and momentum >= HEAVY and e.gradients:
        what = f"momentum {momentum:g} repeats pushes that are {e.stale:.1f} updates old"
        sentence = f"the loss {trend}: {what}" if trend else f"{what}, which act like momentum themselves"
        numbers = {"momentum": momentum, "staleness": e.stale}
        yield e.diagnosis("momentum", sentence, numbers, ["--optimizer sgd"], Level.WRONG if trend else Level.ADVICE)
    elif trend:
        why, remedies = "", [f"--lr {rate / max(2.0, 1 + e.stale):.2g}"]
        if e.stale >= STALE:
            why = f", as pushes that are {e.stale:.1f} updates old act like a momentum of {implied:.2f}"
            if e.settings.get("staleness_scaling") == "none" and e.gradients:
                remedies = ["--staleness-scaling inverse", *remedies, f"--warm-start-steps {100 * e.started.replicas}"]
        sentence = f"the loss {trend}: the learning rate {rate:g} is probably too high{why}"
        yield e.diagnosis("rate", sentence, {"lr": rate, "staleness": e.stale, "implied_momentum": implied}, remedies)


def _taking_part(e: Evidence) -> Iterator[Diagnosis]:
    """Find replicas that do much less than the others: half of them, one that does nothing, or a slow one."""
    present, window = len(e.present), e.sums.window
    idle = [i for i, share in e.shares.items() if share < IDLE]
    if present >= CROWD and 2 * len(idle) >= present:
        sentence = (
            f"{len(idle)} of {present} replicas hardly take part, each with under {_percent(IDLE)} of a fair share"
        )
        yield e.diagnosis(
            "idle", sentence, {"idle": len(idle), "present": present}, [f"--replicas {present - len(idle)}"]
        )
    elif silent := [roles.replica(i) for i, share in e.shares.items() if share == 0]:
        late = f", and {e.sums.dropped:,} pushes came too late for their round" if e.sums.dropped else ""
        sentence = f"{roles.named(silent, NAMES)} contributed nothing in the last {window:.0f} s{late}"
        numbers = {"silent": len(silent), "window": window, "dropped": e.sums.dropped}
        remedies = [f"--{name.replace('_', '-')} 0" for name in ("backup_workers", "quorum") if e.settings.get(name)]
        yield e.diagnosis("silent", sentence, numbers, remedies or [f"--replicas {present - len(silent)}"])
    elif e.shares and e.settings.get("staleness_scaling") == "none":
        slow = min(e.shares, key=lambda i: e.shares[i])
        ahead = (max(1.0, e.count("fetch_every") / e.count("push_every")) + 1) / 2 + bool(e.settings.get("prefetch"))
        usual, most = max(1.0, ahead * present - 1), e.staleness["max"]
        tail = sum(count for each, count in e.staleness["histogram"].items() if int(each) > FAR * usual)
        if tail >= TAIL and e.shares[slow] < SLOW:
            sentence = (
                f"{roles.replica(slow)} is slow, with {_percent(e.shares[slow])} of a fair share of samples: pushes "
                f"come up to {most} updates late, where {usual:.0f} is usual"
            )
            numbers = {"share": e.shares[slow], "staleness_max": most, "usual": usual, "pushes": tail}
            yield e.diagnosis("staleness", sentence, numbers, ["--staleness-scaling inverse"])


def _starved(e: Evidence) -> Iterator[Diagnosis]:
    """Find replicas that wait for their data."""
    starved = [times for times in e.times if times.load / _whole(times) > STARVED]
    if starved:
        most = max(starved, key=lambda times: times.load / _whole(times))
        load, step, who = most.load / most.steps, most.compute / most.steps, [one.role for one in starved]
        durations = f"loading a minibatch takes {1000 * load:.3g} ms, and computing it {1000 * step:.3g} ms"
        numbers = {"share": most.load / _whole(most), "load": load, "compute": step, "starved": len(starved)}
        yield e.diagnosis("starved", f"data come too slowly to {roles.named(who, NAMES)}: {durations}", numbers, [])


def _messages(e: Evidence) -> Iterator[Diagnosis]:
    """Find shards that all replicas wait for, as they always work; else a network."""
    if len(e.times) < 2:
        return
    shards, direct = e.started.shards, e.sums.job.get("path") == "direct"
    wait = min(_waited(times, roles.Kind.SHARD) / _whole(times) for times in e.times)
    # on the direct path replicas make the updates, one at a time
    works = {
        "the shards": sum((times.update + times.communicate) / _whole(times) for times in e.times) / max(1, shards)
    }
    role, busy = max((works if direct else e.sums.busy).items(), key=lambda one: one[1], default=("", 0.0))
    if len(e.times) > 2 and shards and wait >= WAITS and busy >= BUSY and not _scarce(e):
        sentence = f"all replicas wait for {role}, {_percent(wait)} of their time: updates take {_percent(busy)} there"
        yield e.diagnosis("shards", sentence, {"wait": wait, "busy": busy}, [f"--shards {2 * shards}"])
        return
    shared, sent = (sum(e.sums.bytes[way].values()) / max(1, e.sums.steps) for way in ("shared_memory", "sent"))
    share = min((times.wait + times.communicate) / _whole(times) for times in e.times)
    awaited = min(_waited(times, roles.Kind.SHARD, roles.Kind.REPLICA) / _whole(times) for times in e.times)
    limit = NETWORK if "staleness_scaling" in e.settings else ROUNDS
    remedies = [f"--push-every {2 * e.count('push_every')}", f"--accumulate {2 * e.count('accumulate')}"]
    have = e.sums.resources
    here = have is not None and have.computing >= e.started.replicas  # on one machine they wait for its cores
    whole = e.by_steps and e.count("partitions") == 1 and not here
    if whole and sent > shared and share >= limit and awaited >= WAITS and any(map(e.offers, remedies)):
        step = median(times.compute / times.steps for times in e.times)
        each = f"{sent / 1e6:.2g} MB for each step of {1000 * step:.3g} ms"
        sentence = f"the network takes {_percent(share)} of the time: {each}"
        yield e.diagnosis("network", sentence, {"share": share, "bytes_per_step": sent, "compute": step}, remedies)


def _beside(e: Evidence) -> Iterator[Diagnosis]:
    """Find evaluations or checkpoints that take long; an evaluator with its own process holds nothing up."""
    spent = {what: seconds / e.sums.seconds for what, seconds in e.sums.beside.items()}
    if e.started.shards:
        spent.pop("evaluations", None)
    what = max(spent, key=lambda what: spent[what], default="")
    if not what or spent[what] < BESIDE:
        return
    batches = int(e.settings.get("evaluate_minibatches", 0))
    remedies = [f"--checkpoint-every {2 * e.count('checkpoint_every')}", "--snapshot-every 5min"]
    if what == "evaluations":
        remedies = [f"--evaluate-every {f'{2 * batches}minibatches' if batches else 2 * e.count('evaluate_every')}"]
    level = Level.WRONG if e.sums.beside[what] >= GRACE else Level.ADVICE  # a short job has lost little
    sentence = f"{what} take {_percent(spent[what])} of the time"
    yield e.diagnosis("beside", sentence, {what: spent[what]}, remedies, level)


def _alone(e: Evidence) -> Iterator[Diagnosis]:
    """Find that one process would be faster, by a replica's own time of a step."""
    if len(e.times) < 2 or not e.by_steps or e.count("partitions") > 1:
        return
    alone = e.started.batch_size / (median(times.compute / times.steps for times in e.times) or 1.0)
    if alone >= FASTER * e.sums.rate:
        sentence = f"one process would be faster, at about {alone:,.0f} samples/s: all replicas do {e.sums.rate:,.0f}"
        yield e.diagnosis("alone", sentence, {"alone": alone, "rate": e.sums.rate}, ["single"], Level.ADVICE)


def _machine(e: Evidence) -> Iterator[Diagnosis]:
    """Find fewer cores than threads that compute, a memory near its limit, and a disk with no room for checkpoints."""
    have, replicas = e.sums.resources, e.started.replicas
    if have is None:
        return
    if _scarce(e):
        sentence = f"{have.computing} threads compute gradients on {have.cores} cores"
        threads = have.computing > replicas * e.count("partitions")
        remedies = ["--threads 1" if threads else f"--replicas {have.cores}"]
        numbers = {"computing": have.computing, "cores": have.cores}
        yield e.diagnosis("cores", sentence, numbers, remedies, Level.ADVICE)
    if have.free_memory < SCARCE * have.memory:
        sentence = f"memory is nearly full: {have.free_memory / 1e9:.2g} of {have.memory / 1e9:.3g} GB are free"
        fewer = [f"--replicas {replicas // 2}", f"--batch-size {max(1, e.started.batch_size // 2)}"]
        yield e.diagnosis("memory", sentence, {"free": have.free_memory, "memory": have.memory}, fewer)
    room = ROOM + 2 * STATES * FLOAT * e.started.parameters
    if have.disk and have.free_disk < room:
        sentence = f"the disk of the run folder is nearly full: {have.free_disk / 1e9:.2g} GB are free"
        yield e.diagnosis("disk", sentence, {"free": have.free_disk, "room": room}, ["--keep-checkpoints 1", "--out"])


def _scarce(e: Evidence) -> bool:
    return e.sums.resources is not None and e.sums.resources.cores < e.sums.resources.computing


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _whole(times: StepsTimed) -> float:
    return (times.compute + times.update + times.communicate + times.wait + times.load) or 1.0


def _waited(times: StepsTimed, *kinds: roles.Kind) -> float:
    return sum(seconds for kind, seconds in times.waited_by_kind().items() if kind in kinds)


RULES = (_learning, _taking_part, _starved, _messages, _beside, _alone, _machine)
"""Rules, in the order in which their findings are told."""


def diagnose(summary: Summary, timeline: Timeline | None = None) -> list[Diagnosis]:
    """Return what is probably wrong with a job, advice last.

    Args:
        summary: the job's, at any moment.
        timeline: the job's at the same moment; without one, a rising loss is seen from evaluation to evaluation.
    """
    failed = summary.cause == Cause.LOSS_NOT_FINITE
    if summary.started is None or not summary.seconds or (summary.lasted < GRACE and not failed):
        return []
    evidence = Evidence(summary, timeline)
    diagnoses = [diagnosis for rule in RULES for diagnosis in rule(evidence)]
    return sorted(diagnoses, key=lambda diagnosis: diagnosis.level is Level.ADVICE)
