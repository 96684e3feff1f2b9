"""What is probably wrong with a job, one sentence each, with the evidence and an option that may help.

Each rule is a pure function of the sums of a job's records. A rule that is not sure finds nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from statistics import median
from typing import NamedTuple

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
STALE = 1.0  # mean staleness of two asynchronous replicas: pushes of fewer are not stale
HEAVY = 0.5  # momentum below which most of an update is new
FAR = 5.0  # times the usual staleness: exponential step times exceed it in one push of 150
TAIL = 10  # pushes that are far too stale: a few come from a pause, such as an evaluation
SLOW = 0.25  # of a fair share of samples: above it a slow machine is worth having
IDLE = 0.1  # of a fair share: below it a replica costs more than it brings
CROWD = 4  # replicas: of fewer, half is one or two
STARVED = 0.25  # of a replica's time for loading: a quarter more machines would do as much
WAITS = 0.3  # of a replica's time for the shards: below it more shards gain little
BUSY = 0.8  # of the time that a shard works: the rest is chance, as a queue grows without end near 1
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
    """Cause of a loss, probably."""

    level: Level
    rule: str
    sentence: str
    evidence: dict[str, float]
    """Numbers that the rule has compared."""
    remedy: str
    """Options that may help; "" where none does."""


class Found(NamedTuple):
    """Finding of a rule, with remedies of which the strategy may lack some."""

    sentence: str
    evidence: Mapping[str, float]
    remedies: Sequence[str]
    level: Level = Level.WRONG


class Evidence:
    """Facts that several rules read, derived from the sums of a job."""

    def __init__(self, sums: Summary, timeline: Timeline | None) -> None:
        assert sums.started is not None
        self.sums, self.settings, self.started, self.timeline = sums, sums.settings, sums.started, timeline
        self.by_steps = sums.started.unit == "epoch"
        """False for a batch method, whose replicas make no steps of their own."""
        self.stale: float = sums.staleness()["mean"] or 0.0
        self.present = {i: one for i, one in sorted(sums.replicas.items()) if one.joined is not None}
        self.times = {i: one.times for i, one in sorted(sums.replicas.items()) if one.times and one.times.steps}
        have = sums.resources
        self.scarce = have is not None and have.cores < have.computing

    def offers(self, remedy: str) -> bool:
        """Return whether the strategy has the option of a remedy."""
        name = remedy.split()[0].removeprefix("--").replace("-", "_")
        several = self.started.replicas > 1
        # settings have these names for all strategies
        some = {"lr": self.by_steps, "optimizer": self.by_steps, "replicas": several, "shards": self.started.shards}
        return bool(some.get(name, name in self.settings or name in ("snapshot_every", "out", "threads", "single")))

    def count(self, option: str) -> int:
        """Return an option's number, such as 50 of auto:50; 1 without one."""
        found = re.search(r"\d+", str(self.settings.get(option) or ""))
        return max(1, int(found[0])) if found else 1

    @cached_property
    def momentum(self) -> float:
        """Momentum on stale pushes, else 0; that of Adam has another meaning, as its step is scaled."""
        optimizer = self.settings.get("optimizer") or {}
        usual = 0.9 if optimizer.get("name") in ("momentum", "nesterov") else 0.0
        momentum = float((optimizer.get("options") or {}).get("momentum", usual))
        repeats = self.stale >= STALE and momentum >= HEAVY and not self.settings.get("local_optimizer")
        return momentum if repeats else 0.0

    @cached_property
    def trend(self) -> str:
        """Phrase on a loss that rises or is not finite; "" if it does neither."""
        if not self.by_steps:
            return ""
        if self.sums.cause == Cause.LOSS_NOT_FINITE:
            return "is not finite"
        if len(losses := self.losses) <= LAST:
            return ""
        best, last = min(losses[:-LAST]), min(losses[-LAST:])
        risen = last - best > max(RISES * (losses[0] - best), NOISE * abs(best))
        return f"has risen from {best:.3g} to {last:.3g}" if risen else ""

    @property
    def losses(self) -> list[float]:
        """Training losses in the order of time, each the mean of some; the first one is of the earliest steps."""
        if self.timeline is None:
            return [row["train_loss"] for row in self.sums.history if row["train_loss"] is not None]
        means, mean, weight = list[float](), Mean(), 0.0
        for one in self.timeline.amounts.between(0.0, math.inf):
            if one.sums.losses:
                means = means or [one.sums.least]
                mean.add(one.sums.loss / one.sums.losses, round(one.sums.losses))
                weight += one.sums.losses
            if weight >= LOSSES and (value := mean.take()) is not None:
                means.append(value)
                weight = 0.0
        return means

    @cached_property
    def shares(self) -> dict[int, float]:
        """Samples of each replica in the last window, as a part of a fair share, where chance can be left out."""
        sums, present, started = self.sums, self.present, self.started
        whole = sum(one.recent + one.older for one in present.values())
        # where each replica has its own samples, one that is done with them waits for the others
        dealt = self.settings.get("data", "shared") == "shared" and self.settings.get("order") != "sequential"
        warm = sums.steps > 2 * int(self.settings.get("warm_start_steps", 0))
        if not (whole and dealt and warm and self.by_steps and started.samples_per_epoch and sums.window > 0):
            return {}
        push = self.count("push_every") * self.count("accumulate") * started.batch_size
        stays = {i: min(1.0, (sums.seconds - (one.joined or 0.0)) / sums.window) for i, one in present.items()}
        fair = {i: stay * whole / len(present) for i, stay in stays.items()}
        return {i: (present[i].recent + present[i].older) / fair[i] for i in fair if fair[i] >= SURE * push}

    @cached_property
    def idle(self) -> list[int]:
        """Replicas that hardly take part, where these are a half; else none."""
        idle = [i for i, share in self.shares.items() if share < IDLE]
        return idle if len(self.present) >= CROWD and 2 * len(idle) >= len(self.present) else []


