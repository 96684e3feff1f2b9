"""What a change of the house must not change: every message of every way to train, in simulation, and what was learned.

For each job of the table: the virtual moment, sender, receiver, kind and payload of each message that was delivered,
and the parameters at the end. What was recorded is kept as two hexadecimal digits for each message, one digest of all
and one of the parameters. A change that is meant to change
what is sent, when, or what is learned records anew, in a commit of its own that says why:

    DISTBELIEF_RENEW=1 python -m pytest tests/simulated/test_recorded.py

Payloads and parameters are compared where the processor rounds as the one of the recording does; moments and kinds
everywhere.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from made import processor
from oracles import classes, mlp
from safetensors.torch import load_file

from distbelief.coordination.coordinator import Coordinator
from distbelief.core import roles
from distbelief.core.conversations.table import States
from distbelief.core.effects import Arrival, Effect
from distbelief.core.messages import Message
from distbelief.core.optimizer import optim
from distbelief.core.protocol import CONVERSATIONS
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import (
    Allreduce,
    Bounded,
    Downpour,
    Hogwild,
    Locking,
    Sandblaster,
    Single,
    Softsync,
    Synchronous,
)
from distbelief.transport.cluster_model import NetworkModel
from distbelief.transport.virtual import VirtualEndpoint

RENEWS = bool(os.environ.get("DISTBELIEF_RENEW"))
RECORDED = Path(__file__).with_name("recorded.json")
RENAMED = {
    "StateSent": "Whole", "Decided": "Told", "OperationsDone": "Did", "WorkUnitTaken": "Took",
    "ReducedPiece": "Piece", "Departed": "Gone", "Unmirrored": "Alone",
    "BeginMirroring": "Mirror", "StandbyLost": "Bereft", "GroupHello": "Hail",
}  # fmt: skip
"""What messages are called now, and what they were called when they were recorded."""
SAID = {(row.message, by, to) for one in CONVERSATIONS for row in one.says for by in row.by for to in row.to}
"""Each message that may be said, and what may say it to what, by the tables of the conversations."""
PROCESSOR = processor()

# no logarithms in the times, which another C library may round otherwise
STEADY = ComputeModel(spread="constant", slow={1: 1.7}, straggle_chance=0.1)
UNSTEADY = NetworkModel(jitter=2.0, delay_chance=0.05, delay=1e-3)
WAYS: dict[str, Any] = {
    "downpour": Downpour(3, 2, push_every=2),
    "downpour, adam": Downpour(
        3, 3, optim("adam", lr=0.01), prefetch=1, fetch_every=2, push_every=3, local_lr=0.01, warm_start_steps=6
    ),
    "downpour with standbys": Downpour(3, 2, optim("momentum", lr=0.05), standby=1),
    "downpour, scaled": Downpour(3, 2, staleness_scaling="inverse"),
    "bounded": Bounded(3, 2, staleness=1),
    "bounded with standbys": Bounded(3, 2, staleness=0, standby=1),
    "softsync": Softsync(3, 2, n=2),
    "softsync with standbys": Softsync(3, 2, n=1, standby=1),
    "synchronous": Synchronous(3, 2),
    "synchronous, backup": Synchronous(3, 2, optim("lamb", lr=0.01), backup_workers=1),
    "synchronous with standbys": Synchronous(3, 2, optim("adagrad", lr=0.05), standby=1),
    "local steps": Downpour(3, 2, optim("delayed-nesterov"), push_every=2, local_optimizer=optim("adamw"), standby=1),
    "local steps, staggered": Synchronous(
        3, 2, optim("nesterov", lr=0.7), push_every=3, local_optimizer=optim("adamw"), stagger=True, stagger_delay=1
    ),
    "allreduce, ring": Allreduce(3, optim("adam", lr=0.01), algorithm="ring", bucket_mb=0.0005),
    "allreduce, auto": Allreduce(4, accumulate=2),
    "allreduce, hierarchical": Allreduce(4, algorithm="hierarchical:tree", per_host=2),
    "hogwild": Hogwild(3),
    "locking": Locking(3, optim("momentum", lr=0.05)),
    "sandblaster": Sandblaster(3, 2, 3, portion_size=8),
    "sandblaster with standbys": Sandblaster(2, 2, 3, portion_size=8, standby=1, method="cg"),
    "single": Single(optim("adam", lr=0.01)),
    "split downpour": Downpour(2, 2, partitions=2, split="stages"),
    "split synchronous": Synchronous(2, 2, optim("adagrad", lr=0.05), partitions=2, split="neurons", standby=1),
    "split allreduce": Allreduce(2, optim("adam", lr=0.01), partitions=2, split="stages", microbatches=2),
    "split sandblaster": Sandblaster(2, 2, 3, portion_size=8, partitions=2, split="stages", standby=1),
    "split single": Single(optim("adam", lr=0.01), partitions=2, split="neurons"),
}
FAULTS: dict[str, tuple[Crash, ...]] = {
    "calm": (),
    "a replica comes again": (Crash("replica 1", 12), Crash("replica 1", 9)),
    "a partition comes again": (Crash("replica 1.1", 12),),
    "all replicas but one die early": (Crash("replica 0", 2), Crash("replica 2", 5)),
    "a shard dies": (Crash("shard 1", 25),),
    "a shard and its heir die": (Crash("shard 0", 25), Crash("standby 0", 45)),
    "the coordinator comes again": (Crash("coordinator", 9), Crash("coordinator", 30)),
    "a replica, the coordinator and a shard": (Crash("replica 1", 8), Crash("coordinator", 20), Crash("shard 0", 50)),
}


def has(strategy: Any, crash: Crash) -> bool:
    """Whether a strategy has a role that is to die."""
    kind, _, number = crash.role.partition(" ")
    index, _, part = number.partition(".")
    many = {"replica": "replicas", "shard": "shards", "standby": "shards"}
    if kind == "standby" and not getattr(strategy, "standby", 0):
        return False
    if kind == "shard" and isinstance(strategy, Allreduce):
        return False
    if kind == "replica" and bool(part) != (getattr(strategy, "partitions", 1) > 1):
        return False
    return not index or int(index) < getattr(strategy, many[kind], 0)


JOBS = [
    (way, fault)
    for way, strategy in WAYS.items()
    for fault, crashes in FAULTS.items()
    if all(has(strategy, crash) for crash in crashes) and not (way.endswith("single") and crashes)
]


def digest(payload: Any) -> bytes:
    """Of a tensor, or of whatever stands for one."""
    held = (
        bytes(payload.detach().contiguous().view(-1).view(torch.uint8).numpy())
        if isinstance(payload, torch.Tensor)
        else repr(payload).encode()
    )
    return blake2b(held, digest_size=8).digest()


class Recording:
    """The messages of one simulation, as they are handed to their receivers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str, str]] = []
        self.payloads: list[bytes] = []

    def note(self, endpoint: VirtualEndpoint, arrival: Arrival) -> None:
        if isinstance(arrival.event, Message):
            kind = type(arrival.event).__name__
            assert (type(arrival.event), roles.kind(arrival.sender), roles.kind(endpoint.role)) in SAID, (
                f"{arrival} to {endpoint.role}: in no table"
            )
            self.lines.append(
                (f"{endpoint.network.clock.time:.9f}", arrival.sender, endpoint.role, RENAMED.get(kind, kind))
            )
            self.payloads.append(digest(arrival.payload))

    def facts(self, model: Path) -> dict[str, Any]:
        """What is kept of it, and of the parameters in a file, where there is one."""
        learned = blake2b(digest_size=16)
        if model.exists():
            for name, tensor in sorted(load_file(model).items()):
                learned.update(name.encode() + digest(tensor))
        return {
            "messages": len(self.lines),
            "marks": "".join(blake2b(repr(line).encode(), digest_size=1).hexdigest() for line in self.lines),
            "form": blake2b(repr(self.lines).encode(), digest_size=16).hexdigest(),
            "payloads": blake2b(b"".join(self.payloads), digest_size=16).hexdigest(),
            "parameters": learned.hexdigest(),
        }


