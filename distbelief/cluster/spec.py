"""What a process of a local job is told: everything that it must know to play its role."""

from __future__ import annotations

import msgspec

from distbelief.cluster.pace import Pace
from distbelief.core.portions import Position
from distbelief.core.settings import Settings
from distbelief.transport.tls import Identity


class Spec(msgspec.Struct, frozen=True):
    """Everything that a process must know to play its role."""

    job: str
    task: str
    data_dir: str | None
    settings: Settings
    device: str
    threads: int
    transport: str
    bind: str
    advertise: str
    insecure: bool
    pace: Pace | None
    identity: Identity | None
    """What this role proves itself with, where links are TLS."""
    run: str
    checkpoint: str
    position: Position
    samples: int
    number: int
    init_from: str | None
    supervisor: int
    """Process id of the supervisor; nobody outlives it."""
    memory: int
    """The supervisor's descriptor of the memory that is read in place; -1 for none."""
    path: list[str]
    directory: str
    environment: dict[bytes, bytes]
    """All of the supervisor's: a process is forked from a forkserver, whose environment is of the moment when that was started, and what a
    user's model, data and libraries read of theirs (paths, CUDA_VISIBLE_DEVICES, tokens) nobody here can know. It goes no further than this
    machine, over the pipe that starts the process.
    """
    script: list[str] = []
    """The user's own script and its arguments; empty where a task is trained."""
    evaluator: bool = True
