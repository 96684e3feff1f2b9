"""The supervisor of a local job: it starts the processes from a forkserver, watches them, and ends them all, however the job ends."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief import errors
from distbelief.cluster import forkserver, signals, status
from distbelief.cluster.channel import Ask, Died, Explain, Failed, Interrupt, Listening, Noted, Over, Standing, Word
from distbelief.cluster.child import Child
from distbelief.cluster.gate import Guests, Knock, Part, Sorry
from distbelief.cluster.obituary import Obituary
from distbelief.cluster.spec import tell, tell_guest
from distbelief.core import records, roles
from distbelief.core.outcomes import Outcome
from distbelief.core.settings import Settings
from distbelief.errors import Interrupted, JobFailed
from distbelief.job import Job
from distbelief.record.journal import LIMIT as JOURNAL_LIMIT

if TYPE_CHECKING:
    from distbelief.cluster.authority import Authority
    from distbelief.cluster.gate import Gate
    from distbelief.cluster.local import Local
    from distbelief.cluster.sitting import Sitting

PATIENCE = 30.0
"""Seconds that a replica may take to leave a job that is ending, a process to end once the job has, and a stopped one (SIGSTOP) to go on."""
CLOSING = 600.0
"""Seconds that an interrupted job may take to write its checkpoint."""
GRACE = 1.0
"""Seconds that a process whose descriptors are closed may take to be gone."""
SILENCE = 20.0
"""Seconds without a word from anybody after which the supervisor says for whom it waits."""
TICK = 1.0
"""Seconds between two looks at the clock and at the processes."""


class Supervisor:
    """Starts the processes of a job, hands their words on, and ends them all, however the job ends."""

    def __init__(self, cluster: Local, job: Job, settings: Settings, sitting: Sitting, evaluates: bool, script: list[str] | None = None) -> None:
        self.cluster, self.job, self.settings, self.sitting, self.evaluates = cluster, job, settings, sitting, evaluates
        self.children: dict[str, Child] = {}
        self.failure: errors.DistbeliefError | None = None
        self.finished: records.Finished | None = None
        self.known = Obituary(sitting.number - 1, str(sitting.folder.path) if sitting.folder else "")
        self.listening = self.started = False
        self._heard, self._looked = time.monotonic(), 0.0
        self._leave_by = self._end_by = float("inf")
        self._interrupts: list[str] = []
        """What each signal that came is called."""
        self._script = script or []
        self._coordinator: Listening | None = None
        self._address = ""
        """Where the coordinator listens, or did last."""
        self._ending = False
        self._wanted: dict[str, int] = {}
        """Lives that are to begin, once the ones before have ended."""
        self._certifier: Authority | None = None
        self._gate: Gate | None = None
        self._guests = Guests(settings.replicas, settings.restarts)
        self.desk = status.Desk(sitting.folder.path if sitting.folder else None, self._ask, self._state)
        shared = settings.read_in_place or settings.mapped or (settings.among_themselves and cluster.carrier == "shared")
        self._memory = os.memfd_create("distbelief parameters") if shared else -1
        self._journal = tuple(os.memfd_create("distbelief journal") for _ in range(2 if job.strategy.served and settings.restarts else 0))
        self._known = 0
        """Records that the coordinator's lives have made."""
        self._ended: dict[str, Died] = {}
        """The last life of each role that has ended."""

    def run(self, woken: Connection) -> dict[str, Any]:
        """Start, watch and end the job; a word on `woken` is a signal that came."""
        try:
            self._start(woken)
            while self.children and self.failure is None:
                self._watch(woken)
        except BaseException:
            self.sitting.finish()
            raise
        finally:
            self._end_all()
            self.desk.close()
            if self._gate:
                self._gate.close()
            for descriptor in (*self._journal, *([self._memory] if self._memory >= 0 else [])):
                os.close(descriptor)
        return self._conclude()

    def _conclude(self) -> dict[str, Any]:
        """The result; or the one error that says why there is none."""
        self._keep_folder()
        finished = self.finished
        self.failure = self.failure or self.known.error(finished, self.started)
        if self.failure is not None and (finished is None or finished.outcome is not Outcome.FAILED):
            told = records.Finished.of(self.known.cause(self.failure), str(self.failure))
            self.sitting.record(time.monotonic(), roles.SUPERVISOR, told)
        result = self.sitting.finish()
        if self.failure is not None:
            raise self.failure
        return result

    # starting

    def _start(self, woken: Connection) -> None:
        """Start every process."""
        self._told = tell(self.cluster, self.job, self.settings, self.sitting, self._script, self.evaluates, self._memory, self._journal)
        self._certifier = self.cluster.authority(self._told.job)
        if self.cluster.listen and self.sitting.folder:
            self._gate = self.cluster.gate(self._told.job, self._certifier, self._admit, self.sitting.folder.path)
            told = f"others may join: copy {self._gate.path} to them, and there run distbelief join {self._gate.path.name}"
            self.sitting.record(time.monotonic(), roles.SUPERVISOR, records.Note(told))
        forkserver.start()
        for role in self._roles():
            if self.failure or (self.children and woken.poll()):
                return  # a Ctrl-C is acted on before the rest is started
            self._start_process(role, 0)

    def _start_process(self, role: str, incarnation: int) -> None:
        """Start the process of a role; where the machine refuses, the job fails."""
        if how := forkserver.how_it_ended():
            self.failure = self.known.failed(how)
            return
        try:
            process, ours = self._forked(role, incarnation)
        except (OSError, EOFError) as error:  # the forkserver ends where it cannot fork
            self.failure = self.known.failed(
                f"{role}: its process cannot be started beside {len(self.children)} others ({error or type(error).__name__}); have fewer --replicas"
                " or --shards, or raise what this machine allows (ulimit -n, ulimit -u)"
            )
            return
        child = self.children[role] = Child(role, incarnation, process, ours)
        if self._coordinator:
            child.channel.say(self._coordinator)

    def _forked(self, role: str, incarnation: int) -> tuple[Any, Connection]:
        """A process that plays a role, and our end of the channel to it."""
        from distbelief.cluster.process import main  # with torch

        own = msgspec.structs.replace(self._told, forkserver=forkserver.pid())
        if role == roles.COORDINATOR and incarnation:
            own = msgspec.structs.replace(own, listen=self._address, known=self._known)
        if self._certifier:
            heir = self._certifier.issue(roles.shard_of(role)) if roles.kind(role) is roles.Kind.STANDBY else None
            own = msgspec.structs.replace(own, identity=self._certifier.issue(role), heir=heir)
        return forkserver.fork(role, main, role, incarnation, msgspec.msgpack.encode(own))

    def _roles(self) -> list[str]:
        strategy = self.job.strategy
        return [*strategy.cast(), *([roles.EVALUATOR] if self.evaluates and strategy.served and not self.settings.among_themselves else [])]

    def _admit(self, knock: Knock) -> Part | Sorry:
        """What a guest is told who holds the ticket; called by threads of the gate."""
        if (listening := self._coordinator) is None or not self.started:
            return Sorry("it has not begun, or its coordinator is about to come again", soon=True)
        if self._ending or self.finished is not None:
            return Sorry("the job is ending")
        if knock.script != bool(self._script):
            scripts = f"every replica runs a script, {os.path.basename(self._script[0])}: name your copy of it" if self._script else ""
            return Sorry(scripts or "it trains a task, not a script: name none")
        given = self._guests.give(knock)
        if isinstance(given, Sorry):
            return given
        identity = self._certifier.issue(given[0]) if self._certifier else None
        return Part(*given, listening.address, self.settings.restarts, msgspec.msgpack.encode(tell_guest(self._told, identity)))

    # watching

    def _watch(self, woken: Connection) -> None:
        """Wait for words, deaths and signals, and act on them."""
        waiting: list[Any] = [woken, *(child.process.sentinel for child in self.children.values())]
        waiting += [self.desk.listener] if self.desk.listener else []
        waiting += [child.channel.connection for child in self.children.values() if child.open]
        ready = set(map(id, multiprocessing.connection.wait(waiting, min(TICK, self.desk.due))))
        if id(woken) in ready:
            self._interrupt(woken.recv_bytes().decode())
        for child in list(self.children.values()):
            if self.children.get(child.role) is child and id(child.channel.connection) in ready:
                child.open = child.channel.hear_all(lambda word, child=child: self._take(child, word))  # type: ignore[misc]
        for child in list(self.children.values()):
            if self.children.get(child.role) is child and not child.process.is_alive():
                self._bury(child)
        self.desk.serve(id(self.desk.listener) in ready)
        self._look(time.monotonic())

    def _ask(self) -> int:
        """Ask every process how it stands; returns how many were asked."""
        for child in self.children.values():
            child.channel.say(Ask())
        return len(self.children)

    def _state(self, said: Iterable[Standing]) -> dict[str, Any]:
        children = [(child.role, child.process.pid, child.incarnation) for child in self.children.values()]
        return status.state(children, said, self.sitting.recorder.summary)

    def _look(self, now: float) -> None:
        """Kill whoever holds the job up for too long, and say for whom it waits."""
        if now < self._looked + TICK:
            return
        self._looked = now
        self._keep_folder()
        if self.started and self.sitting.live.curious:
            for child in self.children.values():
                if roles.kind(child.role) is roles.Kind.SHARD:
                    child.channel.say(Ask())
        for child in self.children.values():
            if now > self._end_by:
                self._kill(child, "the job was over and it did not end")
            elif now > self._leave_by and roles.is_replica(child.role) and not child.left:
                self._kill(child, f"it did not leave within {PATIENCE:.0f} s of being asked to, and was killed")
            elif not signals.is_stopped(child.process.pid):
                child.stopped_at = None
            elif child.stopped_at is None:
                child.stopped_at = now
            elif (child.spare or self._journal) and now > child.stopped_at + PATIENCE:
                self._kill(child, f"it was stopped (SIGSTOP) for {PATIENCE:.0f} s, and was killed")
        if now > self._heard + SILENCE and self.children:
            self._heard = now
            stopped = [f"{c.role} is stopped, `kill -CONT {c.process.pid}` lets it go on" for c in self.children.values() if c.stopped_at]
            told = "; ".join([f"nothing was heard for {SILENCE:.0f} s; still running: {', '.join(self.children)}", *stopped])
            self.sitting.record(now, "supervisor", records.Note(told))
            if roles.COORDINATOR in self.children:
                self.children[roles.COORDINATOR].channel.say(Explain())

    def _keep_folder(self) -> None:
        """See to it that the run folder is there; without one the job fails."""
        try:
            if self.sitting.keep_folder(time.monotonic()):
                self.known.checkpoint = 0
        except errors.UsageError as error:
            self.failure = self.failure or error

    def _kill(self, child: Child, why: str) -> None:
        if not child.why:
            child.why = why
            child.process.kill()

    def _take(self, child: Child, word: Word) -> None:
        if not isinstance(word, Standing):  # which answers us, and is no sign that the job goes on
            self._heard = time.monotonic()
        if isinstance(word, Noted):
            self._known += word.role == roles.COORDINATOR
            self.sitting.record(word.moment, word.role, word.record)
            self._note(word.record)
        elif isinstance(word, Standing):
            self.desk.take(word)
            self.sitting.live.stands(word.role, word.facts)
        elif isinstance(word, Over):
            child.over = True
        elif isinstance(word, Listening):
            self.listening, self._coordinator, self._address = True, word, word.address
            for other in self.children.values():
                other.channel.say(word)
            for died in self._ended.values() if child.incarnation else ():
                child.channel.say(died)
            if self._interrupts:
                child.channel.say(Interrupt(self._interrupts[0]))
        elif isinstance(word, Failed):
            kind = getattr(errors, word.kind, JobFailed)
            if word.kind == JobFailed.__name__:  # only tells of somebody who is gone: whoever that is says why
                self.known.rumour, child.said = self.known.rumour or word.text, word.text
            elif self.failure is None and not (self.finished and self.finished.outcome is Outcome.INTERRUPTED):
                self.failure = kind(word.text)
                if word.trace:
                    self.failure.add_note(word.trace)

    def _note(self, record: records.Any) -> None:
        """Learn from a record how the job stands."""
        now = time.monotonic()
        if isinstance(record, records.Started | records.Rewound):
            self.started = True
            self._ending, self._leave_by = False, float("inf")
        elif isinstance(record, records.Checkpointed) and not record.error:
            self.known.checkpoint = record.number
        elif isinstance(record, records.Gone) and not record.died and record.role in self.children:
            self.children[record.role].left = True
        elif isinstance(record, records.Ending):
            self._ending = True
            if not self._script:  # a script may do much between two steps
                self._leave_by = min(self._leave_by, now + PATIENCE)
        elif isinstance(record, records.Succeeded):
            self._succeed(record)
        elif isinstance(record, records.Vacant):
            self._wanted[record.role] = record.incarnation
            self._fill(record.role)
        elif isinstance(record, records.Finished):
            self.finished = record
            if not self._script or record.outcome not in (Outcome.DONE, Outcome.LEFT):
                self._end_by = now + PATIENCE

    def _bury(self, child: Child) -> None:
        """A process has ended: hear its last words, and tell the coordinator, or fail."""
        if child.open:
            child.channel.hear_all(lambda word: self._take(child, word))
        child.process.join()
        status = child.process.exitcode
        if status == forkserver.UNTOLD and (how := forkserver.how_it_ended(GRACE)):
            self.failure = self.known.failed(how)
            return
        child.channel.connection.close()
        del self.children[child.role]
        if child.role == roles.COORDINATOR and self.finished:
            for other in self.children.values():
                other.channel.say(Died(child.role, "the job is over", child.incarnation))
        if status == 0 and child.over and (child.role != roles.COORDINATOR or self.finished):
            self._ended[child.role] = Died(child.role, "it was done", child.incarnation, left=True)
            return
        how = f"its process was killed by {signal.Signals(-status).name}" if status < 0 else f"its process ended with status {status}"
        if (status < 0 or not self.known.rumour) and child.role not in self._wanted and child.spare:
            self.known.deaths[child.role] = child.why or how
        if self.finished is not None:
            return
        if self.known.repeats(child.role, child.said) and not self.started:
            self.failure = self.failure or self.known.failed(child.said)  # another life would say it again
        if child.spare:
            self._tell(Died(child.role, child.why or f"{how}: {child.said}".removesuffix(": "), child.incarnation))
            leaves = self._ending and roles.is_replica(child.role)
            if roles.kind(child.role) not in (roles.Kind.SHARD, roles.Kind.STANDBY) and child.incarnation < self.settings.restarts and not leaves:
                self._wanted[child.role] = child.incarnation + 1  # of shards the coordinator says what is to be
            self._fill(child.role)
        elif self.failure is None and not self._revive(child, how):
            self.known.deaths[child.role] = child.why or how
            self.failure = self.known.gone(child.role)

    def _succeed(self, record: records.Succeeded) -> None:
        """A standby is its shard from now on; should the shard itself be there still, it has no say any more."""
        if (former := self.children.get(record.role)) is not None:
            former.process.kill()
            former.process.join()
            self._bury(former)
        if (child := self.children.pop(record.standby, None)) is not None:
            child.role, child.incarnation = record.role, record.incarnation
            self.children[record.role] = child
        else:
            self._tell(Died(record.role, "its standby has died with it", record.incarnation))

    def _tell(self, died: Died) -> None:
        """Tell the coordinator of a death; one that comes again is told all."""
        self._ended[died.role] = died
        if roles.COORDINATOR in self.children:
            self.children[roles.COORDINATOR].channel.say(died)

    def _fill(self, role: str) -> None:
        """Begin the life of a role that is to be, if one is; a life before it that is still there ends first."""
        child = self.children.get(role)
        if role not in self._wanted or self.failure is not None or self.finished is not None:
            return
        if child is None:
            self._start_process(role, self._wanted.pop(role))
        elif child.incarnation < self._wanted[role]:
            self._kill(child, "another takes its place")

    def _revive(self, coordinator: Child, how: str) -> bool:
        """Where the coordinator was killed: start another, which goes on by its journal; whether there can be one."""
        kept = self._journal and all(os.fstat(descriptor).st_size <= JOURNAL_LIMIT for descriptor in self._journal)
        if not kept or time.monotonic() > self._end_by or coordinator.process.exitcode >= 0 or coordinator.incarnation >= self.settings.restarts:
            return False
        told = f"{coordinator.role} is gone: {how}; another takes its place, and goes on by its journal"
        self.sitting.record(time.monotonic(), roles.SUPERVISOR, records.Note(told))
        self._coordinator = None
        self._start_process(coordinator.role, coordinator.incarnation + 1)
        return True

    # ending

    def _interrupt(self, signal: str) -> None:
        """First Ctrl-C: let the job end in peace, with a checkpoint. Second: end it now."""
        self._interrupts.append(signal)
        if self.finished is not None:
            self._end_by = 0.0
            return
        if not self.listening:
            self.failure = self.known.failed("interrupted", Interrupted) if self.known.checkpoint else Interrupted("interrupted before the job began")
            return
        if len(self._interrupts) > 1:
            self.failure = self.known.failed("interrupted twice: ended at once, without a checkpoint", Interrupted)
            return
        now = time.monotonic()
        self._leave_by, self._end_by = now + PATIENCE, now + CLOSING
        if (coordinator := self.children.get(roles.COORDINATOR) or self.children.get(roles.SINGLE)) is not None:
            coordinator.channel.say(Interrupt(signal))

    def _end_all(self) -> None:
        """Leave no process behind. They have nothing to do at such an end, and leave SIGTERM to this process."""
        for child in self.children.values():
            child.process.kill()
        for child in self.children.values():
            child.process.join()
            child.channel.connection.close()
        self.children.clear()
