"""Run of one job on processes: it connects the processes, their supervisor, the run folder and the display."""

from __future__ import annotations

import functools
import multiprocessing.connection
import os
import secrets
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from distbelief import errors
from distbelief.core import effects, records, roles
from distbelief.core.records import Json
from distbelief.core.roles import MOST
from distbelief.core.settings import Holder
from distbelief.places import status
from distbelief.places.cluster.host_processes import HostProcesses
from distbelief.places.cluster.remote_agent import RemoteLife
from distbelief.places.explanation import Explanation
from distbelief.places.join.join_server import Guests, JoinServer, wrong_strategy
from distbelief.places.messages import (
    Ask,
    ChannelMessage,
    JoinAnswer,
    JoinGrant,
    JoinRefusal,
    JoinRequest,
    Listening,
    Noted,
    Over,
    Standing,
)
from distbelief.places.place import (
    Deadlines,
    Ended,
    Event,
    Interruption,
    Moved,
    Said,
    Tick,
    Unable,
    Vacate,
    carry_out,
)
from distbelief.places.processes import forkserver
from distbelief.places.processes.options import LocalOptions, host_and_port, is_loopback
from distbelief.places.processes.output import Logs
from distbelief.places.processes.processes import Hooks, Life, Processes, here
from distbelief.places.processes.resources import ResourcesMeter
from distbelief.places.processes.script import name_of
from distbelief.places.processes.spec import Spec
from distbelief.places.supervisor import Supervisor
from distbelief.record import limits
from distbelief.record.journal import LIMIT as JOURNAL_LIMIT
from distbelief.strategies.base import DIRECT, is_alone, path_of
from distbelief.strategies.grouped.settings import GUESTS

if TYPE_CHECKING:
    from distbelief.places.attempt import Attempt
    from distbelief.places.join.authority import Authority
    from distbelief.transport.secure import Identity

DEADLINES = Deadlines()
CROWD = 8
"""Most partitions per core before a note says that they take long."""
ACCOUNTS = (records.BytesCounted, records.Applied)
"""Records that processes make of themselves at their time, whatever they do."""
TICK = 1.0
"""Seconds between two looks at the run folder and the processes."""


