"""A place, where lives of roles are started and ended; what it and its supervisor tell each other; and their waits."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

import msgspec

from distbelief.core import effects, records
from distbelief.errors import DistbeliefError, UsageError
from distbelief.places.messages import ChannelMessage


class Ended(msgspec.Struct, frozen=True):
    """Event: a life of a role is there no more."""

    role: str
    incarnation: int
    how: str = ""
    """End in words; "" where that is not to be told when the job fails."""
    killed: bool = False
    """True if a signal ended it, and no error of its own."""
    done: bool = False
    """True if it had played its role to the end."""
    resumable: bool = True
    """True if a next life could go on here: not where a coordinator's journal is broken, or no host has room."""


class Said(msgspec.Struct, frozen=True):
    """Event: a role has said a word to whoever started it, or has recorded something."""

    role: str
    incarnation: int
    what: ChannelMessage | records.Record


class Moved(msgspec.Struct, frozen=True):
    """Event: a standby that was to succeed its shard plays it now, and goes by the shard's name; its own is free."""

    standby: str


class Tick(msgspec.Struct, frozen=True):
    """Event: time has passed."""

    stopped: Mapping[str, int] = {}
    """The roles whose processes are stopped by a signal, with the ids of these."""
    busy: Set[str] = frozenset()
    """The roles whose processes compute, where they run a user's script."""


def check_leave_within(seconds: float, without: str) -> None:
    """Refuse an impossible time to leave in.

    Args:
        seconds: what `--leave-within` says.
        without: what leaving it off does.

    Raises:
        UsageError: naming the value.
    """
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"--leave-within {seconds:g}: is a number of seconds, 0 or more; leave it off to {without}")


class Interruption(msgspec.Struct, frozen=True):
    """Event: the person who runs the job wants it to end, or a host of it to go."""

    why: str
    host: str = ""
    """Host where he said so; "" for here. A launcher tells all hosts at once, which is once."""
    lives: tuple[tuple[str, int], ...] = ()
    """Those of that host."""
    within: float = 0.0
    """Seconds in which the host may leave a job that goes on; 0 where it may not."""
    replaceable: bool = False
    """True if another host could hold its shards."""


class Unable(msgspec.Struct, frozen=True):
    """Event: the place cannot go on."""

    error: DistbeliefError


Event = Ended | Said | Moved | Tick | Interruption | Unable


class Start(msgspec.Struct, frozen=True):
    """Effect: begin a life of a role."""

    role: str
    incarnation: int


class Kill(msgspec.Struct, frozen=True):
    """Effect: end a life of a role at once."""

    role: str
    incarnation: int


class Vacate(msgspec.Struct, frozen=True):
    """Effect: begin no more lives on a host, and let it go as soon as none is there; of places with several."""

    host: str


class Tell(msgspec.Struct, frozen=True):
    """Effect: say a word to the latest life of a role."""

    role: str
    word: ChannelMessage


class TickLater(msgspec.Struct, frozen=True):
    """Effect: tell the supervisor `Tick` in so many seconds."""

    seconds: float


Effect = Start | Kill | Vacate | Tell | TickLater | effects.WriteRecord


class Deadlines(msgspec.Struct, frozen=True):
    """Limits of a supervisor's patience, and its pause, in seconds."""

    ending: float = 30.0
    """Time for a replica to leave, for a process to end after the job, and for a stopped one (SIGSTOP) to go on."""
    closing: float = 600.0
    """For an interrupted job to write its checkpoint."""
    silence: float = 20.0
    """For a word of anybody, before it says for whom it waits."""
    pause: float = 0.0
    """From the end of a life to the beginning of the next."""


NEVER = Deadlines(float("inf"), float("inf"), float("inf"))
"""Deadlines of a place where nobody can hang."""


class Place(Protocol):
    """Starts lives of roles and ends them. Its supervisor is told `Ended` once for each life, however that ended."""

    def start(self, role: str, incarnation: int) -> None:
        """Begin a life of a role; where that cannot be, the supervisor is told `Unable`."""
        ...

    def end(self, role: str, incarnation: int) -> None:
        """End a life of a role at once; nothing, where it has ended already."""
        ...

    def tell(self, role: str, word: ChannelMessage) -> None:
        """Say a word to the latest life of a role; nothing, where that has ended."""
        ...


def carry_out(place: Place, effect: Effect) -> None:
    """Have a place do what its supervisor asks of it, whatever the place is."""
    match effect:
        case Start():
            place.start(effect.role, effect.incarnation)
        case Kill():
            place.end(effect.role, effect.incarnation)
        case Tell():
            place.tell(effect.role, effect.word)