def check_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every move of a coordinator's that is not on one of the events that its table names."""
    told: list[type] = []
    handle, move = Coordinator.handle, States.move

    def handled(machine: Coordinator, sender: str, event: Any, payload: Any) -> list[Effect]:
        told.append(type(event))
        try:
            return handle(machine, sender, event, payload)
        finally:
            told.pop()

    monkeypatch.setattr(Coordinator, "handle", handled)

    def moved(states: States[Any], before: Any, after: Any) -> Any:
        causes = next((known.on for known in states.moves if known[:2] == (before, after)), ())
        assert not causes or told[-1] in causes, f"{states.of} went from {before} to {after} on {told[-1].__name__}"
        return move(states, before, after)

    monkeypatch.setattr(States, "move", moved)


def recording(way: str, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Recording, dict[str, Any]]:
    found, tell = Recording(), VirtualEndpoint._tell

    def spy(endpoint: VirtualEndpoint, arrival: Arrival) -> None:
        found.note(endpoint, arrival)
        tell(endpoint, arrival)

    monkeypatch.setattr(VirtualEndpoint, "_tell", spy)
    check_moves(monkeypatch)
    fit = {} if way.startswith("sandblaster") else {"batch_size": 4, "epochs": 2}
    network = {} if way.endswith("single") else {"network": UNSTEADY, "crashes": FAULTS[fault], "restart_seconds": 0.02}
    cluster = Simulated(
        compute=ComputeModel(spread="constant") if way.endswith("single") else STEADY, keep=True, **network
    )
    job = Job(
        task=classes(mlp, samples=43), strategy=WAYS[way], seed=3, snapshot_every="5", out=str(folder / "run"), **fit
    )
    try:
        cluster.run(job)
        how = "done"
    except Exception as error:
        how = str(error)
    return found, {"ended": how, **found.facts(folder / "run" / "model.safetensors")}


@pytest.mark.parametrize(("way", "fault"), some(JOBS, len(JOBS) if RENEWS else SEEDS))
def test_what_was_recorded_is_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, fault: str
) -> None:
    found, facts = recording(way, fault, tmp_path, monkeypatch)
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"jobs": {}}
    if RENEWS:
        known["processor"] = PROCESSOR
        known["jobs"][f"{way}: {fault}"] = facts
        RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    kept = known["jobs"][f"{way}: {fault}"]
    marks, before = facts["marks"], kept["marks"]
    same = next((i for i in range(0, len(marks), 2) if marks[i : i + 2] != before[i : i + 2]), len(marks)) // 2
    assert (facts["messages"], facts["form"]) == (kept["messages"], kept["form"]), (
        f"another message, number {same + 1}: {found.lines[same : same + 1]}"
    )
    assert facts["ended"] == kept["ended"]
    if known["processor"] == PROCESSOR:
        assert facts["payloads"] == kept["payloads"]
        assert facts["parameters"] == kept["parameters"]
