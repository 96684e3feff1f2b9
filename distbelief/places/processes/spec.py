"""Spec of a local job's process: everything that it must know to play its role."""

from __future__ import annotations

import msgspec

from distbelief.core.portions import ANEW, StartingPoint
from distbelief.core.settings import Settings
from distbelief.places.compute_model import ComputeModel
from distbelief.transport.secure import Identity


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Surroundings in which a process is to work as if it were the one that has it started."""

    threads: int = 1
    supervisor: int = 0
    """Process id of the one that has it started; nobody outlives it."""
    forkserver: int = 0
    """Process id of the forkserver; nobody outlives it either: who it has started, it alone can wait for."""
    path: list[str] = []
    directory: str = ""
    environment: dict[bytes, bytes] = {}
    """All of the supervisor's: a process is forked from a forkserver, whose environment is of the moment when that was
    started, and what a user's model, data and libraries read of theirs (paths, CUDA_VISIBLE_DEVICES, tokens) nobody
    here can know. It goes no further than this machine, over the pipe that starts the process.
    """


class Opening(Surroundings, frozen=True, kw_only=True):
    """Part that a process must know before it can read the rest, which may be of classes that it is to import."""

    strategy: str
    """Name of the strategy."""
    output: int = -1
    """A descriptor of the supervisor's that takes what the process prints; -1: what this one prints to does."""


class Spec(Opening, frozen=True, kw_only=True):
    """Everything that a process must know to play its role."""

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
    """Proof of this role, where links are TLS."""
    successor: Identity | None = None
    """Proof of a standby when it is its shard."""
    run: str = ""
    start: StartingPoint = ANEW
    init_from: str | None = None
    memory: int = -1
    """The supervisor's descriptor of the memory that replicas read or update themselves; -1 for none."""
    direct: bool = False
    """True if replicas update it themselves."""
    direct_asked: bool = False
    """True if they were told to, and not only may."""
    crossings: int = -1
    """Descriptor of the memory through which partitions give each other what crosses; -1 where they send it."""
    columns: tuple[int, ...] = ()
    """Those of the memory in which partitions, from the second on, add up gradients with those of other replicas."""
    script: list[str] = []
    """The user's own script and its arguments; empty where a task is trained."""
    evaluator: bool = True
    journal: tuple[int, ...] = ()
    """The supervisor's descriptors of the coordinator's journal; none where it does not come again."""
    listen: str = ""
    """Address where a coordinator that comes again listens, as before; "" for one that has not."""
    known: int = 0
    """Records of its journal that the supervisor has."""
