"""Who may say what: the roles from which a machine takes each kind of event."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.core import assembly, attendance, events, messages, mirroring, operations, roles, upkeep
from distbelief.errors import RemoteProtocolError

SPEAKERS: Mapping[type, tuple[str, ...]] = {
    messages.Join: ("replica", roles.EVALUATOR),
    messages.Rejoin: ("replica", roles.EVALUATOR),
    messages.Anew: ("replica",),
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
    attendance.Follow: ("shard",),
    attendance.Norms: ("shard",),
    attendance.Ruler: (roles.COORDINATOR,),
    attendance.Gone: (roles.COORDINATOR,),
    mirroring.Stand: (roles.COORDINATOR,),
    mirroring.Succeed: (roles.COORDINATOR,),
    mirroring.Mirror: (roles.COORDINATOR,),
    mirroring.Alone: (roles.COORDINATOR,),
    mirroring.Stands: ("standby",),
    mirroring.Confirmed: ("standby",),
    mirroring.Mirrored: ("shard",),
    mirroring.Bereft: ("shard",),
    mirroring.StatePart: ("shard",),
    mirroring.Whole: ("shard",),
    mirroring.Copied: ("shard",),
    mirroring.Told: ("shard",),
    mirroring.Did: ("shard",),
    mirroring.Took: ("shard",),
    upkeep.Here: ("shard", "standby"),
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
    events.Lent: (roles.CARRIER,),
    events.Lost: ("replica", "shard", "standby", roles.COORDINATOR, roles.EVALUATOR),
}
"""Each event that a machine takes, to the kinds of role that may be its sender."""


ASSEMBLY: Mapping[type, tuple[str, ...]] = {
    **dict.fromkeys((assembly.Enter, assembly.Halted, assembly.Rounds, assembly.Broken, assembly.Kept), ("replica",)),
    messages.Evaluated: ("replica",),
    messages.Leave: ("replica",),
    messages.Stop: (roles.SUPERVISOR,),
    events.Saved: (roles.STORE,),
    events.Woke: (roles.CLOCK,),
    events.Lost: ("replica",),
}
"""The same where replicas reduce among themselves."""


MAPPED: Mapping[type, tuple[str, ...]] = {
    **SPEAKERS,
    **dict.fromkeys((upkeep.Restored, upkeep.SnapshotDone, upkeep.Description), ("replica",)),
}
"""The same where replicas do for the mapping what a shard does for its slice."""


class Doorkeeper:
    """Remembers who was found to have a say in what, by one of these tables."""

    def __init__(self, speakers: Mapping[type, tuple[str, ...]] = SPEAKERS) -> None:
        self._speakers = speakers
        self._known: set[tuple[str, type]] = set()

    def check(self, sender: str, event: type) -> None:
        """As the function `check`, but once for each."""
        if (sender, event) not in self._known:
            check(sender, event, self._speakers)
            self._known.add((sender, event))


def check(sender: str, event: type, speakers: Mapping[type, tuple[str, ...]] = SPEAKERS) -> None:
    """Refuse an event from a role that has no say in it.

    Raises:
        RemoteProtocolError: naming both.
    """
    if roles.kind(sender) not in speakers.get(event, ()):
        raise RemoteProtocolError(f"{sender} has no say in {event.__name__}; it is for {', '.join(speakers.get(event, ('nobody',)))}")
