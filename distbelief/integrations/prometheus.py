"""Metrics of a running job, which Prometheus reads at /metrics of an address; /health answers while the job runs."""

from __future__ import annotations

import socket
import threading
import time
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client import CollectorRegistry, Metric

from distbelief.core import records
from distbelief.errors import UsageError
from distbelief.integrations.prometheus_answers import MetricsAnswer, metrics
from distbelief.places.join.authority import for_clients
from distbelief.places.processes.options import port_or_address
from distbelief.record.sinks import ShownRun, SinkMaker
from distbelief.record.summary import Mean, Summary
from distbelief.transport.addresses import joined

THREADS = 64
"""Most threads of the process with which a further client is answered."""


def sink(argument: str) -> SinkMaker:
    """Return the maker of a sink at PORT of loopback, or at HOST:PORT."""
    host, port = port_or_address(argument)
    return lambda run: PrometheusSink(run, host, port)


class PrometheusSink(ThreadingTCPServer):
    """Server of a job's metrics: the job's thread takes snapshots, and a thread for each client shows the last one."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 128  # of five, a crowd that comes at once would wait for seconds

    def __init__(self, run: ShownRun, host: str, port: int) -> None:
        self._loss, self._times = Mean(), dict[type[records.Record], float]()
        self._taken, self._shown = 0.0, list[Metric]()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        registry = CollectorRegistry()
        registry.register(self)
        try:
            super().__init__((host, port), MetricsAnswer.factory(registry))
        except OSError as error:
            raise UsageError(f"--metrics {joined(host, port)}: {error.strerror}; choose another address") from error
        authority = run.folder / "metrics-authority.pem"
        if tls := for_clients(host, authority):
            # each client's own thread shakes hands: one that says nothing must not hold up the others
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        where = f"http{'s' if tls else ''}://{joined(host, self.server_address[1])}/metrics"
        run.note(f"metrics: {where}{f', certified by {authority}' if tls else ''}")
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def take(self, seconds: float, record: records.Record, summary: Summary) -> None:
        """Note when a record came; take a snapshot if it is rare, or the last one is a second old."""
        if isinstance(record, records.Stepped):
            self._loss.add(record.loss, record.losses)
        if not getattr(record, "error", ""):  # a checkpoint that failed leaves the last one as it is
            self._times[type(record)] = time.time()
        often = isinstance(record, records.Stepped | records.Applied | records.BytesCounted | records.StepsTimed)
        if not often or time.monotonic() >= self._taken + 1.0:
            self._taken, self._shown = time.monotonic(), [*metrics(summary, self._loss.latest(), self._times)]

    def collect(self) -> list[Metric]:
        """Return the last snapshot."""
        return self._shown

    def close(self, result: records.Json) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether a client is answered: a crowd that says nothing must not fill the memory."""
        return threading.active_count() <= THREADS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""
