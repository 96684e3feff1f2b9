"""The local cluster: every role a process of this machine, started from a forkserver and watched by one supervisor."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief import errors
from distbelief.cluster.channel import Channel, Died, Failed, Interrupt, Listening, Noted, Word, World
from distbelief.cluster.forkserver import blank_main, context
from distbelief.core import records, roles
from distbelief.core.settings import Settings
from distbelief.errors import JobFailed, UsageError, unknown
from distbelief.job import Job
from distbelief.strategy import Downpour, Single

if TYPE_CHECKING:
    from distbelief.cluster.process import Spec
    from distbelief.cluster.sitting import Sitting, View

TRANSPORTS = ("shared", "tcp")
PATIENCE = 30.0
"""Seconds that an interrupted job may take to end by itself, and that processes may take to end once the job has."""
GRACE = 2.0
"""Seconds between asking a process to end and killing it."""


@dataclass(frozen=True)
class Local:
    """Processes of this machine."""

    transport: str = "shared"
    """How bytes travel: shared (memory) or tcp."""
    bind: str = "127.0.0.1"
    """With tcp, the host that coordinator and shards listen at."""
    insecure: bool = False
    """Allow plain TCP on a network other than loopback."""

    def run(self, job: Job, view: View | None = None) -> dict[str, Any]:
        """Run a job to its end; returns what `result.json` holds, and the run folder as `run`.

        Raises:
            DistbeliefError: the job could not begin, or failed; its processes are ended in any case.
        """
        began = time.monotonic()
        settings = self._settings(job)
        from distbelief.cluster.sitting import Sitting, View
        from distbelief.tasks import available, resolve

        if why := available(job.reference, job.data_dir):
            raise errors.DataError(why)
        sitting = Sitting(job, settings, view or View(), began)
        evaluates = settings.evaluate_every > 0 and resolve(job.reference, job.data_dir).test is not None
        return Supervisor(self, job, settings, sitting, evaluates).run()

    def launch(self, job: Job, script: list[str], view: View | None = None) -> dict[str, Any]:
        """Run a user's own script in every replica of a job; `job.task` is only a name there. Returns as `run` does.

        Args:
            job: how the shards train.
            script: the path of the script, and its arguments.
            view: how the job is shown.

        Raises:
            UsageError: there is no such script, or the strategy has no replicas.
            DistbeliefError: as `run`.
        """
        began = time.monotonic()
        settings = msgspec.structs.replace(self._settings(job), evaluate_every=0, target_accuracy=0.0)
        if not os.path.isfile(script[0]):
            raise UsageError(f"script {script[0]!r} is no file; name the Python script that every replica runs")
        if not isinstance(job.strategy, Downpour):
            raise UsageError(f"strategy {job.strategy.name} has no replicas to run a script in; run it with python itself")
        from distbelief.cluster.sitting import Sitting, View

        return Supervisor(self, job, settings, Sitting(job, settings, view or View(), began), False, script).run()

    def _settings(self, job: Job) -> Settings:
        if self.transport not in TRANSPORTS:
            raise unknown("transport", self.transport, TRANSPORTS)
        settings = job.settings()
        if settings.read_in_place and self.transport != "shared":
            raise UsageError("--read-in-place reads shared memory: it needs --transport shared")
        return settings


class _Child:
    """A process of the job, as its supervisor sees it."""

    def __init__(self, role: str, process: Any, connection: Connection) -> None:
        self.role, self.process, self.channel = role, process, Channel(connection)
        self.address = ""
        self.open = True


class Supervisor:
    """Starts the processes of a job, hands their words on, and ends them all, however the job ends."""

    def __init__(self, cluster: Local, job: Job, settings: Settings, sitting: Sitting, evaluates: bool, script: list[str] | None = None) -> None:
        self.cluster, self.job, self.settings, self.sitting, self.evaluates = cluster, job, settings, sitting, evaluates
        self.children: dict[str, _Child] = {}
        self.failure: errors.DistbeliefError | None = None
        self.finished: records.Finished | None = None
        self.rumour: errors.DistbeliefError | None = None
        self.listening = False
        self._deadline: float | None = None
        self._interrupts = 0
        self._script = script or []
        self._memory = os.memfd_create("distbelief parameters") if settings.read_in_place else -1

    def run(self) -> dict[str, Any]:
        """Start, watch and end the job."""
        with self._signals() as woken:
            try:
                self._start()
                while self.children and self.failure is None:
                    self._watch(woken)
            finally:
                self._end_all()
                if self._memory >= 0:
                    os.close(self._memory)
        if self.failure is None and (self.finished is None or self.finished.outcome == "failed"):
            self.failure = JobFailed(self.finished.reason) if self.finished else self.rumour or JobFailed("the job ended without a result")
        if self.failure is not None:
            if self.finished is None:
                self.sitting.record(time.monotonic(), "supervisor", records.Finished("failed", str(self.failure)))
            self.sitting.finish()
            raise self.failure
        return self.sitting.finish()

    # starting

    def _start(self) -> None:
        spec = msgspec.msgpack.encode(self._spec())
        from distbelief.cluster.process import main

        forkserver = context()
        with blank_main():
            for role in self._roles():
                ours, theirs = forkserver.Pipe()
                process = forkserver.Process(target=main, args=(role, spec, theirs), name=role)
                process.start()
                theirs.close()
                self.children[role] = _Child(role, process, ours)

    def _roles(self) -> list[str]:
        if isinstance(self.job.strategy, Single):
            return [roles.SINGLE]
        shards = [roles.shard(i) for i in range(self.settings.shards)]
        replicas = [roles.replica(i) for i in range(self.settings.replicas)]
        return [*replicas, roles.COORDINATOR, *shards, *([roles.EVALUATOR] if self.evaluates else [])]

    def _spec(self) -> Spec:
        from distbelief.cluster.process import Spec

        job, sitting = self.job, self.sitting
        return Spec(
            job=secrets.token_hex(16),
            task=job.reference,
            data_dir=job.data_dir,
            settings=self.settings,
            device=job.device,
            threads=job.threads,
            transport=self.cluster.transport,
            bind=self.cluster.bind,
            insecure=self.cluster.insecure,
            run=str(sitting.folder.path if sitting.folder else ""),
            checkpoint=sitting.checkpoint,
            position=sitting.position,
            samples=sitting.samples,
            number=sitting.number,
            init_from=job.init_from,
            supervisor=os.getpid(),
            memory=self._memory,
            path=[os.getcwd(), *sys.path],
            script=self._script,
            evaluator=self.evaluates,
        )

    # watching

    def _watch(self, woken: Connection) -> None:
        """Wait for words, deaths and signals, and act on them."""
        waiting: list[Any] = [woken, *(child.process.sentinel for child in self.children.values())]
        waiting += [child.channel.connection for child in self.children.values() if child.open]
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        ready = set(map(id, multiprocessing.connection.wait(waiting, timeout)))
        if id(woken) in ready:
            woken.recv_bytes()
            self._interrupt()
        for child in list(self.children.values()):
            if id(child.channel.connection) in ready:
                child.open = child.channel.hear_all(lambda word, child=child: self._take(child, word))  # type: ignore[misc]
        for child in list(self.children.values()):
            if not child.process.is_alive():
                self._bury(child)
        if self._deadline is not None and time.monotonic() > self._deadline and self.children:
            self.failure = JobFailed(f"{', '.join(self.children)} did not end within {PATIENCE:.0f} s of being asked to; killed")

    def _take(self, child: _Child, word: Word) -> None:
        if isinstance(word, Noted):
            self.sitting.record(word.moment, word.role, word.record)
            if isinstance(word.record, records.Finished):
                self.finished = word.record
                self._deadline = time.monotonic() + PATIENCE
        elif isinstance(word, Listening):
            child.address = word.address
            self.listening = True
            listeners = [c for c in self.children.values() if c.role == roles.COORDINATOR or c.role.startswith("shard")]
            if all(c.address for c in listeners):
                world = World({c.role: c.address for c in listeners})
                for other in self.children.values():
                    if other.role != roles.COORDINATOR:
                        other.channel.say(world)
        elif isinstance(word, Failed) and self.finished is None:
            kind = getattr(errors, word.kind, None)
            error = kind(word.text) if kind else JobFailed(word.text)
            if kind is JobFailed:  # only tells of somebody who is gone: whoever that is says why
                self.rumour = self.rumour or error
            else:
                self.failure = self.failure or error

    def _bury(self, child: _Child) -> None:
        """A process has ended: hear its last words, and tell the coordinator, or fail."""
        if child.open:
            child.channel.hear_all(lambda word: self._take(child, word))
        child.process.join()
        child.channel.connection.close()
        del self.children[child.role]
        status = child.process.exitcode
        if self.finished is not None or (status == 0 and child.role != roles.COORDINATOR):
            return
        how = f"its process was killed by {signal.Signals(-status).name}" if status < 0 else f"its process ended with status {status}"
        if roles.is_replica(child.role) or child.role == roles.EVALUATOR:
            if roles.COORDINATOR in self.children:
                self.children[roles.COORDINATOR].channel.say(Died(child.role, how))
        elif self.failure is None:
            kept = " --resume goes on from the newest checkpoint, if there is one" if self.sitting.folder else ""
            self.failure = JobFailed(f"{child.role} is gone: {how}.{kept}")

    # ending

    def _interrupt(self) -> None:
        """First Ctrl-C: let the job end in peace, with a checkpoint. Second: end it now."""
        self._interrupts += 1
        coordinator = self.children.get(roles.COORDINATOR) or self.children.get(roles.SINGLE)
        if self._interrupts > 1 or coordinator is None:
            self.failure = JobFailed("interrupted twice: ended at once, without a checkpoint")
            return
        self._deadline = time.monotonic() + PATIENCE
        coordinator.channel.say(Interrupt("interrupted"))
        if not self.listening:
            self.failure = JobFailed("interrupted before the job began")

    def _end_all(self) -> None:
        """Leave no process behind: ask those that are left to end, then kill them."""
        for child in self.children.values():
            child.process.terminate()
        deadline = time.monotonic() + GRACE
        for child in self.children.values():
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.channel.connection.close()
        self.children.clear()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[Connection]:
        """Turn Ctrl-C and SIGTERM into something that can be waited for, where this is the main thread."""
        woken, wake = multiprocessing.Pipe(duplex=False)
        if threading.current_thread() is not threading.main_thread():
            yield woken
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, lambda *_: wake.send_bytes(b"!"))
        try:
            yield woken
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            woken.close()
            wake.close()
