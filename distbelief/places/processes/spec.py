"""Spec of a job's process: all values that it needs to play its role."""

from __future__ import annotations

import msgspec

from distbelief.core.portions import ANEW, StartingPoint
from distbelief.core.settings import Settings
from distbelief.places.compute_model import ComputeModel
from distbelief.transport.secure import Identity


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Surroundings that a process takes over from its supervisor."""

    threads: int = 1
    supervisor: int = 0
    """Process id of the supervisor; the process ends with it."""
    forkserver: int = 0
    """Process id of the forkserver; the process ends with it, since only the forkserver can collect its exit status."""
    path: list[str] = []
    directory: str = ""
    environment: dict[bytes, bytes] = {}
    """All environment variables of the supervisor.

    The forkserver has only those from when it was started. A user's model, data and libraries may read any of them
    (paths, CUDA_VISIBLE_DEVICES, tokens). They go through the pipe that starts the process, and so stay on this
    machine.
    """


class Opening(Surroundings, frozen=True, kw_only=True):
    """Part of a spec that a process reads first: the rest may need classes that the process must import before."""

    strategy: str
    output: int = -1
    """The supervisor's descriptor of the pipe for the output of the process; -1 if it prints as the supervisor does."""


class Spec(Opening, frozen=True, kw_only=True):
    """All values that a process needs to play its role."""

    job: str
    task: str
    data_dir: str | None = None
    settings: Settings
    device: str = "cpu"
    transport: str
    bind: str = "127.0.0.1"
    advertise: str = ""
    insecure: bool
    compute: ComputeModel | None = None
    identity: Identity | None = None
    """Certificate and key of this role if links use TLS."""
    successor: Identity | None = None
    """Certificate and key of a standby once it has become its shard."""
    run: str = ""
    start: StartingPoint = ANEW
    init_from: str | None = None
    memory: tuple[int, ...] = ()
    """The supervisor's descriptors of memory that replicas read or update themselves, one for each partition where they
    sum gradients there; empty for none."""
    direct: bool = False
    """True if replicas update that memory themselves."""
    direct_asked: bool = False
    """True if the user asked for the direct path; false if it was chosen by default."""
    crossings: int = -1
    """The supervisor's descriptor of the memory by which partitions exchange tensors; -1 if they send them."""
    script: list[str] = []
    """The user's own script and its arguments; empty if a task is trained."""
    evaluator: bool = True
    journal: tuple[int, ...] = ()
    """The supervisor's descriptors of the coordinator's journal; empty if the coordinator is not started again."""
    listen: str = ""
    """Earlier address of a restarted coordinator, at which it listens again; else ""."""
    known: int = 0
    """Number of records of its journal that the supervisor has."""
