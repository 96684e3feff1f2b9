"""Who may say what: the roles from which a machine takes each kind of event."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.core import attendance, events, messages, operations, roles, upkeep
from distbelief.errors import RemoteProtocolError

SPEAKERS: Mapping[type, tuple[str, ...]] = {
    messages.Join: ("replica", roles.EVALUATOR),
    messages.Rejoin: ("replica", roles.EVALUATOR),
    messages.Held: ("replica",),
    messages.Ready: ("replica",),
    messages.Progress: ("replica",),
    messages.Leave: ("replica",),
    messages.Evaluated: (roles.EVALUATOR,),
    messages.Initialise: ("replica",),
    messages.Push: ("replica",),
    messages.Fetch: ("replica", roles.EVALUATOR),
    attendance.Attend: ("replica",),
    attendance.SitOut: ("replica",),
    attendance.Return: ("replica",),
    attendance.Ruling: ("shard",),
    attendance.Gone: (roles.COORDINATOR,),
    upkeep.Here: ("shard",),
    upkeep.Restored: ("shard",),
    upkeep.SnapshotDone: ("shard",),
    upkeep.Description: ("shard",),
    upkeep.Restore: (roles.COORDINATOR,),
    upkeep.Snapshot: (roles.COORDINATOR,),
    upkeep.Describe: (roles.COORDINATOR,),
    operations.Operate: (roles.COORDINATOR,),
    operations.Operated: ("shard",),
    operations.Contribute: ("replica",),
    operations.Done: ("replica",),
    messages.Stop: (roles.COORDINATOR, roles.SUPERVISOR),
    events.Saved: (roles.STORE,),
    events.Loaded: (roles.STORE,),
    events.Woke: (roles.CLOCK,),
    events.Lost: ("replica", "shard", roles.COORDINATOR, roles.EVALUATOR),
}
"""Each event that a machine takes, to the kinds of role that may be its sender."""


class Doorkeeper:
    """Remembers who was found to have a say in what."""

    def __init__(self) -> None:
        self._known: set[tuple[str, type]] = set()

    def check(self, sender: str, event: type) -> None:
        """As the function `check`, but once for each."""
        if (sender, event) not in self._known:
            check(sender, event)
            self._known.add((sender, event))


def check(sender: str, event: type) -> None:
    """Refuse an event from a role that has no say in it.

    Raises:
        RemoteProtocolError: naming both.
    """
    if roles.kind(sender) not in SPEAKERS.get(event, ()):
        raise RemoteProtocolError(f"{sender} has no say in {event.__name__}; it is for {', '.join(SPEAKERS.get(event, ('nobody',)))}")
