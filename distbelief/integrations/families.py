"""Metrics of a job as Prometheus names them: base units, and labels of few values, never a tensor or an address."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from distbelief.core import records, roles
from distbelief.core.messages import WAYS
from distbelief.core.records import Json
from distbelief.record.summary import TIMES, Mean, Summary

BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, math.inf)
"""Bounds of the buckets of the staleness."""


class JobMetrics:
    """Counts that a summary lacks, and the metrics that both make; counters never go back in one attempt of a job."""

    def __init__(self, job: Json) -> None:
        self._job = {name: str(job.get(name)) for name in ("task", "strategy")}
        self._loss, self._members = Mean(), {roles.SINGLE} if job.get("strategy") == roles.SINGLE else set()
        self._failed = dict.fromkeys(("replica", "shard", "standby", "checkpoint"), 0)
        self._last: dict[str, float] = {}

    def take(self, record: records.Record) -> None:
        """Count a record."""
        match record:
            case records.Stepped():
                self._last["step"] = time.time()
                if record.loss is not None:
                    self._loss.add(record.loss, record.losses)
            case records.Tested(loss=loss, accuracy=accuracy):
                self._last |= {"loss": loss, "accuracy": math.nan if accuracy is None else accuracy}
            case records.Joined() | records.StandbyReady():
                self._members.add(record.role)
            case records.Gone(role=role, died=died):
                self._members.discard(role)
                self._failed["replica"] += died
            case records.Succeeded():  # whose new standby, which is vacant now, has not failed
                self._members.discard(record.standby)
                self._failed["shard"] += 1
            case records.Vacant(role=role):
                self._failed[roles.kind(role)] += roles.kind(role) is roles.Kind.SHARD or role in self._members
                self._members.discard(role)
            case records.Checkpointed(error=""):
                self._last["checkpoint"] = time.time()
            case records.Checkpointed():
                self._failed["checkpoint"] += 1

    def families(self, sums: Summary) -> list[Metric]:
        """Return the metrics at this moment; one without a value yet has no sample."""
        if (loss := self._loss.take()) is not None:
            self._last["trained"] = loss
        kinds = [roles.kind(role) for role in self._members]
        standbys = kinds.count(roles.Kind.STANDBY)
        replicas = [(str(index), replica) for index, replica in sums.replicas.items()]
        times = [(index, replica.times) for index, replica in replicas if replica.times]
        waited: dict[tuple[str, str], float] = {}
        for at, timed in times:
            for role, seconds in timed.waited.items():
                whom = at, str(roles.kind(role))
                waited[whom] = waited.get(whom, 0.0) + seconds
        moved = {(way, kind): count for way in WAYS for kind, count in sums.bytes[way].items()}
        return [
            InfoMetricFamily("distbelief_job", "Task and strategy.", self._job),
            _gauge("model_samples", "Samples that the model was trained on, without those undone.", sums.samples),
            _gauge("epochs", "Epochs done.", sums.epochs),
            _gauge("train_loss", "Mean loss of the last steps.", self._last.get("trained")),
            _gauge("test_loss", "Loss of the last evaluation.", self._last.get("loss")),
            _gauge("test_accuracy_ratio", "Accuracy of the last evaluation.", self._last.get("accuracy")),
            _gauge("replicas", "Replicas that take part.", len(kinds) - standbys),
            _gauge("standbys", "Standbys that are ready.", standbys),
            _gauge("last_step_timestamp_seconds", "Time of the last step.", self._last.get("step")),
            _gauge("last_checkpoint_timestamp_seconds", "Time of the last one.", self._last.get("checkpoint")),
            *(
                _counter(what, "Of a replica.", {(at,): getattr(of, what) for at, of in replicas}, "replica")
                for what in ("samples", "steps", "pushes")
            ),
            _counter("replica_seconds", "Seconds of a replica by use.",
                {(at, part): getattr(of, part) for at, of in times for part in TIMES[1:]}, "replica", "kind"),
            _counter("waiting_seconds", "Seconds that a replica waited for a kind of role.", waited, "replica", "kind"),
            _counter("bytes", "Bytes of all roles.", moved, "direction", "kind"),
            _counter("dropped_pushes", "Pushes that came too late for their round.", {(): sums.dropped}),
            _counter("evaluation_seconds", "Seconds of evaluations.", {(): sums.evaluating}),
            _counter("failures", "Dead roles, failed checkpoints.", {(k,): n for k, n in self._failed.items()}, "kind"),
            _staleness(sums),
        ]  # fmt: skip


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"distbelief_{name}", text, value)


def _counter(name: str, text: str, rows: Mapping[Any, float], *labels: str) -> Metric:
    family = CounterMetricFamily(f"distbelief_{name}", text, labels=labels)
    for values, count in rows.items():
        family.add_metric(values, count)
    return family


def _staleness(sums: Summary) -> Metric:
    counts = [pair for shard in sums.applied.values() for pair in shard.staleness.items()]
    below = [sum(count for staleness, count in counts if staleness <= bound) for bound in BOUNDS]
    buckets = [("+Inf" if math.isinf(at) else str(at), float(count)) for at, count in zip(BOUNDS, below, strict=True)]
    whole = sum(staleness * count for staleness, count in counts)
    return HistogramMetricFamily("distbelief_staleness_updates", "Staleness of applied pushes.", buckets, whole)
