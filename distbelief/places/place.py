"""A place, which starts and ends lives of roles; the events and effects of its supervisor; and their limits."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

import msgspec

from distbelief.core import effects, records
from distbelief.errors import DistbeliefError, UsageError
from distbelief.places.messages import ChannelMessage


class Ended(msgspec.Struct, frozen=True):
    """Event: a life of a role has ended."""

    role: str
    incarnation: int
    how: str = ""
    """Description of the end; "" if it is not reported when the job fails."""
    killed: bool = False
    """True if a signal ended it, rather than an error of its own."""
    done: bool = False
    """True if it had finished its part."""
    resumable: bool = True
    """True if another life can follow here. False if a coordinator's journal is broken, or no host has room."""


class Said(msgspec.Struct, frozen=True):
    """Event: a role has sent a message to its supervisor, or has recorded something."""

    role: str
    incarnation: int
    what: ChannelMessage | records.Record


class Moved(msgspec.Struct, frozen=True):
    """Event: a standby has taken over its shard and its name; the standby's own name is free."""

    standby: str


class Tick(msgspec.Struct, frozen=True):
    """Event: time has passed."""

    stopped: Mapping[str, int] = {}
    """Roles whose processes are stopped by a signal, with their process ids."""
    busy: Set[str] = frozenset()
    """Roles whose processes compute, where they run a user's script."""


def check_leave_within(seconds: float, without: str) -> None:
    """Refuse an impossible value of `--leave-within`; `without` is the effect of leaving the option off."""
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"--leave-within {seconds:g}: is a number of seconds, 0 or more; leave it off to {without}")


class Interruption(msgspec.Struct, frozen=True):
    """Event: the user wants the job to end, or a host is to leave it."""

    why: str
    host: str = ""
    """Host that got the request; "" for this one. A launcher's request to all hosts counts once."""
    lives: tuple[tuple[str, int], ...] = ()
    """Roles and incarnations on that host."""
    within: float = 0.0
    """Seconds in which the host may leave while the job continues; 0 if it may not leave."""
    replaceable: bool = False
    """True if another host could hold its shards."""


class Unable(msgspec.Struct, frozen=True):
    """Event: the place cannot go on."""

    error: DistbeliefError


Event = Ended | Said | Moved | Tick | Interruption | Unable


class Start(msgspec.Struct, frozen=True):
    """Effect: start a life of a role."""

    role: str
    incarnation: int


class Kill(msgspec.Struct, frozen=True):
    """Effect: end a life of a role at once."""

    role: str
    incarnation: int


class Vacate(msgspec.Struct, frozen=True):
    """Effect: start no more lives on a host, and release it once none is left; for places with several hosts."""

    host: str


class Tell(msgspec.Struct, frozen=True):
    """Effect: send a message to the latest life of a role."""

    role: str
    word: ChannelMessage


class TickLater(msgspec.Struct, frozen=True):
    """Effect: send the supervisor a `Tick` after some seconds."""

    seconds: float


Effect = Start | Kill | Vacate | Tell | TickLater | effects.WriteRecord


class Deadlines(msgspec.Struct, frozen=True):
    """Time limits of a supervisor, and its pause before a restart, in seconds."""

    ending: float = 30.0
    """Limit for a replica to leave, for a process to end after the job, or for a stopped one (SIGSTOP) to continue."""
    closing: float = 600.0
    """Limit for an interrupted job to write its checkpoint."""
    silence: float = 20.0
    """Limit without any message, after which the supervisor reports what the job waits for."""
    pause: float = 0.0
    """Pause between the end of one life and the start of the next."""


NEVER = Deadlines(float("inf"), float("inf"), float("inf"))
"""Deadlines of a place where no process can hang."""


class Place(Protocol):
    """Place that starts and ends lives of roles. Its supervisor gets one `Ended` for each life, however it ended."""

    def start(self, role: str, incarnation: int) -> None:
        """Start a life of a role; if that fails, the supervisor gets `Unable`."""

    def end(self, role: str, incarnation: int) -> None:
        """End a life of a role at once; do nothing if it has ended already."""

    def tell(self, role: str, word: ChannelMessage) -> None:
        """Send a message to the latest life of a role; do nothing if it has ended."""


def carry_out(place: Place, effect: Effect) -> None:
    """Let a place carry out an effect of its supervisor."""
    match effect:
        case Start():
            place.start(effect.role, effect.incarnation)
        case Kill():
            place.end(effect.role, effect.incarnation)
        case Tell():
            place.tell(effect.role, effect.word)
