"""Answers about a job's metrics as Prometheus reads them: base units, labels of few values, no tensor or address."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client import Metric, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from distbelief.core import records, roles
from distbelief.core.messages import WAYS
from distbelief.record.summary import TIMES, Summary

BOUNDS = ("0", "1", "2", "4", "8", "16", "32", "64", "128", "+Inf")
"""Bounds of the buckets of the staleness."""


class MetricsAnswer(MetricsHandler):
    """Answer to one client, which has some seconds for its request."""

    timeout = 10.0

    def do_GET(self) -> None:
        """Answer with the metrics, or with the health of the job."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            super().do_GET()
            return
        self.send_response(200 if path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b"the job runs\n" if path == "/health" else b"see /metrics or /health\n")


def metrics(sums: Summary, loss: float | None, times: Mapping[type[records.Record], float]) -> Iterator[Metric]:
    """Yield the metrics by the sums, the last steps' loss and each record's last time; unknown ones have no sample."""
    yield InfoMetricFamily(
        "distbelief_job", "Task and strategy.", {k: str(sums.job.get(k)) for k in ("task", "strategy")}
    )
    standbys = sum(roles.kind(role) is roles.Kind.STANDBY for role in sums.members)
    last = sums.tested
    tested = (last["test_loss"], last["test_accuracy"]) if last else ()
    measures: list[float | None] = [math.nan if value is None else value for value in tested] or [None, None]
    for name, text, value in (
        ("model_samples", "Samples that the model was trained on, without those undone.", sums.samples),
        ("epochs", "Epochs done.", sums.epochs),
        ("train_loss", "Mean loss of the last steps.", loss),
        ("test_loss", "Loss of the last evaluation.", measures[0]),
        ("test_accuracy_ratio", "Accuracy of the last evaluation.", measures[1]),
        ("replicas", "Replicas that take part.", len(sums.members) - standbys),
        ("standbys", "Standbys that are ready.", standbys),
        ("last_step_timestamp_seconds", "Time of the last step.", times.get(records.Stepped)),
        ("last_checkpoint_timestamp_seconds", "Time of the last one.", times.get(records.Checkpointed)),
    ):
        yield GaugeMetricFamily(f"distbelief_{name}", text, value)
    replicas = [(str(index), replica) for index, replica in sums.replicas.items()]
    timed = [(at, replica.times) for at, replica in replicas if replica.times]
    used = {(at, part): getattr(of, part) for at, of in timed for part in TIMES[1:]}
    waited = {(at, kind): seconds for at, of in timed for kind, seconds in of.waited_by_kind().items()}
    moved = {(way, kind): count for way in WAYS for kind, count in sums.bytes[way].items()}
    for name, text, labels, rows in (
        ("samples", "Of a replica.", ["replica"], {(at,): of.samples for at, of in replicas}),
        ("steps", "Of a replica.", ["replica"], {(at,): of.steps for at, of in replicas}),
        ("pushes", "Of a replica.", ["replica"], {(at,): of.pushes for at, of in replicas}),
        ("replica_seconds", "Seconds of a replica by use.", ["replica", "kind"], used),
        ("waiting_seconds", "Seconds that a replica waited for a kind of role.", ["replica", "kind"], waited),
        ("bytes", "Bytes of all roles.", ["direction", "kind"], moved),
        ("dropped_pushes", "Pushes that came too late for their round.", [], {(): sums.dropped}),
        ("evaluation_seconds", "Seconds of evaluations.", [], {(): sums.evaluating}),
        ("failures", "Dead roles, failed checkpoints.", ["kind"], {(kind,): n for kind, n in sums.failures.items()}),
    ):
        family = CounterMetricFamily(f"distbelief_{name}", text, labels=labels)
        for values, count in rows.items():
            family.add_metric(values, count)
        yield family
    staleness = [pair for shard in sums.applied.values() for pair in shard.staleness.items()]
    below = [(bound, float(sum(n for stale, n in staleness if stale <= float(bound)))) for bound in BOUNDS]
    whole = sum(stale * count for stale, count in staleness)
    yield HistogramMetricFamily("distbelief_staleness_updates", "Staleness of applied pushes.", below, whole)
