"""Players of roles: a machine or a client, with its worker, its store, and the times of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import torch

from distbelief.core import events, records
from distbelief.core.conversations import grouping, membership
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.effects import Arrival, Batch, Computed, Machine, Measured, Story
from distbelief.core.portions import Position
from distbelief.core.records import Json
from distbelief.core.settings import Plan
from distbelief.errors import LocalProtocolError
from distbelief.fabric.base import Told
from distbelief.record.journal import JournalEntry
from distbelief.replica.served_replica import LoopRequest
from distbelief.replica.split_compute import ScriptedPart
from distbelief.runtime.lasting import Caller, LastingHost
from distbelief.schedules.pipeline import Action
from distbelief.server.shard import Shard
from distbelief.tasks.flat import FlatModule
from distbelief.transport.base import Arena, Endpoint, NetworkEndpoint

COMPUTE, SHARE, UPDATE, WORK, WAIT, ASIDE = "compute", "share", "update", "work", "wait", "aside"
"""Uses of a replica's time.

In this order: a gradient, a share of a gradient, an update of shared memory, other work for the step, a wait, and work
outside of steps, such as measuring the model.
"""
PARTS = (COMPUTE, SHARE, UPDATE, WORK, WAIT)
ACCOUNT_SECONDS = 2.0
"""Least seconds between two accounts of a role: its times, its bytes, or all that it has applied."""


class StepTimes:
    """Times of one replica, from its first gradient to its last.

    In simulated time a thread may work while the client waits: `worked` returns the seconds of work that were neither
    gradients nor waits. `worked` is None in real time, where such work is the rest. At least `every` seconds are
    between two records.

    >>> moments = iter([0.0, 0.5, 0.75, 1.25, 1.5, 2.0])
    >>> times = StepTimes("replica 0", lambda: next(moments), print)
    >>> times.begin(COMPUTE); times.go_on(Computed(None, 1, 0.5))
    >>> times.begin(WAIT); times.go_on(Arrival("shard 1", None))  # from 0.75 until 1.25
    >>> times.begin(COMPUTE); times.go_on(Computed(None, 1, 0.5))
    StepsTimed(role='replica 0', steps=2, compute=1.0, update=0.0, communicate=0.5, wait=0.5, load=0.0,
               waited={'shard 1': 0.5}, overflows=0, counted=0)
    """

    def __init__(
        self,
        role: str,
        now: Callable[[], float],
        note: Callable[[records.StepsTimed], object],
        worked: Callable[[], float] | None = None,
        every: float = ACCOUNT_SECONDS,
    ) -> None:
        self._role, self._now, self._note, self._worked, self._every = role, now, note, worked, every
        self.doing = ""
        """Present use of the time; "" before the first gradient."""
        self._since = self._told = self._first_worked = self._before = 0.0
        self._spent = dict.fromkeys((*PARTS, ASIDE), 0.0)
        self._waited: dict[str, float] = {}
        self._steps, self._seconds, self._load = 0, 0.0, 0.0
        self._shares = False
        """True once the present step has a share: it is counted then, though a script may answer it later."""
        self._overflows = self._counted = 0
        self._last: dict[str, float] = {}
        """Uses of the time until the last gradient since the last record; none before there is one."""
        self._last_worked = 0.0

    def begin(self, doing: str) -> None:
        """Begin another use of the time."""
        if not self.doing:
            if doing not in (COMPUTE, SHARE):
                return
            self._since = self._told = self._now()
            self._first_worked = self._worked() if self._worked else 0.0
        elif doing != self.doing:
            self._pass(self.doing)
            if self.doing == SHARE:
                self._end()
        if doing == COMPUTE and self._worked:
            self._before = self._worked()
        self.doing = doing

    def share(self, begins: bool) -> None:
        """Note a share of a gradient, and count the step that it begins."""
        self._steps, self._shares = self._steps + begins, True

    def go_on(self, answer: object = None, sender: str = "") -> None:
        """Note that an effect is answered, and that the replica goes on with its work."""
        if not self.doing or self.doing == SHARE:  # one share may yield several effects
            return
        before, self.doing = self.doing, WORK
        elapsed = self._pass(before)
        if type(answer) is Computed:
            self._steps, self._shares = self._steps + (not self._shares), False
            self._overflows, self._counted = self._overflows + answer.overflows, self._counted + answer.counted
            # a gradient that shares its cores takes longer in simulated time than it reports
            slowed = elapsed - (self._worked() - self._before) if self._worked else 0.0
            self._seconds, self._load = self._seconds + max(answer.seconds, slowed), self._load + answer.load
            self._end()
        elif before == WAIT and (sender := sender or (answer.sender if type(answer) is Arrival else "")):
            self._waited[sender] = self._waited.get(sender, 0.0) + elapsed

    def tell(self) -> None:
        """Record the times since the last call up to the last gradient, unless there was none."""
        self._told = self._since
        if not self._last:
            return
        last, update, worked = self._last, self._last[UPDATE], self._last_worked - self._first_worked
        compute = self._seconds + last[SHARE]
        rest = max(0.0, sum(last.values()) - compute - update - self._load)
        communicate = min(rest, max(0.0, worked - update)) if self._worked else max(0.0, rest - last[WAIT])
        spent = compute, update, communicate, rest - communicate, self._load
        timed = records.StepsTimed(self._role, self._steps, *spent, self._waited, self._overflows, self._counted)
        # what came after the last gradient belongs to the next record
        self._spent = {use: seconds - last.get(use, 0.0) for use, seconds in self._spent.items()}
        self._last, self._waited, self._first_worked = {}, {}, self._last_worked
        self._steps, self._seconds, self._load, self._overflows, self._counted = 0, 0.0, 0.0, 0, 0
        self._note(timed)

    def _pass(self, doing: str) -> float:
        """Add the time since the last change to a use; return it."""
        now = self._now()
        if elapsed := now - self._since:  # in simulated time the remainder is mostly 0
            self._since = now
            self._spent[doing] += elapsed
        return elapsed

    def _end(self) -> None:
        """Note the end of a gradient, or of a share of it."""
        self._last = {part: self._spent[part] for part in PARTS}
        self._last_worked = self._worked() if self._worked else 0.0
        if self._since >= self._told + self._every:
            self.tell()


INTERRUPTS = (grouping.Halt, membership.Stop, membership.Farewell, events.Lost)
"""Events after which a reduction need not go on."""


Answer = Callable[[Computed | Sequence[Action] | None], None]
"""Function that takes the result of a computation.

