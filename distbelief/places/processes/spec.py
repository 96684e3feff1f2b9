"""Spec of a local job's process: everything that it must know to play its role."""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING

import msgspec

from distbelief.core.portions import ANEW, StartingPoint
from distbelief.core.settings import Settings
from distbelief.places.compute_model import ComputeModel
from distbelief.places.paths import DIRECT, path_of
from distbelief.places.processes.options import LocalOptions
from distbelief.transport.secure import Identity

if TYPE_CHECKING:
    from distbelief.places.attempt import Attempt


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


def tell(cluster: LocalOptions, attempt: Attempt, script: list[str], evaluator: bool) -> Spec:
    """Return what the processes of a job are told, but for what each proves itself with and what memory they share."""
    job, settings = attempt.job, attempt.settings
    return Spec(
        job=secrets.token_hex(16),
        task=job.reference,
        strategy=job.strategy.name,
        data_dir=job.data_dir,
        settings=settings,
        device=job.device,
        threads=job.threads,
        transport=cluster.carrier,
        bind=cluster.bound,
        advertise=cluster.advertised,
        insecure=cluster.insecure,
        compute=cluster.compute,
        run=str(attempt.folder.path if attempt.folder else ""),
        start=attempt.start,
        init_from=job.init_from,
        supervisor=os.getpid(),
        direct=path_of(cluster.path, job.strategy, settings, cluster.carrier) == DIRECT,
        direct_asked=cluster.path == DIRECT,
        path=[os.getcwd(), *sys.path],
        directory=os.getcwd(),
        environment=dict(os.environb),
        script=script,
        evaluator=evaluator,
    )


def tell_guest(told: Spec, identity: Identity | None) -> Spec:
    """Return what a replica on another machine is told: of the job, and nothing of this machine. What a script is
    called here is not its affair.
    """
    of_job = {name: getattr(told, name) for name in ("job", "task", "strategy", "settings", "transport", "insecure")}
    return Spec(**of_job, identity=identity, evaluator=False)
