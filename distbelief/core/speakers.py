"""Who may say what: the roles from which a machine takes each kind of event."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.core import attendance, events, messages, roles
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
    messages.Here: ("shard",),
    messages.Restored: ("shard",),
    messages.SnapshotDone: ("shard",),
    messages.Description: ("shard",),
    messages.Restore: (roles.COORDINATOR,),
    messages.Snapshot: (roles.COORDINATOR,),
    messages.Describe: (roles.COORDINATOR,),
    messages.Stop: (roles.COORDINATOR, roles.SUPERVISOR),
    events.Saved: (roles.STORE,),
    events.Loaded: (roles.STORE,),
    events.Woke: (roles.CLOCK,),
    events.Lost: ("replica", "shard", roles.COORDINATOR, roles.EVALUATOR),
}
"""Each event that a machine takes, to the kinds of role that may be its sender."""


def check(sender: str, event: type) -> None:
    """Refuse an event from a role that has no say in it.

    Raises:
        RemoteProtocolError: naming both.
    """
    if roles.kind(sender) not in SPEAKERS.get(event, ()):
        raise RemoteProtocolError(f"{sender} has no say in {event.__name__}; it is for {', '.join(SPEAKERS.get(event, ('nobody',)))}")
