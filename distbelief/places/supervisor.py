"""Supervisor: a state machine that starts, ends and informs the roles of a job, and decides how the job ends.

A place carries out its effects, and reports to it as events. The place is the processes of this machine, a simulation,
or the machine of a guest. The supervisor reads no clock: every event comes with its moment. The coordinator alone
decides when shards and standbys start again. The supervisor decides this for all other roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distbelief.core import effects, records, roles
from distbelief.core.records import Outcome
from distbelief.errors import DistbeliefError, Interrupted, JobFailed
from distbelief.places.explanation import Explanation
from distbelief.places.messages import Died, Explain, Failed, Interrupt, Listening
from distbelief.places.place import (
    Deadlines,
    Effect,
    Ended,
    Event,
    Interruption,
    Kill,
    Moved,
    Said,
    Start,
    Tell,
    Tick,
    TickLater,
    Unable,
    Vacate,
)

NAMES = 8
"""Most roles that one line names."""
LATER = float("inf")
"""Moment of a start that is not due yet."""


class _Life:
    """One life of a role that has not ended."""

    def __init__(self, role: str, incarnation: int) -> None:
        self.role, self.incarnation = role, incarnation
        self.name = role, incarnation
        """Role and incarnation under which the place knows it."""
        self.left = False
        """True if it has left the job regularly; its script may continue for any time after that."""
        self.stopped_at: float | None = None
        self.said = Failed("", "")
        """Its last error, if the error only reported that another role is gone."""
        self.why = ""
        """Reason for which it was killed; "" if it was not."""
        self.mirrors = False
        """True if it is a standby that holds the whole state of its shard."""
        self.host, self.leave_by = "", float("inf")
        """Host that is leaving the job with this life on it, and the moment by which the life must end."""


class Supervisor:
    """State machine that starts and ends roles; `handle` takes an event and returns effects.

    Args:
        restarts: the number of times that each role is restarted.
        lasts: whether a killed coordinator is restarted.
        deadlines: the time limits for other roles, and the pause before a restart.
        script: whether replicas run the user's scripts, which may work long between two steps and after the last one.
        guest: whether it starts only one replica, which takes part in another machine's job.

    >>> supervisor = Supervisor(restarts=1)
    >>> supervisor.begin(["coordinator", "replica 0"])
    [Start(role='coordinator', incarnation=0), Start(role='replica 0', incarnation=0)]
    >>> told = supervisor.handle(0.0, Said("coordinator", 0, Listening("")))
    >>> for effect in supervisor.handle(1.0, Ended("replica 0", 0, "killed", killed=True)): print(effect)
    Tell(role='coordinator', word=Died(role='replica 0', reason='killed', incarnation=0, left=False))
    Start(role='replica 0', incarnation=1)
    Tell(role='replica 0', word=Listening(address=''))
    """

    def __init__(
        self,
        restarts: int,
        explanation: Explanation | None = None,
        *,
        lasts: bool = False,
        deadlines: Deadlines | None = None,
        script: bool = False,
        guest: bool = False,
    ) -> None:
        self._restarts, self._lasts, self._script, self._guest = restarts, lasts, script, guest
        self.deadlines = deadlines or Deadlines()
        self.explanation = explanation or Explanation()
        self.failure: DistbeliefError | None = None
        """Error for which the job is to end at once."""
        self.finished: records.Finished | None = None
        """End of the job, as reported by the coordinator."""
        self.started = self.ending = False
        self.listening: Listening | None = None
        """Address where the coordinator listens; None until it does, also after a restart."""
        self._listened = False
        self._here: dict[str, list[_Life]] = {}
        self._gone: dict[str, Died] = {}
        """Last end of each role."""
        self._wanted: dict[str, tuple[int, float]] = {}
        """Incarnation to start once the earlier ones have ended, and the moment from which it is due, by role."""
        self._died_in: dict[str, int] = {}
        """Latest incarnation that died, by role; all partitions of a replica count as one role."""
        self._moving: dict[str, _Life] = {}
        """Life that becomes its shard once the place has renamed it, by standby."""
        self._interrupts: list[Interruption] = []
        self._leaving: set[str] = set()
        """Hosts that are leaving the job."""
        self._heard, self._hushed = float("inf"), 0.0
        self._late: DistbeliefError | None = None
        """Error that a script raised after its part of the job was done."""
        self._leave_by = self._end_by = float("inf")

    # state

    @property
    def over(self) -> bool:
        """Return whether no role is started any more."""
        return self.failure is not None or self.finished is not None

    @property
    def interrupted(self) -> bool:
        """Return whether a signal has told the whole job to end."""
        return bool(self._interrupts)

    def _lives(self) -> Iterator[_Life]:
        return (life for lives in self._here.values() for life in lives)

    def _latest(self, role: str) -> _Life | None:
        return self._here[role][-1] if role in self._here else None

    def moves(self, standby: str) -> bool:
        """Return whether a standby is about to take over its shard."""
        return standby in self._moving

    @property
    def refusal(self) -> tuple[str, bool] | None:
        """Reason why no guest may join now, and whether one may join soon; None if one may join."""
        if self.listening is None or not self.started:
            return "it has not begun, or its coordinator is about to be restarted", True
        return ("the job is ending", False) if self.ending or self.finished is not None else None

    def _needs(self, role: str) -> bool:
        """Return whether the job cannot go on without a role."""
        return self._guest or role in (roles.COORDINATOR, roles.SINGLE)

    def conclude(self) -> tuple[DistbeliefError | None, records.Finished | None]:
        """Return the error of a failed job, and a record of its end if no role has made one."""
        self.failure = self.failure or self.explanation.error(self.finished, self.started)
        if self.failure is None and self._late is not None:
            self.failure = self._late
            return self.failure, None
        if self.failure is None or (self.finished is not None and self.finished.outcome is Outcome.FAILED):
            return self.failure, None
        return self.failure, records.Finished.of(self.explanation.cause(self.failure), str(self.failure))

    def validate(self) -> None:
        """Assert the invariants between two events."""
        for role, lives in self._here.items():
            numbers = [life.incarnation for life in lives]
            assert numbers == sorted({*numbers}), f"{role} runs as {numbers}"
            wanted, _ = self._wanted.get(role, (numbers[-1] + 1, LATER))
            assert wanted > numbers[-1], f"{role} is to begin as {wanted}, and runs as {numbers}"
            assert all(life.role == role for life in lives), f"{[life.role for life in lives]} are kept as {role}"
        names = [life.name for life in self._lives()]
        assert len(names) == len({*names}), f"{names}: two lives have one name"
        assert all(life in self._lives() for life in self._moving.values()), f"{[*self._moving]} move, and are gone"

    # events

    def begin(self, who: Iterable[str]) -> list[Effect]:
        """Start the first life of every role."""
        return [effect for role in who for effect in self._start(role, 0)]

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Handle one event at a moment in seconds; return the effects."""
        match event:
            case Said():
                self._heard = now
                self._hushed = 0.0
                return self._said(now, event)
            case Ended():
                return self._ended(now, event)
            case Tick():
                return self._tick(now, event)
            case Moved():
                return self._moved(now, event.standby)
            case Interruption():
                return self._interrupted(now, event)
            case Unable():
                bare = type(event.error) is JobFailed
                self.failure = self.failure or (self.explanation.failed(str(event.error)) if bare else event.error)
        return []

    def _said(self, now: float, report: Said) -> list[Effect]:
        what = report.what
        match what:
            case Listening():
                return self._listens(report, what)
            case Failed():
                return self._failed(report, what)
            case records.Started() | records.Rewound():
                self.started = True
                self.ending, self._leave_by = False, float("inf")
            case records.Checkpointed(error=""):
                self.explanation.checkpoint = what.number
            case records.Gone(died=False):
                self._leaves(what.role)
            case records.Ending():
                self.ending = True
                if self._interrupts or not self._script:
                    self._leave_by = min(self._leave_by, now + self.deadlines.ending)
            case records.Succeeded():
                return self._succeeds(what)
            case records.StandbyReady() | records.Vacant():
                return self._mirrors(now, what)
            case records.Finished():
                self.finished = what
                if not self._script or what.outcome not in (Outcome.DONE, Outcome.LEFT):
                    self._end_by = now + self.deadlines.ending
                evaluators = self._here.get(roles.EVALUATOR, []) if what.outcome is Outcome.INTERRUPTED else []
                return [effect for life in evaluators for effect in self._kill(life, "it measured for nobody")]
        return []

    def _mirrors(self, now: float, record: records.StandbyReady | records.Vacant) -> list[Effect]:
        """Note that a shard's standby holds its state; if it does not, start the shard again."""
        if life := self._latest(roles.standby_of(record.role)):
            life.mirrors = isinstance(record, records.StandbyReady)
        if isinstance(record, records.StandbyReady):
            return []
        self._wanted[record.role] = record.incarnation, LATER
        return self._fill(now, record.role)

    def _listens(self, report: Said, word: Listening) -> list[Effect]:
        """Send all roles the coordinator's address. Send the coordinator all deaths, and a pending interrupt."""
        self.listening, self._listened = word, True
        answer: list[Effect] = [Tell(role, word) for role in self._here]
        answer += [Tell(report.role, died) for died in self._gone.values()]
        if self._interrupts:
            answer.append(Tell(report.role, Interrupt(self._interrupts[0].why)))
        return answer

    def _leaves(self, lead: str) -> None:
        """Note that the coordinator has released a role; if its partitions end now, that is no death."""
        for life in self._lives():
            life.left |= roles.lead_of(life.role) == lead

    def _failed(self, report: Said, word: Failed) -> list[Effect]:
        """Handle an error: it ends the job, unless it only reports that another role has died."""
        if word.kind == JobFailed.__name__:
            self.explanation.reported_loss = self.explanation.reported_loss or word.told
            for life in self._here.get(report.role, ()):
                if life.incarnation == report.incarnation:
                    life.said = word
        elif word.done or (self._script and self.finished and self.finished.outcome is Outcome.DONE):
            return self._failed_late(report.role, word)
        elif self.failure is None and not (self.finished and self.finished.outcome is Outcome.INTERRUPTED):
            self.failure = word.error
        return []

    def _failed_late(self, role: str, word: Failed) -> list[Effect]:
        """Keep a script's error until the end of the job: its part was done, and the training continues."""
        for life in self._here.get(role, ()):
            life.left = True
        if self._late is None:
            self._late = word.error
            kept = f" and is kept in {self.explanation.run}" if self.explanation.run else ""
            self._late.args = (f"{word.told}; that came after its part of the training: the job continues{kept}",)
        return [effects.WriteRecord(records.Note(f"{word.told}; its part of the training was done"))]

    # starts and ends

    def _start(self, role: str, incarnation: int) -> list[Effect]:
        self._wanted.pop(role, None)
        self._here.setdefault(role, []).append(_Life(role, incarnation))
        return [Start(role, incarnation), *([Tell(role, self.listening)] if self.listening else [])]

    def _take_away(self, role: str, incarnation: int) -> _Life | None:
        """Remove the life that the place knows by this role and incarnation, and return it."""
        for life in list(self._lives()):
            if life.name == (role, incarnation):
                self._here[life.role].remove(life)
                if not self._here[life.role]:
                    del self._here[life.role]
                return life
        return None

    def _ended(self, now: float, ended: Ended) -> list[Effect]:
        """Report an end to the coordinator, and start another life, or fail the job."""
        life = self._take_away(ended.role, ended.incarnation)
        if life is None:
            return []
        if not ended.resumable:
            self._died_in[roles.lead_of(life.role)] = self._restarts
        answer: list[Effect] = self._end_servers(life.host)
        if self._moving.get(ended.role) is life:
            del self._moving[ended.role]
            answer += self._fill(now, ended.role)
        if life.role == roles.COORDINATOR and self.finished:
            died = Died(life.role, "the job is over", life.incarnation)
            answer += [Tell(role, died) for role in self._here]
        after = (self._script or life.host) and life.left and roles.is_replica(life.role)
        if after or (ended.done and (life.role != roles.COORDINATOR or self.finished)):
            self._gone[life.role] = Died(life.role, "it was done", life.incarnation, left=True)
            return answer
        return [*answer, *self._died(now, life, ended), *self._kill_siblings(life)]

    def _kill_siblings(self, life: _Life) -> list[Effect]:
        """Kill all partitions of a replica: none could continue, or join an incarnation in which one has died."""
        if not roles.is_replica(life.role):
            return []
        lead, following = roles.lead_of(life.role), self._next_life(life)
        for role in [role for role in self._wanted if roles.lead_of(role) == lead]:
            if following is None:
                del self._wanted[role]
            else:
                self._wanted[role] = following, self._wanted[role][1]
        siblings = [
            other
            for other in self._lives()
            if other.incarnation <= life.incarnation and roles.lead_of(other.role) == lead
        ]
        return [effect for sibling in siblings for effect in self._kill(sibling, f"{life.role} is gone")]

    def _next_life(self, life: _Life) -> int | None:
        """Return the incarnation after the latest in which a partition of the replica died; None if none is left."""
        lead = roles.lead_of(life.role)
        last = self._died_in[lead] = max(self._died_in.get(lead, 0), life.incarnation)
        return last + 1 if last < self._restarts else None

    def _died(self, now: float, life: _Life, ended: Ended) -> list[Effect]:
        known, role, how = self.explanation, life.role, life.why or ended.how
        reported_loss = known.reported_loss and not ended.killed
        if how and not reported_loss and role not in self._wanted and not self._needs(role):
            known.deaths[role] = how
        if self.finished is not None:
            return []
        if known.repeats(role, life.said.text) and not self.started:
            self.failure = self.failure or known.failed(life.said.told)  # another life would fail in the same way
        following = self._next_life(life) if self._comes_again(now, life, ended) else None
        again = following is not None
        if following is not None:
            self._wanted[role] = following, LATER
        if not self._needs(role):
            reason = life.why or f"{how}: {life.said.told}".removeprefix(": ").removesuffix(": ")
            last = life.incarnation if ended.resumable else self._restarts  # no other incarnation follows
            return [*self._tell_of(Died(role, reason, last)), *self._fill(now, role)]
        if again:
            self.listening = None
        elif self.failure is None:
            self._give_up(life, how)
        return [*self._notes_of(life, how, again), *self._fill(now, role)]

    def _comes_again(self, now: float, life: _Life, ended: Ended) -> bool:
        """Return whether the supervisor itself starts the next life of a role."""
        if self.failure is not None or not ended.resumable:
            return False
        if life.role in (roles.COORDINATOR, roles.SINGLE):
            return self._lasts and ended.killed and now <= self._end_by
        if roles.is_replica(life.role):
            return not self.ending and not self._was_done(life)
        return roles.kind(life.role) not in (roles.Kind.SHARD, roles.Kind.STANDBY)

    def _was_done(self, life: _Life) -> bool:
        """Return whether another partition of the incarnation has ended regularly, so that none restarts."""
        lead, incarnation = roles.lead_of(life.role), life.incarnation
        return any(
            gone.left and gone.incarnation == incarnation and roles.lead_of(gone.role) == lead
            for gone in self._gone.values()
        )

    def _notes_of(self, life: _Life, how: str, again: bool) -> list[Effect]:
        """Return the notes about a death that is not reported to the coordinator."""
        texts = [f"{life.role} is gone: {how}; another takes its place, and continues from its journal"] * again
        if self._guest:
            texts = [life.said.told] * bool(life.said.told)
            texts += [f"{life.role} died: {how}; another takes its place"] * again
        return [effects.WriteRecord(records.Note(text)) for text in texts]

    def _give_up(self, life: _Life, how: str) -> None:
        """Fail the job, which needs this role."""
        if not self._guest:
            self.explanation.deaths[life.role] = how
            self.failure = self.explanation.gone(life.role)
        elif self.ending:
            self.failure = JobFailed(life.said.told or f"{life.role} died as it was about to leave: {how}")
        else:
            lives = f"{life.role} died in each of its {self._restarts + 1} lives"
            self.failure = JobFailed(f"{lives}: look for the reason above, or in this machine's log")

    def _tell_of(self, died: Died) -> list[Effect]:
        """Report a death to the coordinator, now or once it listens."""
        self._gone[died.role] = died
        return [Tell(roles.COORDINATOR, died)] if self.listening else []

    def _fill(self, now: float, role: str) -> list[Effect]:
        """Start the next life of a role, if one is due; an earlier life that is still there ends first."""
        if role not in self._wanted or role in self._moving or self.over:
            return []
        following, _ = self._wanted[role]
        if role in self._here:
            older = [life for life in self._here[role] if life.incarnation < following]
            return [effect for life in older for effect in self._kill(life, "another takes its place")]
        if pause := self.deadlines.pause:
            self._wanted[role] = following, now + pause
            return [TickLater(pause)]
        return self._start(role, following)

    def _succeeds(self, record: records.Succeeded) -> list[Effect]:
        """Replace a shard by its standby; no other life of the shard is started."""
        self._wanted.pop(record.role, None)
        if (life := self._latest(record.standby)) is None:
            return self._tell_of(Died(record.role, "its standby has died with it", record.incarnation))
        self._take_away(*life.name)
        life.role, life.incarnation = record.role, record.incarnation
        self._here.setdefault(record.role, []).append(life)
        self._moving[record.standby] = life
        return []

    def _moved(self, now: float, standby: str) -> list[Effect]:
        """Note that the place has renamed a standby to its shard; end a former life of the shard."""
        if (life := self._moving.pop(standby, None)) is None:
            return []
        life.name = life.role, life.incarnation
        former = [other for other in self._here.get(life.role, ()) if other.incarnation < life.incarnation]
        return [*(Kill(*other.name) for other in former), *self._fill(now, standby)]

    def _kill(self, life: _Life, why: str) -> list[Effect]:
        if life.why:
            return []
        life.why = why
        return [Kill(*life.name)]

    # time

    def _tick(self, now: float, tick: Tick) -> list[Effect]:
        """Start the roles that are due, kill those that delay the job too long, and report what the job waits for."""
        answer: list[Effect] = []
        self._heard = min(self._heard, now)  # before it has heard anything, silence counts from the first tick
        for role, (following, due) in list(self._wanted.items()):
            if due <= now and role not in self._here and not self.over:
                answer += self._start(role, following)
        for life in self._lives():
            answer += self._hold_up(now, life, life.role in tick.stopped)
        if now > self._heard + self.deadlines.silence and self._here:
            answer += self._silent(now, tick)
        return answer

    def _silent(self, now: float, tick: Tick) -> list[Effect]:
        """Report which roles the job waits for; for scripts that compute, less and less often."""
        if busy := [role for role in self._here if role in tick.busy]:
            silent = now - self._heard
            if silent < self._hushed:
                return []
            self._hushed = 2 * silent
            text = (
                f"no step for {silent:.0f} s: the scripts of {roles.named(busy, NAMES)} compute (a long step, a "
                "compiler, a validation)"
            )
            return [effects.WriteRecord(records.Note(text))]
        self._heard = now
        named = [f"{role} is stopped, `kill -CONT {pid}` lets it go on" for role, pid in tick.stopped.items()]
        waits = f"nothing was heard for {self.deadlines.silence:.0f} s; still running: {', '.join(self._here)}"
        question = [Tell(roles.COORDINATOR, Explain())] if roles.COORDINATOR in self._here else []
        return [effects.WriteRecord(records.Note("; ".join([waits, *named]))), *question]

    def _hold_up(self, now: float, life: _Life, stopped: bool) -> list[Effect]:
        """Kill a life that has delayed the job for too long."""
        seconds = f"{self.deadlines.ending:.0f} s"
        if now > self._end_by:
            return self._kill(life, "the job was over and it did not end")
        if now > self._leave_by and roles.is_replica(life.role) and not life.left:
            return self._kill(life, f"it did not leave within {seconds} of being asked to, and was killed")
        if now >= life.leave_by and (self._guest or not self._ends):
            return self._cut_short(life)
        if not stopped or life.stopped_at is None:
            life.stopped_at = now if stopped else None
        elif (self._lasts or not self._needs(life.role)) and now > life.stopped_at + self.deadlines.ending:
            return self._kill(life, f"it was stopped (SIGSTOP) for {seconds}, and was killed")
        return []

    def _interrupted(self, now: float, event: Interruption) -> list[Effect]:
        """End the job with a checkpoint, or let one host leave; a second interruption ends the job at once."""
        if event.host in self._leaving:
            return []
        if self._spares(event):
            return self._let_leave(now, event)
        again = any(event.host == interrupt.host for interrupt in self._interrupts)
        elsewhere = bool(self._interrupts) and not again
        self._interrupts.append(event)
        if elsewhere:
            return []
        known = self.explanation
        if self.finished is not None:
            self._end_by = float("-inf")
        elif self._guest and again:
            self.failure = Interrupted(
                "interrupted twice: ended at once, and what this replica held is dealt to others"
            )
        elif self._guest:
            self.ending = True
            request = Interrupt("this replica was asked to leave")
            note = effects.WriteRecord(records.Note("leaving once its unfinished work is applied"))
            for life in self._lives():
                life.leave_by = now + event.within if event.within else float("inf")
            return [note, *(Tell(role, request) for role in self._here)]
        elif not self._listened:
            early = Interrupted("interrupted before the job began")
            self.failure = known.failed("interrupted", Interrupted) if known.checkpoint else early
        elif again:
            self.failure = known.failed("interrupted twice: ended at once, without a checkpoint", Interrupted)
        else:
            self._end_by = now + self.deadlines.closing
            if self.ending:
                self._leave_by = min(self._leave_by, now + self.deadlines.ending)
            heads = [role for role in (roles.COORDINATOR, roles.SINGLE) if role in self._here]
            return [Tell(role, Interrupt(event.why)) for role in heads]
        return []

    # hosts that leave

    @property
    def _ends(self) -> bool:
        """Return whether the whole job ends, so that no host leaves by itself."""
        return self.ending or self.interrupted or self.over

    def _replicas_of(self, event: Interruption) -> set[str]:
        """Return the replicas that compute on a host, even if some of their partitions are elsewhere."""
        return {roles.lead_of(role) for role, _ in event.lives if roles.is_replica(role)}

    def _spares(self, event: Interruption) -> bool:
        """Return whether the job can continue without a host.

        Other hosts must have replicas, and the host's shards must have standbys or a checkpoint.
        """
        if not event.within or not self.started or self._ends:
            return False
        leads = self._replicas_of(event)
        others = [life for life in self._lives() if life.name not in event.lives and not life.host]
        mirrored = {roles.shard_of(life.role) for life in others if life.mirrors}
        shards = [
            life for life in self._lives() if life.name in event.lives and roles.kind(life.role) is roles.Kind.SHARD
        ]
        loads = event.replaceable and self.explanation.checkpoint > 0
        return any(roles.is_replica(other.role) and roles.lead_of(other.role) not in leads for other in others) and all(
            (loads and shard.incarnation < self._restarts) or shard.role in mirrored for shard in shards
        )

    def _let_leave(self, now: float, event: Interruption) -> list[Effect]:
        """Ask the replicas of a host to finish what they have begun; its servers serve until then."""
        self._leaving.add(event.host)
        leads = self._replicas_of(event)
        for life in self._lives():
            there = life.name in event.lives
            if there or (roles.is_replica(life.role) and roles.lead_of(life.role) in leads):
                life.host = event.host if there else life.host or event.host
                life.leave_by = min(life.leave_by, now + event.within)
        who = roles.named(sorted(role for role, _ in event.lives), NAMES) or "nobody"
        text = f"host {event.host} leaves within {event.within:g} s ({event.why}): {who}; the others go on"
        request = Interrupt(f"host {event.host} was told to leave")
        return [
            effects.WriteRecord(records.Note(text)),
            Vacate(event.host),
            *(Tell(lead, request) for lead in sorted(leads)),
            *self._end_servers(event.host),
            TickLater(event.within),
        ]

    def _end_servers(self, host: str) -> list[Effect]:
        """Kill the servers on a leaving host once no replica is left there, unless the whole job ends."""
        there = [life for life in self._lives() if host and life.host == host]
        if self._ends or any(roles.is_replica(life.role) for life in there):
            return []
        return [effect for life in there for effect in self._kill(life, f"host {host} leaves")]

    def _cut_short(self, life: _Life) -> list[Effect]:
        """Kill a life that has not left its host in time; a replica's unfinished minibatches are dealt again."""
        if self._guest:
            self.failure = Interrupted(
                "its unfinished work took longer than --leave-within: ended at once, and what this replica held is "
                "dealt to others"
            )
            return []
        answer: list[Effect] = []
        why = f"host {life.host} is leaving, and it did not finish in time"
        if roles.is_replica(life.role) and not life.left:
            lead = roles.lead_of(life.role)
            self._leaves(lead)
            answer = self._tell_of(Died(lead, why, life.incarnation, left=True))
        return [*answer, *self._kill(life, why)]