In a script's loop, the result may also be actions of its split model, or None at the end.
"""
Compute = Callable[[Batch, Answer], Computed | None]
BecomeRole = Callable[[str, int, Shard], None]
"""Plays a role by its name and incarnation, with the machine that takes its place."""


def cannot(what: str) -> Callable[..., NoReturn]:
    """Return a function that refuses to do what this worker must never be asked for."""

    def refuse(*_: object) -> NoReturn:
        raise LocalProtocolError(f"this worker cannot {what}")

    return refuse


@dataclass(frozen=True, slots=True)
class Worker:
    """Functions that compute for a client; those that are left out refuse.

    To change one, use `dataclasses.replace(worker, compute=...)`.
    """

    attach: Callable[[Plan, Arena], None] = lambda *_: None
    """Takes the vectors that the endpoint made for it."""
    compute: Compute = cannot("compute")
    """Returns the gradient of a minibatch, or None and calls the answer later."""
    measure: Callable[[], Measured] = cannot("measure")
    """Measures the present parameters on the test set."""
    form: Callable[[Assemble, Told], bool] = cannot("reduce")
    """Joins a group; False if that fails or is interrupted."""
    reduce: Callable[[], bool | None] = cannot("reduce")
    """Adds up a round's gradients for a moment: True if they are done, False if it failed, None if others are late."""
    update: Callable[[int, Callable[[bool], None]], bool | None] = cannot("update")
    """Updates shared parameters with so many samples; returns None if it calls the answer later."""
    work: Callable[[float, bool, Callable[[bool], None]], bool | None] = lambda *_: True
    """Spends the time of a share of a step; in real time the work itself takes it. None if it answers later."""