class Running:
    """Run of one job: it passes events of processes and signals to the supervisor, and carries out its effects."""

    def __init__(
        self,
        cluster: LocalOptions,
        attempt: Attempt,
        evaluates: bool,
        script: list[str] | None = None,
        make: Callable[[Hooks], Processes | HostProcesses] = Processes.of,
    ) -> None:
        self.cluster, self.attempt, self.evaluates = cluster, attempt, evaluates
        self.job, self.settings = job, settings = attempt.job, attempt.settings
        self._script = script or []
        spec = spec_of(cluster, attempt, self._script, evaluates)
        folder = attempt.folder.path if attempt.folder else None
        lasts = not is_alone(job.strategy) and settings.restarts > 0
        explanation = Explanation(attempt.start.number - 1, str(folder or ""))
        self.supervisor = Supervisor(
            settings.restarts, explanation, lasts=lasts, deadlines=DEADLINES, script=bool(self._script)
        )
        self._logs = Logs(folder) if cluster.logs and folder else None
        listens = bool(self._script) or self._logs is not None
        aside = functools.partial(attempt.live.print_of, aside=True)
        hooks = Hooks(self._spec, self._take, self._happens, self._note, self._printed, aside, listens)
        self.processes = make(hooks)
        self.status_server = status.StatusServer(folder, self._ask, self._state)
        self._looked, self._resources = 0.0, ResourcesMeter(attempt)
        self._address = ""
        """Present or last address of the coordinator."""
        self._known = 0
        """Number of records from all incarnations of the coordinator."""
        self._certifier: Authority | None = None
        self._join_server: JoinServer | None = None
        # kept until nothing can fail any more: only `close` closes these descriptors
        shared = spec.direct or job.strategy.needs_memory(settings, cluster.carrier)
        columns = settings.partitions if settings.strategy.held_by is Holder.REPLICAS else 1
        memory = tuple(os.memfd_create("distbelief parameters") for _ in range(columns * shared))
        crosses = settings.partitions > 1 and cluster.carrier == "shared"
        crossings = os.memfd_create("distbelief crossings") if crosses else -1
        journal = tuple(os.memfd_create("distbelief journal") for _ in range(2 * lasts))
        self._job_spec = msgspec.structs.replace(spec, memory=memory, crossings=crossings, journal=journal)

    def run(self, woken: Connection) -> Json:
        """Start, watch and end the job; each message on `woken` is a signal that came."""
        supervisor = self.supervisor
        try:
            self._start(woken)
            while self.processes.children and supervisor.failure is None:
                self._watch(woken)
        except BaseException:
            self.attempt.finish()
            raise
        finally:
            self.close()
        if self._logs and not self.attempt.begun:  # its folder is deleted: show its logs first
            for role, lines in self._logs.kept():
                self.attempt.live.print_of(role, lines)
        self._keep_folder()
        error, record = supervisor.conclude()
        if record is not None:
            self.attempt.record(time.monotonic(), roles.SUPERVISOR, record)
        result = self.attempt.finish()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End every process, and close every socket and memory."""
        self.processes.close()
        self.status_server.close()
        if self._join_server:
            self._join_server.close()
        for descriptor in (*self._job_spec.journal, *self._job_spec.memory, self._job_spec.crossings):
            if descriptor >= 0:
                os.close(descriptor)

    # start

    def _start(self, woken: Connection) -> None:
        """Start every process, unless Ctrl-C or a failure comes first."""
        self.processes.open(woken)
        if self.cluster.encrypted:
            from distbelief.places.join.authority import Authority  # this imports a cryptography package

            self._certifier = Authority(self._job_spec.job)
        if self.cluster.listen and self.attempt.folder:
            where, host = host_and_port(self.cluster.listen, "--listen"), self.cluster.advertised
            most = GUESTS if self.job.strategy.held_by is Holder.REPLICAS else MOST
            guests = Guests(self.settings.replicas, self.settings.restarts, most)
            admit = functools.partial(self._admit, guests)
            self._join_server = JoinServer(
                self._job_spec.job, where, host, self._certifier, admit, self.attempt.folder.path
            )
            path = self._join_server.path
            self._note(f"others may join: copy {path} to them, and there run distbelief join {path.name}")
            if is_loopback(host):
                self._note(
                    f"its address there is {host}, which only this machine reaches: name another with --advertise"
                )
        self._tell_crowd()
        for effect in self.supervisor.begin(self.job.strategy.roles(self.evaluates)):
            if self.supervisor.failure or (self.processes.children and woken.poll()):
                return
            carry_out(self.processes, effect)

    def _tell_crowd(self) -> None:
        """Note that the job may seem idle for long if each core of this machine has many partitions."""
        if self.settings.partitions == 1 or not isinstance(self.processes, Processes):
            return
        count, cores = len(roles.replicas(self.settings.mesh)), limits.cores()
        if count > CROWD * cores:
            self._note(
                f"{count} partitions take turns on the {cores} cores of this machine, as they build their parts (a "
                "second each) and in every step; fewer --partitions take less time"
            )

    def _spec(self, role: str, incarnation: int, output: int = -1) -> bytes:
        """Return the encoded spec of a role's process."""
        spec = msgspec.structs.replace(self._job_spec, forkserver=forkserver.pid(), output=output)
        own = self.processes.spec_for(role, spec)
        if role == roles.COORDINATOR and incarnation:
            own = msgspec.structs.replace(own, listen=self._address, known=self._known)
        if self._certifier:
            standby = roles.kind(role) is roles.Kind.STANDBY
            successor = self._certifier.issue(roles.shard_of(role)) if standby else None
            own = msgspec.structs.replace(own, identity=self._certifier.issue(role), successor=successor)
        return msgspec.msgpack.encode(own)

    def _printed(self, life: Life, lines: list[str]) -> None:
        """Write the output of a role to its log file, or show it with the role's name before each line."""
        try:
            if self._logs:
                self._logs.write(life.role, lines)
                return
        except OSError as error:
            self._logs = None
            self._note(f"what the roles print is shown from now on, since it cannot be kept: {error}")
        host = life.agent.name if isinstance(life, RemoteLife) else ""
        self.attempt.live.print_of(f"{life.role} on {host}" if host else life.role, lines)

    def _note(self, text: str) -> None:
        self.attempt.record(time.monotonic(), roles.SUPERVISOR, records.Note(text))

    def _admit(self, guests: Guests, request: JoinRequest) -> JoinAnswer:
        """Return the answer to a guest that holds the ticket; threads of the join server call this."""
        listening = self.supervisor.listening
        if (refusal := self.supervisor.refusal) is not None or listening is None:
            return JoinRefusal(*(refusal or ("its coordinator is about to be restarted", True)))
        if request.script != bool(self._script):
            scripts = ""
            if self._script:
                name = os.path.basename(name_of(self._script))
                scripts = f"every replica runs a script, {name}: name your copy of it"
            return JoinRefusal(scripts or "it trains a task, not a script: give none to distbelief join TICKET")
        if wrong := wrong_strategy(self._job_spec.strategy, request.strategy):
            return JoinRefusal(wrong)
        given = guests.give(request)
        if isinstance(given, JoinRefusal):
            return given
        identity = self._certifier.issue(given[0]) if self._certifier else None
        spec = msgspec.msgpack.encode(spec_of_guest(self._job_spec, identity))
        return JoinGrant(*given, listening.address, self.settings.restarts, spec)

    # watch

    def _watch(self, woken: Connection) -> None:
        """Wait for messages, ends of processes and signals, and act on them."""
        asked = self.status_server.listener
        waiting = [woken, *([asked] if asked else []), *self.processes.waitables]
        ready = set(map(id, multiprocessing.connection.wait(waiting, min(TICK, self.status_server.due))))
        if id(woken) in ready:
            self._happens(Interruption(woken.recv_bytes().decode()))
        self.processes.look(ready)
        self.status_server.serve(id(asked) in ready)
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        """Check the run folder and look for stopped processes, once a tick."""
        if now < self._looked + TICK:
            return
        self._looked = now
        self._keep_folder()
        if self.supervisor.started:
            self._resources.look(now, self.processes.children)
        self._happens(Tick(self.processes.stopped, self.processes.busy if self._script else set()))

    def _keep_folder(self) -> None:
        """Keep the run folder in place; the job fails if it is gone and cannot be made again."""
        try:
            if self.attempt.keep_folder(time.monotonic()):
                self.supervisor.explanation.checkpoint = 0
        except errors.UsageError as error:
            self._happens(Unable(error))

    def _ask(self) -> int:
        """Ask every process for its standing; return the number of processes."""
        children = self.processes.children
        for child in children:
            child.say(Ask())
        return len(children)

    def _state(self, standings: Iterable[Standing]) -> Json:
        children = [(child.role, child.pid, child.incarnation) for child in self.processes.children]
        recorder = self.attempt.recorder
        return status.state(children, standings, recorder.summary, recorder.timeline, self.supervisor.interrupted)

    def _take(self, child: Life, word: ChannelMessage) -> None:
        """Handle a message from a process; standings and accounts come at any time, and are no sign of progress."""
        if isinstance(word, Standing):
            self.status_server.take(word)
        elif isinstance(word, Noted) and isinstance(word.record, ACCOUNTS) and word.record.role == word.role:
            self.attempt.record(word.moment, word.role, word.record)
        elif isinstance(word, Noted):  # the coordinator's, also those about others, are in its journal
            self._known += word.role == roles.COORDINATOR
            self.attempt.record(word.moment, word.role, word.record)
            self._happens(Said(child.role, child.incarnation, word.record))
            if isinstance(word.record, records.Succeeded):
                standby, shard = word.record.standby, word.record.role
                if self.processes.rename(standby, shard, word.record.incarnation):
                    self._happens(Moved(standby))
        elif not isinstance(word, Over):
            if isinstance(word, Listening):
                self._address = word.address
            self._happens(Said(child.role, child.incarnation, word))

    def _happens(self, event: Event) -> None:
        """Pass an event to the supervisor, and carry out its effects."""
        if isinstance(event, Ended) and event.role == roles.COORDINATOR:
            whole = all(os.fstat(descriptor).st_size <= JOURNAL_LIMIT for descriptor in self._job_spec.journal)
            event = msgspec.structs.replace(event, resumable=whole)
        for effect in self.supervisor.handle(time.monotonic(), event):
            if isinstance(effect, effects.WriteRecord):
                self.attempt.record(time.monotonic(), roles.SUPERVISOR, effect.record)
            elif isinstance(effect, Vacate) and isinstance(self.processes, HostProcesses):
                self.processes.vacate(effect.host)
            else:
                carry_out(self.processes, effect)


def spec_of(cluster: LocalOptions, attempt: Attempt, script: list[str], evaluator: bool) -> Spec:
    """Return the spec of all processes of a job, without the identity of each and the memory that they share."""
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
        direct=path_of(cluster.path, job.strategy, settings, cluster.carrier) == DIRECT,
        direct_asked=cluster.path == DIRECT,
        script=script,
        evaluator=evaluator,
        **here(),
    )


def spec_of_guest(spec: Spec, identity: Identity | None) -> Spec:
    """Return the spec of a replica on another machine: the job's values, without those of this machine."""
    of_job = {name: getattr(spec, name) for name in ("job", "task", "strategy", "settings", "transport", "insecure")}
    return Spec(**of_job, identity=identity, evaluator=False)
