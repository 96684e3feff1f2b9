"""Messages between a supervisor and the processes of its job."""

from __future__ import annotations

import msgspec

from distbelief import errors
from distbelief.core import records, roles
from distbelief.core.conversations import membership
from distbelief.core.events import Event, Lost
from distbelief.core.records import Json
from distbelief.errors import DistbeliefError, JobFailed


class ChannelMessage(msgspec.Struct, frozen=True, tag=True):
    """Anything that is said on a channel."""


class Listening(ChannelMessage, frozen=True, tag=True):
    """The coordinator listens at an address: it says so, and all others are told."""

    address: str


class Noted(ChannelMessage, frozen=True, tag=True):
    """A role recorded something at a moment of the machine's monotonic clock."""

    moment: float
    role: str
    record: records.AnyRecord


class Failed(ChannelMessage, frozen=True, tag=True):
    """A role failed with an error of `distbelief.errors`, or another (`kind` "")."""

    kind: str
    text: str
    trace: str = ""
    """The traceback of what the user's code raised."""
    done: bool = False
    """True if its part of the job was done before."""
    host: str = ""
    """Host where it was, of several; its place says it."""

    @property
    def told(self) -> str:
        """Return what people are told."""
        return f"host {self.host}: {self.text}" if self.host else self.text

    @property
    def error(self) -> DistbeliefError:
        """Return the error that the role says it has failed with."""
        error: DistbeliefError = getattr(errors, self.kind, JobFailed)(self.told)
        if self.trace:
            error.add_note(self.trace)
        return error


class Over(ChannelMessage, frozen=True, tag=True):
    """The process has played its role to the end: without this word it died, whatever its status."""


class Interrupt(ChannelMessage, frozen=True, tag=True):
    """End the job in peace: the person who runs it wants it to."""

    reason: str


class Died(ChannelMessage, frozen=True, tag=True):
    """The process of a role has ended: this life of it."""

    role: str
    reason: str
    incarnation: int
    left: bool = False
    """True if it had played its role to the end."""

    @property
    def event(self) -> Event:
        """Return what the coordinator is told."""
        leaves = self.left and roles.is_replica(self.role)
        return membership.Leave(for_good=True) if leaves else Lost(self.reason, self.incarnation)


class Explain(ChannelMessage, frozen=True, tag=True):
    """Note what the job waits for."""


class Ask(ChannelMessage, frozen=True, tag=True):
    """Say how you stand."""


class Standing(ChannelMessage, frozen=True, tag=True):
    """State of a role: what it does, what it waits for and for how many seconds by now, and its counts.

    `facts` may hold "of": what this role knows of others, by role.
    """

    role: str
    state: str
    waits_for: str
    waited: float | None
    facts: Json


AnyChannelMessage = Listening | Noted | Failed | Over | Interrupt | Died | Explain | Ask | Standing
