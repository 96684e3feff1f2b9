"""Summary: sums over the records of a run, while it runs and in `result.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, TypedDict

import msgspec

from distbelief.core import records, roles
from distbelief.core.messages import CONTROL, FETCH, KINDS, PUSH, WAYS
from distbelief.core.records import Json
from distbelief.record.folder import versions

OVERFLOWS = ("overflows", "counted")
PARTS = ("compute", "update", "communicate", "wait")
"""Parts of a step."""
TIMES = ("steps", *PARTS, "load")
"""Fields of a replica's times: the number of timed steps, and the seconds of each part."""
WINDOW = 60.0
"""Seconds of a window, over one or two of which participation is counted."""
ROWS = 2000
"""Most rows of a history."""


class ReplicaCounts(msgspec.Struct):
    """Counts of one replica, including work that was undone and repeated."""

    steps: int = 0
    samples: int = 0
    pushes: int = 0
    lost: int = 0
    """Minibatches that were lost when it died, and dealt again."""
    given_up: int = 0
    """Its own minibatches that no replica computed; -1 if their number is unknown."""
    times: records.StepsTimed | None = None
    """Times of its lives."""
    gone: str = ""
    """Reason of its death; empty if it takes part or has left."""
    recent: int = 0
    """Samples in the present window."""
    older: int = 0
    """Samples in the window before."""
    joined: float | None = None
    """Seconds of training after which it has joined; None once it has died, or left before the job's end."""


class HistoryRow(TypedDict):
    """Measures of the model at one moment, as `result.json` has them."""

    seconds: float
    epoch: int
    samples: int
    updates: int
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    test_metrics: NotRequired[dict[str, float | None]]
    """Measures of the task besides loss and accuracy."""


class TargetReached(TypedDict):
    """Moment at which a target was reached, as `result.json` has it."""

    seconds: float
    epochs: int


class DescentSummary(TypedDict):
    """Progress of a batch method, as `result.json` has it."""

    iterations: int
    loss: float | None
    gradient: float | None
    """Largest component of the gradient."""
    evaluations: int
    restarts: int
    """Failed line searches."""
    copies: int
    """Work units that were dealt a second time."""


class Mean(msgspec.Struct):
    """Weighted mean that begins again whenever it is taken.

    >>> mean = Mean()
    >>> mean.add(2.0, 3), mean.add(6.0, 1), mean.take(), mean.take()
    (None, None, 3.0, None)
    >>> mean.add(2.0, 1), mean.add(None, 0), mean.latest(), mean.latest()
    (None, None, 2.0, 2.0)
    """

    _sum: float = 0.0
    _weight: int = 0
    _last: float | None = None

    def add(self, value: float | None, weight: int) -> None:
        """Add a value that counts `weight` times, if it is known."""
        if value is not None:
            self._sum, self._weight = self._sum + value * weight, self._weight + weight

    def take(self) -> float | None:
        """Return the mean since the last call, or None without values."""
        mean = self._sum / self._weight if self._weight else None
        self._sum, self._weight = 0.0, 0
        return mean

    def latest(self) -> float | None:
        """Return the mean since the last call; without values, what that call returned."""
        if (mean := self.take()) is not None:
            self._last = mean
        return self._last


