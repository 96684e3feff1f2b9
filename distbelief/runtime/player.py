"""Who is played: a machine or a story, with whoever computes and keeps checkpoints for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from distbelief.core import events
from distbelief.core.conversations import grouping, membership
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.effects import Arrival, Batch, Computed, Machine, Measured, Story
from distbelief.core.settings import Plan
from distbelief.errors import LocalProtocolError
from distbelief.record.journal import Entry
from distbelief.runtime.lasting import Caller, Host
from distbelief.transport.base import Arena, Endpoint, NetworkEndpoint

INTERRUPTS = (grouping.Halt, membership.Stop, events.Lost)
"""What a story is told in the middle of a reduction that need not go on then."""


class Worker(Protocol):
    """Who computes for a story."""

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Take the vectors that were made for it."""

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch; None where `answer` will be called with it later."""

    def measure(self) -> Measured:
        """The current parameters on the test set."""
        ...


@runtime_checkable
class Reducer(Protocol):
    """A worker that adds up the gradients of a group by itself."""

    def form(self, group: Assemble, told: Callable[[], bool]) -> bool:
        """Take one's place in a group; False where that cannot be done, or as soon as `told` says that something has
        arrived.
        """
        ...

    def reduce(self) -> bool | None:
        """Go on adding up the gradients of a round, for a moment.

        Returns:
            True when it is done, False where it cannot be, None where others are waited for.
        """
        ...


@runtime_checkable
class Updater(Protocol):
    """A worker that updates parameters which it shares with others by itself."""

    def begin(self, arrays: dict[str, Any] | None, facts: dict[str, Any]) -> None:
        """Fill what is shared."""

    def update(self, samples: int, told: Callable[[], bool], answer: Callable[[bool], None]) -> bool | None:
        """Make an update; False as soon as `told`, which who waits asks again and again, says that something has
        arrived; None where `answer` will be called later.
        """
        ...


class Store(Protocol):
    """Where checkpoints are kept."""

    def save_part(self, number: int, part: str, arrays: dict[str, Any], facts: dict[str, Any]) -> object:
        """Write one shard's part."""

    def commit(self, number: int, plan: Plan, position: Any, samples: int) -> object:
        """Make a checkpoint the newest."""

    def discard(self, number: int) -> None:
        """Clear away what was made of a checkpoint."""

    def load_part(self, checkpoint: str, plan: Plan, shard: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read one shard's part, cut to a plan."""
        ...


class Player:
    """A role that this driver plays: a machine, or a story with what it waits for."""

    def __init__(self, role: str, endpoint: Endpoint) -> None:
        self.role, self.endpoint = role, endpoint
        self.inbox: deque[Arrival] = deque()
        self.waits = False
        self.since: float | None = None
        self.stalled: float | None = None
        self.machine: Machine | None = None
        self.story: Story | None = None
        self.worker: Worker | None = None
        self.store: Store | None = None
        self.become: Callable[[str, int, Any], None] = stay
        self.send = endpoint.send
        self.caller: Caller | None = None
        self.host: Host | None = None
        self.past: Iterator[Entry] | None = None
        """What is left of its journal, while it goes through that."""
        self.known = 0
        """Records that it had made in its past, and that are written down."""

    @property
    def waiting_since(self) -> float | None:
        """When its story began to wait; None where it does not."""
        if self.stalled is not None:
            return self.stalled
        return self.since if self.waits else None

    def asking(self, now: Callable[[], float]) -> Callable[[], bool]:
        """What a worker that waits asks again and again; from the first time on the story waits, for whoever looks."""

        def told() -> bool:
            if self.stalled is None:
                self.stalled = now()
            return self.told()

        return told

    def told(self) -> bool:
        """Whether a story that is busy has been told something that it must know now."""
        if isinstance(self.endpoint, NetworkEndpoint):
            self.endpoint.poll(0)
        return self._interrupted()

    def _interrupted(self) -> bool:
        return any(isinstance(arrival.event, INTERRUPTS) for arrival in self.inbox)

    def form(self, group: Assemble, now: Callable[[], float]) -> bool:
        """Have the worker take its place in a group; False also where the story was told something that it must know
        now.
        """
        assert isinstance(self.worker, Reducer)
        formed = self.worker.form(group, self.asking(now))
        self.stalled = None
        return formed

    def reduce(self, glance: Callable[[], None], now: Callable[[], float]) -> bool | None:
        """Have the worker go on with a reduction for a moment.

        Returns:
            The answer to the story, False also where it was told something that it must know now; None where it waits.
        """
        assert isinstance(self.worker, Reducer)
        done = self.worker.reduce()
        if done is None:
            if self.stalled is None:
                self.stalled = now()
            glance()
            if not self._interrupted():
                return None
        self.stalled = None
        return bool(done)


def stay(role: str, _incarnation: int, _machine: Any) -> None:
    """Of a role that becomes no other."""
    raise LocalProtocolError(f"nobody here knows how to become {role}")