Rule = Callable[[Evidence], Found | None]


def _rate(e: Evidence) -> Found | None:
    """Find a learning rate that is too high for so many replicas."""
    if not e.trend or e.momentum:
        return None
    rate, implied = float((e.settings.get("optimizer") or {}).get("lr") or 0.0), e.stale / (1 + e.stale)
    why, remedies = "", [f"--lr {rate / max(2.0, 1 + e.stale):.2g}"]
    if e.stale >= STALE:
        why = f", as pushes that are {e.stale:.1f} updates old act like a momentum of {implied:.2f}"
        if e.settings.get("staleness_scaling") == "none" and not e.settings.get("local_optimizer"):
            remedies = ["--staleness-scaling inverse", *remedies, f"--warm-start-steps {100 * e.started.replicas}"]
    sentence = f"the loss {e.trend}: the learning rate {rate:g} is probably too high{why}"
    return Found(sentence, {"lr": rate, "staleness": e.stale, "implied_momentum": implied}, remedies)


def _momentum(e: Evidence) -> Found | None:
    """Find momentum on stale pushes; where the loss does not rise it is advice."""
    if not e.momentum:
        return None
    what = f"momentum {e.momentum:g} repeats pushes that are {e.stale:.1f} updates old"
    sentence = f"the loss {e.trend}: {what}" if e.trend else f"{what}, which act like momentum themselves"
    level = Level.WRONG if e.trend else Level.ADVICE
    return Found(sentence, {"momentum": e.momentum, "staleness": e.stale}, ["--optimizer sgd"], level)


def _staleness(e: Evidence) -> Found | None:
    """Find a slow replica whose pushes are far too stale."""
    if e.settings.get("staleness_scaling") != "none" or len(e.present) < 2 or not e.shares or e.idle:
        return None
    ahead = (max(1.0, e.count("fetch_every") / e.count("push_every")) + 1) / 2 + bool(e.settings.get("prefetch"))
    usual, stale = max(1.0, ahead * len(e.present) - 1), e.sums.staleness()
    tail = sum(count for each, count in stale["histogram"].items() if int(each) > FAR * usual)
    slow = min(e.shares, key=lambda i: e.shares[i])
    if tail < TAIL or e.shares[slow] >= SLOW:
        return None
    sentence = (
        f"{roles.replica(slow)} is slow: it does {_percent(e.shares[slow])} of a fair share of the samples, and pushes "
        f"come up to {stale['max']} updates late, where {usual:.0f} is usual"
    )
    found = {"share": e.shares[slow], "staleness_max": stale["max"], "usual": usual, "pushes": tail}
    return Found(sentence, found, ["--staleness-scaling inverse"])


