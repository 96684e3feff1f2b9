"""What Sandblaster's coordinator does in simulation: batch times among many replicas with stragglers, and the bytes
that it hears and says.
"""

from __future__ import annotations

import itertools
import statistics

from distbelief.bench.parts.timing import figure
from distbelief.bench.parts.workloads import counted, points
from distbelief.core import records, roles, wire
from distbelief.core.effects import Payload
from distbelief.core.messages import Message
from distbelief.core.records import Json
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.strategies import Sandblaster
from distbelief.transport.virtual import VirtualEndpoint

SHARE, STRAGGLERS, SLOWER = 32, 0.02, 10.0
"""Portions of a batch for each replica; the share of replicas that are slow, and how many times."""
MANY, WORK_UNIT = 32, 8
"""Shards, and portions of a work unit: every work unit's gradient goes to the shards whole, so that two shards of 10
Gbit are
busy with the gradients of 2,000 replicas for longer than the batch takes, and a static split, which sends the fewest,
is ahead there."""
WIDTHS, SHARDS = (10, 100, 1000), (1, 2, 4, 8)


def balance(replicas: int, iterations: int) -> dict[str, float]:
    """Median seconds of a batch of the MLP, each portion taking 10 ms: dealt in work units with and without backup
    portions, and split once.
    """
    slow = {round(i / STRAGGLERS): SLOWER for i in range(max(1, round(replicas * STRAGGLERS)))}
    cluster = Simulated(
        compute=ComputeModel(step=0.01, slow={who: factor for who, factor in slow.items() if who < replicas}),
        phantom=True,
    )
    ways = {
        "work units, backup portions": (WORK_UNIT, 1),
        "work units, no backup portions": (WORK_UNIT, 0),
        "one static split": (SHARE, 0),
    }
    found = {}
    for name, (send_every, backup) in ways.items():
        strategy = Sandblaster(
            replicas, MANY, iterations + 1, portion_size=1, send_every=send_every, backup_portions=backup
        )
        taken = _moments(Job(counted(replicas * SHARE), strategy, snapshot_every="0"), cluster)
        found[name] = statistics.median(b - a for a, b in itertools.pairwise(taken))
    return found


def balance_settings() -> dict[str, object]:
    """What `balance` is measured with, beside the replicas."""
    cluster = Simulated()
    return {
        "model": "the MLP, 266,610 parameters",
        "shards": MANY,
        "portions of a replica": SHARE,
        "portions of a work unit": WORK_UNIT,
        "slow replicas": STRAGGLERS,
        "times slower": SLOWER,
        "seconds of a portion": 0.01,
        "cluster": {
            "latency": cluster.network.latency,
            "bandwidth": cluster.network.bandwidth,
            "message": cluster.handling.message,
            "memory": cluster.handling.memory,
        },
    }


def _moments(job: Job, cluster: Simulated) -> list[float]:
    """When each iteration was done."""
    moments: list[float] = []

    def note(moment: float, _role: str, record: records.Record) -> None:
        if isinstance(record, records.Iterated):
            moments.append(moment)

    Simulation(job, cluster.settings(job), cluster, note).run()
    return moments


class _Weighing(Simulation):
    """Counts the bytes of every message that the coordinator says and hears, its payload included."""

    said_and_heard = 0

    def _endpoint(self, role: str, incarnation: int = 0) -> VirtualEndpoint:
        endpoint = super()._endpoint(role, incarnation)
        send = endpoint.send

        def weigh(to: str, message: Message, payload: Payload | None = None) -> None:
            if roles.COORDINATOR in (role, to):
                self.said_and_heard += len(wire.encode(message)) + (payload.nbytes if payload is not None else 0)
            send(to, message, payload)

        endpoint.send = weigh  # type: ignore[method-assign]  # weighs what it then sends
        return endpoint


def coordinator_bytes() -> Json:
    """Bytes that the coordinator says and hears in an iteration with a full history, by the parameters and by the
    shards.
    """
    by_width = {f"{width * 4:,}": _measured(width, 2) for width in WIDTHS}
    counts = {shards: _measured(100, shards) for shards in SHARDS}
    each = counts[2] - counts[1]
    growth = max(by_width.values()) / min(by_width.values())
    straight = max(abs(counts[shards] - counts[1] - (shards - 1) * each) / each for shards in SHARDS)
    return {
        "bytes an iteration, by parameters": by_width,
        "bytes an iteration, by shards": {str(shards): count for shards, count in counts.items()},
        "bytes an iteration of each shard": each,
        "figures": [
            figure(
                "coordinator's bytes an iteration, 100 times the parameters, of those with one",
                growth,
                1.01,
                lower=True,
            ),
            figure(
                "coordinator's bytes an iteration off a straight line in the shards, in shards",
                straight,
                0.05,
                lower=True,
            ),
        ],
    }


def _measured(width: int, shards: int) -> float:
    marks: list[int] = []

    def note(_moment: float, _role: str, record: records.Record) -> None:
        if isinstance(record, records.Iterated):
            marks.append(simulation.said_and_heard)

    job = Job(points(200, width), Sandblaster(2, shards, 20, portion_size=25, history=5), snapshot_every="0")
    cluster = Simulated(phantom=True)
    simulation = _Weighing(job, cluster.settings(job), cluster, note)
    simulation.run()
    return statistics.median(b - a for a, b in itertools.pairwise(marks[10:]))