class Summary(msgspec.Struct):
    """Sums over records, which are added in the order of time."""

    job: Json
    """Contents of `job.json`: task, strategy, settings (with `target_accuracy`, `evaluate_every`, ...), seed, device,
    versions.
    """
    started: records.Started | None = None
    replicas: dict[int, ReplicaCounts] = {}
    members: set[str] = set()
    """Replicas that take part, and standbys that are ready; a recorder keeps only those of its own attempt."""
    failures: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(("replica", "shard", "standby", "checkpoint"), 0)
    )
    """Deaths by kind of role, and failed checkpoints; of a recorder, those in its own attempt."""
    history: list[HistoryRow] = []
    """All rows up to `ROWS`; beyond that only every second, fourth, ..., and the last."""
    applied: dict[str, records.Applied] = {}
    steps: int = 0
    samples: int = 0
    pushes: int = 0
    bytes: dict[str, dict[str, int]] = msgspec.field(
        default_factory=lambda: {way: dict.fromkeys(KINDS, 0) for way in WAYS}
    )
    """Bytes of all roles, by way (sent or shared memory) and kind."""
    epochs: int = 0
    dropped: int = 0
    forgotten: int = 0
    seconds: float = 0.0
    """Time from `Started` to the last `Stepped`, summed over the attempts of a resumed run."""
    reached: TargetReached | None = None
    evaluating: float = 0.0
    """Seconds of evaluations."""
    beside: dict[str, float] = {}
    """Seconds of evaluations and of checkpoints after which training went on."""
    busy: dict[str, float] = {}
    """Share of the time in which each shard's process works."""
    resources: records.Resources | None = None
    outcome: str = ""
    cause: str = ""
    reason: str = ""
    descent: DescentSummary | None = None
    """Progress of a batch method."""
    split: dict[str, str] | None = None
    """Ways by which a model is split, and a sentence about them."""
    tested: HistoryRow | None = None
    """Row of the last evaluation."""
    _rows: int = 0
    """Number of rows so far, kept or not."""
    _stride: int = 1
    """Distance between kept rows."""
    _forgotten: dict[tuple[str, str, int], int] = {}
    _holding: TargetReached | None = None
    """Moment of the last evaluation, if it met the target."""
    first_loss: float | None = None
    """Training loss of the first steps."""
    _loss: Mean = msgspec.field(default_factory=Mean)
    _counted: int = 0
    """Samples whose seconds are known; a resumed run may have lost the metrics of earlier samples."""
    _window: float = 0.0
    """Beginning of the present window."""
    _older: float = 0.0
    """Beginning of the window before."""
    _ending: bool = False
    _last_beside: dict[str, float] = {}
    """Seconds of evaluations and of checkpoints since the last steps."""
    _began: float = 0.0
    _before: float = 0.0

    @property
    def settings(self) -> Json:
        """Return the job's settings."""
        return self.job.get("settings") or {}

    def take(self, seconds: float, record: records.Record) -> None:
        """Add a record from `seconds` after this attempt of the job began."""
        if (take := TAKES.get(type(record))) is not None:
            take(self, seconds, record)

    def _take_started(self, seconds: float, record: records.Started) -> None:
        self.started, self.samples = record, record.samples
        self.epochs = max(self.epochs, self._done(record, record.samples_per_epoch))
        self._began, self._before = seconds, self.seconds
        self.applied, self.outcome, self.cause, self.reason = {}, "", "", ""
        self._ending, self.busy = False, {}
        for replica in self.replicas.values():
            replica.gone = ""
            # those of earlier attempts are gone; the replica that sends the initial parameters joins before the start
            replica.joined = None if record.samples or replica.joined is None else self._before

    def _take_joined(self, seconds: float, record: records.Joined | records.StandbyReady) -> None:
        self.members.add(record.role)
        if roles.is_replica(record.role):
            replica = self._replica(record.role)
            replica.gone, replica.given_up, replica.joined = "", 0, self._training(seconds)

    def _take_rewound(self, _: float, record: records.Rewound) -> None:
        self.samples, self.reached, self._holding = record.samples, None, None  # the model at the target is lost
        self.epochs = min(self.epochs, self._done(record, self.started.samples_per_epoch)) if self.started else 0

    def _take_forgotten(self, _: float, record: records.Forgotten) -> None:
        whose = record.role, record.replica, record.incarnation  # a shard may go back to the same checkpoint twice
        self.forgotten += max(0, record.last - max(record.first - 1, self._forgotten.get(whose, 0)))
        self._forgotten[whose] = max(record.last, self._forgotten.get(whose, 0))

    def _take_epoch_done(self, seconds: float, record: records.EpochDone) -> None:
        self.epochs = max(self.epochs, record.epoch)
        if not (self.settings.get("evaluate_every", 1) or self.settings.get("evaluate_minibatches", 0)):
            self._row(seconds, record.epoch)

    def _take_gone(self, _: float, record: records.Gone) -> None:
        self._part(record.role, record.died)
        if roles.is_replica(record.role):
            replica = self._replica(record.role)
            replica.lost += record.lost
            replica.given_up = record.given_up
            replica.gone = (record.reason or "for no known reason") if record.died else ""
            if record.died or not self._ending:
                replica.joined = None

    def _take_succeeded(self, _: float, record: records.Succeeded) -> None:
        self.members.discard(record.standby)  # whose next incarnation is vacant now, but it has not failed
        self.failures["shard"] += 1

    def _take_vacant(self, _: float, record: records.Vacant) -> None:
        self._part(record.role, roles.kind(record.role) is roles.Kind.SHARD or record.role in self.members)

    def _part(self, role: str, failed: bool) -> None:
        if failed:
            self.failures[roles.kind(role)] = self.failures.get(roles.kind(role), 0) + 1
        self.members.discard(role)

    def _take_ending(self, _: float, record: records.Ending) -> None:
        self._ending = True

    def _take_checkpointed(self, _: float, record: records.Checkpointed) -> None:
        self.failures["checkpoint"] += bool(record.error)
        self._last_beside["checkpoints"] = self._last_beside.get("checkpoints", 0.0) + record.took

    def _take_resources(self, _: float, record: records.Resources) -> None:
        self.resources = record

    def _take_applied(self, seconds: float, record: records.Applied) -> None:
        self.applied[record.role] = record
        if record.busy and (lasted := seconds - self._began) > 0:
            self.busy[record.role] = record.busy / lasted

    def _take_steps_timed(self, _: float, record: records.StepsTimed) -> None:
        if roles.partition_of(record.role) > 0:  # the times of a split replica are those of its lead
            return
        replica = self._replica(record.role)
        before = replica.times
        if before is None:
            replica.times = record
            return
        both = {name: getattr(before, name) + getattr(record, name) for name in (*TIMES, *OVERFLOWS)}
        waited = dict(before.waited)
        for role, more in record.waited.items():
            waited[role] = waited.get(role, 0.0) + more
        replica.times = msgspec.structs.replace(record, **both, waited=waited)

    def _take_bytes_counted(self, _: float, record: records.BytesCounted) -> None:
        for way in WAYS:
            for kind, count in getattr(record, way).items():
                self.bytes[way][kind] = self.bytes[way].get(kind, 0) + count

    def _take_finished(self, _: float, record: records.Finished) -> None:
        self.outcome, self.cause, self.reason = record.outcome, record.cause, record.reason

    def _done(self, record: records.Started | records.Rewound, samples_per_epoch: int) -> int:
        return record.done if record.done >= 0 else record.samples // max(samples_per_epoch, 1)

    def _replica(self, role: str) -> ReplicaCounts:
        return self.replicas.setdefault(0 if role == roles.SINGLE else roles.index_of(role), ReplicaCounts())

    def _take_stepped(self, seconds: float, record: records.Stepped) -> None:
        replica = self._replica(record.role)
        if self._training(seconds) > self._window + WINDOW:
            self._older, self._window = self._window, self._training(seconds)
            for each in self.replicas.values():
                each.older, each.recent = each.recent, 0
        replica.recent += record.samples
        for what, took in self._last_beside.items():
            self.beside[what] = self.beside.get(what, 0.0) + took
        self._last_beside.clear()
        for sums in (self, replica):
            sums.steps += record.steps
            sums.samples += record.samples
            sums.pushes += record.pushes
        self._counted += record.samples
        self.dropped += record.dropped
        self.seconds = self._training(seconds)
        self._loss.add(record.loss, record.losses)
        self.first_loss = record.loss if self.first_loss is None else self.first_loss

    def participation(self, index: int) -> float | None:
        """Return a replica's share of the last window's samples (0 to 1); None before there are any."""
        whole = sum(replica.recent + replica.older for replica in self.replicas.values())
        mine = self.replicas.get(index, ReplicaCounts())
        return (mine.recent + mine.older) / whole if whole else None

    @property
    def window(self) -> float:
        """Return the seconds of training in which the samples of `participation` were done."""
        return self.seconds - self._older

    @property
    def lasted(self) -> float:
        """Return the seconds of training of this attempt."""
        return self.seconds - self._before

    def _take_iterated(self, _: float, record: records.Iterated) -> None:
        """Count the evaluations of a batch method, including those before a resumption."""
        known = self.descent or {"evaluations": 0, "restarts": 0, "copies": 0}
        self.descent = {
            "iterations": record.iteration,
            "loss": _finite(record.loss),
            "gradient": _finite(record.gradient),
            "evaluations": known["evaluations"] + record.evaluations,
            "restarts": known["restarts"] + (not record.step),
            "copies": known["copies"] + record.copies,
        }

    def _take_parted(self, _: float, record: records.Parted) -> None:
        self.split = {"ways": record.split, "told": record.told}

    def _take_tested(self, seconds: float, record: records.Tested) -> None:
        self._row(seconds, record.epoch, record)
        self.evaluating += record.took
        self._last_beside["evaluations"] = self._last_beside.get("evaluations", 0.0) + record.took
        accuracy, loss = (self.settings.get(name, 0.0) for name in ("target_accuracy", "target_loss"))
        held = record.holds(accuracy, loss)
        if held and self.reached is None:
            self.reached = self._holding
        self._holding = {"seconds": self.history[-1]["seconds"], "epochs": record.epoch} if held else None

    def _row(self, seconds: float, epoch: int, tested: records.Tested | None = None) -> None:
        trained = self._loss.take()
        row: HistoryRow = {
            "seconds": self._training(seconds),
            "epoch": epoch,
            "samples": self.samples,
            "updates": self.pushes,
            # a batch method knows the loss of the whole batch, apart from the losses of its tries
            "train_loss": self.descent["loss"] if self.descent else _finite(trained),
            "test_loss": _finite(tested.loss) if tested else None,
            "test_accuracy": _finite(tested.accuracy) if tested else None,
        }
        if tested is not None:
            if tested.metrics:
                row["test_metrics"] = {name: _finite(value) for name, value in tested.metrics.items()}
            self.tested = row
        if self.history and (self._rows - 1) % self._stride:
            self.history.pop()  # this row was kept only while it was the last
        self.history.append(row)
        self._rows += 1
        if len(self.history) > ROWS:
            self.history, self._stride = self.history[::2], 2 * self._stride

    def _training(self, seconds: float) -> float:
        return self._before + seconds - self._began

    @property
    def rate(self) -> float:
        """Return the samples per second of training so far; 0 at the beginning."""
        return self._counted / self.seconds if self.seconds > 0 else 0.0

    @property
    def updates(self) -> int:
        """Return the largest version of a shard, or the number of pushes until shards report theirs."""
        return max((applied.updates for applied in self.applied.values()), default=self.pushes)

    def staleness(self) -> Json:
        """Return mean, maximum and histogram (pushes by staleness) over all shards; None if unknown."""
        histogram: dict[int, int] = {}
        for applied in self.applied.values():
            for staleness, count in applied.staleness.items():
                histogram[staleness] = histogram.get(staleness, 0) + count
        count = sum(histogram.values())
        mean = sum(staleness * times for staleness, times in histogram.items()) / count if count else None
        return {
            "mean": mean,
            "max": max(histogram, default=None),
            "histogram": {str(key): histogram[key] for key in sorted(histogram)},
        }

    def result(self) -> Json:
        """Return the contents of `result.json`; numbers that are not finite become null."""
        started, tested = self.started, self.tested
        aims = {name: self.settings.get(f"target_{name}", 0.0) or None for name in ("accuracy", "loss")}
        replicas = started.replicas if started else self.settings.get("replicas", 0)
        known = {**{index: ReplicaCounts() for index in range(replicas)}, **self.replicas}
        return {
            **{key: self.job.get(key) for key in ("task", "strategy", "settings", "seed", "device")},
            "settings": {**self.settings, **({"batch_size": started.batch_size} if started else {})},
            **{key: self.job[key] for key in ("cluster", "path", "carrier", "network") if key in self.job},
            # shards always step several models, whatever path a single model would have
            **({"models": started.models, "path": "served"} if started and started.models > 1 else {}),
            "replicas": replicas,
            "shards": started.shards if started else self.settings.get("shards", 0),
            "epochs": self.epochs,
            "steps": self.steps,
            "samples": self.samples,
            "pushes": self.pushes,
            "updates": self.updates,
            "seconds": self.seconds,
            "samples_per_second": self.rate,
            "evaluating_seconds": self.evaluating,
            "test_accuracy": tested["test_accuracy"] if tested else None,
            "test_loss": tested["test_loss"] if tested else None,
            "test_metrics": tested.get("test_metrics", {}) if tested else {},
            "target": {
                **aims,
                "reached": self.reached is not None,
                **(self.reached or {"seconds": None, "epochs": None}),
            },
            "staleness": self.staleness(),
            "bytes": {
                "pushed": self.bytes["sent"][PUSH],
                "fetched": self.bytes["received"][FETCH],
                **self.bytes,
                "per_step": {kind: count / max(1, self.steps) for kind, count in moved(self.bytes).items()},
            },
            "per_replica": [
                {
                    "id": index,
                    "steps": replica.steps,
                    "samples": replica.samples,
                    "pushes": replica.pushes,
                    "lost": replica.lost,
                    "participation": self.participation(index),
                    **({"given_up": replica.given_up} if replica.given_up else {}),
                    "times": replica.times and _times(replica.times),
                }
                for index, replica in sorted(known.items())
            ],
            "overflows": {
                name: sum(getattr(replica.times, name, 0) for replica in known.values()) for name in OVERFLOWS
            },
            "dropped": self.dropped,
            "forgotten": self.forgotten,
            **({"descent": self.descent} if self.descent else {}),
            **({"split": self.split} if self.split else {}),
            "history": self.history,
            "versions": self.job.get("versions") or versions(),
            "outcome": self.outcome,
            "cause": self.cause,
            "reason": self.reason,
        }