def _silent(e: Evidence) -> Found | None:
    """Find a replica that contributes nothing."""
    silent = [roles.replica(i) for i, share in e.shares.items() if share == 0]
    if not silent or e.idle:
        return None
    late = f", and {e.sums.dropped:,} pushes came too late for their round" if e.sums.dropped else ""
    remedies = [f"--{name.replace('_', '-')} 0" for name in ("backup_workers", "quorum") if e.settings.get(name)]
    return Found(
        f"{roles.named(silent, NAMES)} contributed nothing in the last {e.sums.window:.0f} s{late}",
        {"silent": len(silent), "window": e.sums.window, "dropped": e.sums.dropped},
        remedies or [f"--replicas {len(e.present) - len(silent)}"],
    )


def _idle(e: Evidence) -> Found | None:
    """Find half of the replicas alive but not taking part."""
    idle, present = len(e.idle), len(e.present)
    sentence = f"{idle} of {present} replicas hardly take part: each does less than {_percent(IDLE)} of a fair share"
    return Found(sentence, {"idle": idle, "present": present}, [f"--replicas {present - idle}"]) if idle else None


def _starved(e: Evidence) -> Found | None:
    """Find replicas that wait for their data."""
    shares = {i: share for i, one in e.times.items() if (share := one.load / _whole(one)) > STARVED}
    if not shares:
        return None
    most = max(shares, key=lambda i: shares[i])
    load, step = (seconds / e.times[most].steps for seconds in (e.times[most].load, e.times[most].compute))
    who = roles.named([roles.replica(i) for i in shares], NAMES)
    sentence = f"{who} wait for data: loading a minibatch takes {_ms(load)}, and computing it {_ms(step)}"
    return Found(sentence, {"share": shares[most], "load": load, "compute": step, "starved": len(shares)}, [])


def _shards(e: Evidence) -> Found | None:
    """Find shards that all replicas wait for, as they are always busy with updates."""
    shards = e.started.shards
    if len(e.times) < 3 or not shards or e.scarce:
        return None
    wait = min(_waited(one, roles.Kind.SHARD) / _whole(one) for one in e.times.values())
    works = e.sums.busy
    if e.sums.job.get("path") == "direct":  # replicas make the updates, one at a time
        works = {"the shards": sum((one.update + one.communicate) / _whole(one) for one in e.times.values()) / shards}
    role, busy = max(works.items(), key=lambda one: one[1], default=("", 0.0))
    if wait < WAITS or busy < BUSY:
        return None
    sentence = (
        f"all replicas wait for {role}, {_percent(wait)} of their time: updates take {_percent(busy)} of its time"
    )
    return Found(sentence, {"wait": wait, "busy": busy}, [f"--shards {2 * shards}"])


def _network(e: Evidence) -> Found | None:
    """Find a job that waits for its network."""
    shared, sent = (sum(e.sums.bytes[way].values()) / max(1, e.sums.steps) for way in ("shared_memory", "sent"))
    if not e.times or sent <= shared or not e.by_steps or e.count("partitions") > 1 or _shards(e):
        return None
    share = min((one.wait + one.communicate) / _whole(one) for one in e.times.values())
    awaited = min(_waited(one, roles.Kind.SHARD, roles.Kind.REPLICA) / _whole(one) for one in e.times.values())
    if share < (NETWORK if "staleness_scaling" in e.settings else ROUNDS) or awaited < WAITS:
        return None
    step = median(one.compute / one.steps for one in e.times.values())
    remedies = [f"--push-every {2 * e.count('push_every')}", f"--accumulate {2 * e.count('accumulate')}"]
    if not any(map(e.offers, remedies)):  # its replicas share one memory
        return None
    sentence = f"the network takes {_percent(share)} of the time: {sent / 1e6:.2g} MB for each step of {_ms(step)}"
    return Found(sentence, {"share": share, "bytes_per_step": sent, "compute": step}, remedies)


