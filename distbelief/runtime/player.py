"""Players of roles: a machine or a story, with whoever computes and keeps checkpoints for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import torch

from distbelief.core import events
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
from distbelief.runtime.step_times import StepTimes
from distbelief.schedules.pipeline import Action
from distbelief.server.shard import Shard
from distbelief.tasks.flat import FlatModule
from distbelief.transport.base import Arena, Endpoint, NetworkEndpoint

INTERRUPTS = (grouping.Halt, membership.Stop, membership.Farewell, events.Lost)
"""Events that interrupt a reduction, which need not go on then."""


Answer = Callable[[Computed | Sequence[Action] | None], None]
"""Takes what was computed; of a user's own loop also the actions that its split model has it play, and None where it
is left.
"""
Compute = Callable[[Batch, Answer], Computed | None]
BecomeRole = Callable[[str, int, Shard], None]
"""Has a role played, by its name and its incarnation, by the machine that takes its place."""


def cannot(what: str) -> Callable[..., NoReturn]:
    """Make a function for what a worker is never asked to do: to ask is an error of the caller."""

    def refuse(*_: object) -> NoReturn:
        raise LocalProtocolError(f"this worker cannot {what}")

    return refuse


@dataclass(frozen=True, slots=True)
class Worker:
    """Functions that compute for a story; those that are left out refuse.

    Another that does one of these otherwise is `dataclasses.replace(worker, compute=...)`.
    """

    attach: Callable[[Plan, Arena], None] = lambda *_: None
    """Takes the vectors that were made for it."""
    compute: Compute = cannot("compute")
    """The gradient of a minibatch; None where the answer is called with it later."""
    measure: Callable[[], Measured] = cannot("measure")
    """The current parameters on the test set."""
    form: Callable[[Assemble, Told], bool] = cannot("reduce")
    """Takes its place in a group; False where that cannot be done, or as soon as it is told something."""
    reduce: Callable[[], bool | None] = cannot("reduce")
    """Goes on adding up the gradients of a round, for a moment: True when it is done, False where it cannot be, None
    where others are waited for.
    """
    update: Callable[[int, Callable[[bool], None]], bool | None] = cannot("update")
    """Makes an update, of so many samples, of the parameters that it shares with others; None where the answer is
    called later.
    """
    work: Callable[[float, bool, Callable[[bool], None]], bool | None] = lambda *_: True
    """Lets the time of a share of a step pass: True at once where it is the wall's, as the work itself takes it; None
    where the answer is called later.
    """


class Shown(Protocol):
    """Player of a role, as far as a status shows it."""

    def waits(self) -> str:
        """Say in one sentence what it waits for; "" where for nothing."""
        ...

    def standing(self) -> dict[str, object]:
        """Its counts."""
        ...


class HasStory(Shown, Protocol):
    """Player with a story."""

    def story(self) -> Story:
        """Its effects, one by one."""
        ...


class PlayedRole(NamedTuple):
    """Player of a replica or an evaluator, and its worker."""

    player: HasStory
    worker: Worker


class ScriptedLoop(NamedTuple):
    """A user's own loop, as it takes part."""

    flat: FlatModule
    """Its model; where it is split, what this process has of that."""
    part: ScriptedPart | None
    """This process's part of each step, where the model is split."""
    samples: int
    """Samples of its data."""
    computes: Callable[[float], Compute]
    """Has the loop compute, clipped to a norm."""
    request: LoopRequest


class Store(Protocol):
    """Store of checkpoints."""

    def save_part(self, number: int, part: str, arrays: dict[str, torch.Tensor], facts: Json) -> object:
        """Write one shard's part."""

    def commit(self, number: int, plan: Plan, position: Position, samples: int, script: bool = False) -> object:
        """Make a checkpoint the newest, with what a script keeps where there is such a part."""

    def discard(self, number: int) -> None:
        """Clear away what was made of a checkpoint."""

    def load_part(self, checkpoint: str, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
        """Read one shard's part, cut to a plan."""
        ...


class Player:
    """A role that this driver plays: a machine, or a story with what it waits for.

    Args:
        role: that is played.
        endpoint: of it.
        ready: the driver's, of stories that go on.
    """

    def __init__(self, role: str, endpoint: Endpoint, ready: deque[Player | None]) -> None:
        self.role, self.endpoint, self._ready = role, endpoint, ready
        self.inbox: deque[Arrival] = deque()
        self.ended = False
        """True once it is played no more."""
        self.waits = False
        self.since: float | None = None
        self.stalled: float | None = None
        self.looks = 0.0
        """When its links are looked at next, where it does not wait."""
        self.machine: Machine | None = None
        self.story: Story | None = None
        self.worker: Worker | None = None
        self.times = StepTimes(role, lambda: 0.0, None)
        self.store: Store | None = None
        self.become: BecomeRole = stay
        self.send = endpoint.send
        self.caller: Caller | None = None
        self.host: LastingHost | None = None
        self.past: Iterator[JournalEntry] | None = None
        """Entries of its journal that are left, while it goes through that."""
        self.known = 0
        """Records that it had made in its past, and that are written down."""

    def queue(self, arrival: Arrival) -> None:
        """Keep what arrives for a story, which is ready to go on where it has waited for that."""
        self.inbox.append(arrival)
        if self.waits:
            self.waits = False
            self._ready.append(self)

    @property
    def waiting_since(self) -> float | None:
        """When its story began to wait; None where it does not."""
        if self.stalled is not None:
            return self.stalled
        return self.since if self.waits else None

    def asking(self, now: Callable[[], float]) -> Callable[[], bool]:
        """Return the question that a waiting worker asks again and again. From the first time on the story counts as
        waiting.
        """

        def told() -> bool:
            if self.stalled is None:
                self.stalled = now()
            return self.told()

        return told

    def told(self) -> bool:
        """Return whether a busy story has been told something that it must know now."""
        if isinstance(self.endpoint, NetworkEndpoint):
            self.endpoint.poll(0)
        return self._interrupted()

    def _interrupted(self) -> bool:
        return any(isinstance(arrival.event, INTERRUPTS) for arrival in self.inbox)

    def form(self, group: Assemble, now: Callable[[], float]) -> bool:
        """Have the worker take its place in a group; False also where the story was told something that it must know
        now.
        """
        assert self.worker is not None
        formed = self.worker.form(group, self.asking(now))
        self.stalled = None
        return formed

    def reduce(self, glance: Callable[[], None], now: Callable[[], float]) -> bool | None:
        """Have the worker go on with a reduction for a moment.

        Returns:
            The answer to the story, False also where it was told something that it must know now; None where it waits.
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
    """Refuse to become another role."""
    raise LocalProtocolError(f"nobody here knows how to become {role}")