def moved(counted: Json) -> dict[str, int]:
    """Return the bytes that a job has moved to train, sent or read in shared memory, by kind.

    Args:
        counted: `bytes` of a `result.json`.

    >>> moved({"sent": {"push": 8, "control": 1}, "shared_memory": {"push": 2}})
    {'push': 10, 'fetch': 0, 'all_reduce': 0, 'partitions': 0}
    """
    ways = [counted.get(way, {}) for way in ("sent", "shared_memory")]
    return {kind: sum(way.get(kind, 0) for way in ways) for kind in KINDS if kind != CONTROL}


def in_words(counted: Json) -> str:
    """Describe the bytes that a job has sent, and read in shared memory; "" if there are none.

    >>> in_words({"sent": {"push": 2_000_000, "control": 500_000}, "shared_memory": {"push": 0}})
    '2.5 MB sent'
    """
    phrases = {"sent": "sent", "shared_memory": "read in shared memory"}
    megabytes = {words: sum(counted.get(way, {}).values()) / 1e6 for way, words in phrases.items()}
    return ", ".join(f"{count:,.1f} MB {words}" for words, count in megabytes.items() if count >= 0.05)


def many(count: int, noun: str, plural: str = "s") -> str:
    """Count things.

    >>> many(1, "push", "es"), many(2000, "push", "es")
    ('1 push', '2,000 pushes')
    """
    return f"{count:,} {noun}{plural if count != 1 else ''}"