def _beside(e: Evidence) -> Found | None:
    """Find evaluations or checkpoints that take long; an evaluator with its own process holds nothing up."""
    spent = {what: seconds / e.sums.seconds for what, seconds in e.sums.beside.items()}
    if e.started.shards:
        spent.pop("evaluations", None)
    what = max(spent, key=lambda what: spent[what], default="")
    if not what or spent[what] < BESIDE:
        return None
    batches = int(e.settings.get("evaluate_minibatches", 0))
    remedies = [f"--checkpoint-every {2 * e.count('checkpoint_every')}", "--snapshot-every 5min"]
    if what == "evaluations":
        remedies = [f"--evaluate-every {f'{2 * batches}minibatches' if batches else 2 * e.count('evaluate_every')}"]
    return Found(f"{what} take {_percent(spent[what])} of the time", {what: spent[what]}, remedies)


def _alone(e: Evidence) -> Found | None:
    """Find that one process would be faster, by a replica's own time of a step."""
    if len(e.times) < 2 or not e.by_steps or e.count("partitions") > 1:
        return None
    alone = e.started.batch_size / (median(one.compute / one.steps for one in e.times.values()) or 1.0)
    if alone < FASTER * e.sums.rate:
        return None
    sentence = f"one process would be faster, at about {alone:,.0f} samples/s: all replicas do {e.sums.rate:,.0f}"
    return Found(sentence, {"alone": alone, "rate": e.sums.rate}, ["single"], Level.ADVICE)


def _cores(e: Evidence) -> Found | None:
    """Find fewer cores than threads that compute."""
    if not e.scarce or (have := e.sums.resources) is None:
        return None
    sentence = f"{have.computing} threads compute gradients on {have.cores} cores"
    fewer = [f"--replicas {have.cores}"]
    if have.computing > e.started.replicas * e.count("partitions"):
        fewer = ["--threads 1"]
    return Found(sentence, {"computing": have.computing, "cores": have.cores}, fewer, Level.ADVICE)


def _memory(e: Evidence) -> Found | None:
    """Find a memory near its limit."""
    have = e.sums.resources
    if have is None or have.free_memory >= SCARCE * have.memory:
        return None
    sentence = f"memory is nearly full: {have.free_memory / 1e9:.2g} of {have.memory / 1e9:.3g} GB are free"
    fewer = [f"--replicas {e.started.replicas // 2}", f"--batch-size {max(1, e.started.batch_size // 2)}"]
    return Found(sentence, {"free": have.free_memory, "memory": have.memory}, fewer)


def _disk(e: Evidence) -> Found | None:
    """Find a disk without room for the next two checkpoints."""
    have, room = e.sums.resources, ROOM + 2 * STATES * FLOAT * e.started.parameters
    if have is None or not have.disk or have.free_disk >= room:
        return None
    sentence = f"the disk of the run folder is nearly full: {have.free_disk / 1e9:.2g} GB are free"
    return Found(sentence, {"free": have.free_disk, "room": room}, ["--keep-checkpoints 1", "--out"])


def _whole(times: StepsTimed) -> float:
    return (times.compute + times.update + times.communicate + times.wait + times.load) or 1.0


def _waited(times: StepsTimed, *kinds: roles.Kind) -> float:
    return sum(seconds for role, seconds in times.waited.items() if roles.kind(role) in kinds)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


RULES: Mapping[str, Rule] = {
    "rate": _rate, "momentum": _momentum, "staleness": _staleness, "silent": _silent, "idle": _idle,
    "starved": _starved, "shards": _shards, "network": _network, "beside": _beside, "alone": _alone, "cores": _cores,
    "memory": _memory, "disk": _disk,
}  # fmt: skip
"""Rules by name, in the order in which their findings are told."""


def diagnose(summary: Summary, timeline: Timeline | None = None) -> list[Diagnosis]:
    """Return what is probably wrong with a job, advice last.

    Args:
        summary: the job's, at any moment.
        timeline: the job's at the same moment; without one, a rising loss is seen from evaluation to evaluation.
    """
    failed = summary.cause == Cause.LOSS_NOT_FINITE
    if summary.started is None or not summary.seconds or (summary.lasted < GRACE and not failed):
        return []
    evidence, told = Evidence(summary, timeline), list[Diagnosis]()
    for name, rule in RULES.items():
        if found := rule(evidence):
            remedy = " or ".join(filter(evidence.offers, found.remedies))
            told.append(Diagnosis(found.level, name, found.sentence, dict(found.evidence), remedy))
    return sorted(told, key=lambda one: one.level is Level.ADVICE)
