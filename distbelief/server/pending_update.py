"""An update that a shard has begun: what is in it, and what its standby and its replicas are told of it; and who waits
for one, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distbelief.core import roles
from distbelief.core.consistency import Action, Key, PlannedUpdate, Policy
from distbelief.core.conversations import pushing
from distbelief.core.conversations.agreement import Squares
from distbelief.core.conversations.mirroring import CopyUse
from distbelief.core.effects import Effect, Send
from distbelief.core.ledger import PushTaken
from distbelief.core.messages import Version
from distbelief.server.mirror import Mirror
from distbelief.server.slice import Slice


class PendingUpdate(NamedTuple):
    """One update, with its factor of the learning rate, the held pushes that are in it, and how stale each is."""

    due: PlannedUpdate
    factor: float
    taken: list[tuple[Key, pushing.Push]]
    stale: tuple[int, ...]

    def has(self, key: Key) -> bool:
        """Return whether a push is in it."""
        return any(key == taken for taken, _ in self.taken)

    def mirrored(self, mirror: Mirror, held: Slice, floor: int, norms: Squares) -> list[Effect]:
        """Have the standby make it too, before it is made here."""
        if not self.taken:
            return mirror.tell(step=(self.due.samples, self.factor, self.due.weight))
        if mirror.place is None:
            return []
        keys = tuple(taken(key.who, push) for key, push in self.taken)
        return mirror.copy(
            CopyUse.SUM, held.sum(), keys, self.stale, self.due.samples, self.factor, self.due.weight, floor, norms
        )

    def acknowledged(self, version: Version) -> list[Effect]:
        """Tell those whose pushes are in it."""
        return [pushed(key.who, push, version) for key, push in self.taken]


def mean_rate(pushes: Sequence[pushing.Push]) -> float:
    """The factor of the learning rate that pushes bring, each weighted by its samples."""
    if all(push.rate == 1.0 for push in pushes):
        return 1.0
    samples = sum(push.samples for push in pushes)
    return sum(push.rate * push.samples for push in pushes) / samples if samples else pushes[0].rate


def pushed(who: str, push: pushing.Push, version: Version, dropped: bool = False) -> Send:
    """The acknowledgement of a push."""
    return Send(who, pushing.Pushed(push.slot, push.clock, version, dropped, push.incarnation))


def taken(who: str, push: pushing.Push) -> PushTaken:
    """Make the standby's notice of a push that was taken."""
    return PushTaken(who, push.partition, push.incarnation, push.clock)


def waiting(
    policy: Policy, fetches: Mapping[tuple[str, int, int], pushing.Fetch], pushes: Iterable[Key]
) -> dict[str, str]:
    """Why each replica waits whose push or fetch is held, in a sentence."""
    slowest = f": waits for {roles.named(policy.slowest())}" if policy.slowest() else ""
    held = {}
    for (who, _, _), event in fetches.items():
        # what it would answer waits for the standby, which is to go on from there
        verdict = policy.fetch(who, event.tick)
        held[who] = (
            "the standby has not confirmed the latest round"
            if verdict.action is Action.ANSWER
            else verdict.reason + slowest
        )
    return held | {key.who: policy.why(key) + slowest for key in pushes}


def standing(
    ledger: Iterable[PushTaken], latest: Mapping[str, tuple[int, int]], waits: Mapping[str, str]
) -> dict[str, dict[str, object]]:
    """Return what is applied of each replica, and why it waits."""
    of: dict[str, dict[str, object]] = {one.who: {"clock": one.clock} for one in ledger}
    for role, (version, staleness) in latest.items():
        of[role] |= {"version": version, "staleness": staleness}
    for role, reason in waits.items():
        of.setdefault(role, {})["waits_for"] = reason
    return of