def duration(seconds: float) -> str:
    """Format a time.

    >>> duration(0.25), duration(9.5), duration(59), duration(3700)
    ('250.0 ms', '9.50 s', '59.0 s', '1:01:40')
    """
    if 0 < seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 10 or not seconds else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _times(timed: records.StepsTimed) -> Json:
    """Return the times of a replica for `result.json`, with the kind of role for which it waited longest."""
    kinds = timed.waited_by_kind()
    longest = max(kinds, key=lambda kind: kinds[kind], default="")
    return {**{name: getattr(timed, name) for name in TIMES}, "waits_for": longest}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


TAKES: Mapping[type[records.Record], Callable[[Summary, float, Any], None]] = {
    records.Started: Summary._take_started,
    records.Joined: Summary._take_joined,
    records.StandbyReady: Summary._take_joined,
    records.Succeeded: Summary._take_succeeded,
    records.Vacant: Summary._take_vacant,
    records.Stepped: Summary._take_stepped,
    records.Rewound: Summary._take_rewound,
    records.Forgotten: Summary._take_forgotten,
    records.Iterated: Summary._take_iterated,
    records.Parted: Summary._take_parted,
    records.EpochDone: Summary._take_epoch_done,
    records.Tested: Summary._take_tested,
    records.Gone: Summary._take_gone,
    records.Ending: Summary._take_ending,
    records.Checkpointed: Summary._take_checkpointed,
    records.Resources: Summary._take_resources,
    records.Applied: Summary._take_applied,
    records.StepsTimed: Summary._take_steps_timed,
    records.BytesCounted: Summary._take_bytes_counted,
    records.Finished: Summary._take_finished,
}
"""Handler of each kind of record that changes a summary."""