class Shown(Protocol):
    """A role as a status shows it."""

    def waits(self) -> str:
        """Return what the role waits for, as text; "" for nothing."""
        ...

    def standing(self) -> dict[str, object]:
        """Return its counts."""
        ...


class HasStory(Shown, Protocol):
    """A role that is a client."""

    def story(self) -> Story:
        """Yield its effects one by one."""
        ...


class PlayedRole(NamedTuple):
    """A replica or an evaluator, and its worker."""

    player: HasStory
    worker: Worker


class ScriptedLoop(NamedTuple):
    """A script's loop, as a replica sees it."""

    flat: FlatModule
    """The model, or this process's part of it."""
    part: ScriptedPart | None
    """This process's part of each step, where the model is split."""
    samples: int
    """Samples in its data."""
    computes: Callable[[float], Compute]
    """Returns the loop as a computation, clipped to a norm."""
    request: LoopRequest


class Store(Protocol):
    """A store of checkpoints."""

    def save_part(self, number: int, part: str, arrays: dict[str, torch.Tensor], facts: Json) -> object:
        """Write a shard's part."""

    def commit(self, number: int, plan: Plan, position: Position, samples: int, script: bool = False) -> object:
        """Make a checkpoint the newest; with a script's part if there is one."""

    def discard(self, number: int) -> None:
        """Remove the parts of a checkpoint that was given up."""

    def load_part(self, checkpoint: str, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
        """Read a shard's part, cut by a plan."""
        ...


class Player:
    """A role that the driver plays.

    `ready` is the driver's queue of clients that can go on.
    """

    def __init__(self, role: str, endpoint: Endpoint, ready: deque[Player | None]) -> None:
        self.role, self.endpoint, self._ready = role, endpoint, ready
        self.inbox: deque[Arrival] = deque()
        self.ended = False
        """True once the role has ended."""
        self.waits = False
        self.since: float | None = None
        self.stalled: float | None = None
        self.looks = 0.0
        """Time at which its links are polled next, while it is busy."""
        self.machine: Machine | None = None
        self.story: Story | None = None
        self.worker: Worker | None = None
        self.times = StepTimes(role, lambda: 0.0, bool)
        self.store: Store | None = None
        self.become: BecomeRole = stay
        self.send = endpoint.send
        self.caller: Caller | None = None
        self.host: LastingHost | None = None
        self.past: Iterator[JournalEntry] | None = None
        """Entries of its journal that are left, during a replay."""
        self.known = 0
        """Records of its earlier lives, which are written already."""

    def queue(self, arrival: Arrival) -> None:
        """Keep an arrival for a client; if it waits, it is ready to go on."""
        self.inbox.append(arrival)
        if self.waits:
            self.waits = False
            self._ready.append(self)

    @property
    def waiting_since(self) -> float | None:
        """Time at which its client began to wait; None if it does not wait."""
        if self.stalled is not None:
            return self.stalled
        return self.since if self.waits else None

    def _interrupted(self) -> bool:
        return any(isinstance(arrival.event, INTERRUPTS) for arrival in self.inbox)

    def form(self, group: Assemble, now: Callable[[], float]) -> bool:
        """Have the worker join a group; return False also if that was interrupted."""

        def interrupted() -> bool:  # from its first call on, the client counts as waiting
            if self.stalled is None:
                self.stalled = now()
            if isinstance(self.endpoint, NetworkEndpoint):
                self.endpoint.poll(0)
            return self._interrupted()

        assert self.worker is not None
        formed = self.worker.form(group, interrupted)
        self.stalled = None
        return formed

    def reduce(self, glance: Callable[[], None], now: Callable[[], float]) -> bool | None:
        """Have the worker reduce for a moment; return whether the gradients are added up.

        Return False also where that was interrupted, and None where it goes on.
        """
        assert self.worker is not None
        done = self.worker.reduce()
        if done is None:
            if self.stalled is None:
                self.stalled = now()
            glance()
            if not self._interrupted():
                return None
        self.stalled = None
        return bool(done)


def stay(role: str, _incarnation: int, _machine: object) -> None:
    """Refuse to take another role."""
    raise LocalProtocolError(f"this process cannot become {role}")
