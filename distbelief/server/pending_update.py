"""An update that a shard has begun, what its standby and replicas are told of it, and who waits for one."""

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
    """One update, with the held pushes that are in it."""

    due: PlannedUpdate
    factor: float
    """Factor of the learning rate."""
    pushes: list[tuple[Key, pushing.Push]]
    staleness: tuple[int, ...]
    """Staleness of each push."""

    def has(self, key: Key) -> bool:
        """Return whether a push is in it."""
        return any(key == known for known, _ in self.pushes)

    def mirrored(self, mirror: Mirror, held: Slice, floor: int, norms: Squares) -> list[Effect]:
        """Have the standby make it too."""
        # Pushes that were gathered at once are at the standby, which needs to know only when to step. Held ones are
        # not: it gets their sum, one vector for all of them, and whose they are.
        if not self.pushes:
            return mirror.tell(step=(self.due.samples, self.factor, self.due.weight))
        if mirror.place is None:
            return []
        keys = tuple(push_taken(key.who, push) for key, push in self.pushes)
        return mirror.copy(
            CopyUse.SUM, held.sum(), keys, self.staleness, self.due.samples, self.factor, self.due.weight, floor, norms
        )

    def acknowledged(self, version: Version) -> list[Effect]:
        """Acknowledge the pushes that are in it."""
        return [acknowledgement(key.who, push, version) for key, push in self.pushes]


def mean_rate(pushes: Sequence[pushing.Push]) -> float:
    """Return the mean of the learning-rate factors of pushes, weighted by their samples."""
    if all(push.rate == 1.0 for push in pushes):
        return 1.0
    samples = sum(push.samples for push in pushes)
    return sum(push.rate * push.samples for push in pushes) / samples if samples else pushes[0].rate


def acknowledgement(who: str, push: pushing.Push, version: Version, dropped: bool = False) -> Send:
    """Make the acknowledgement of a push."""
    return Send(who, pushing.Pushed(push.slot, push.clock, version, dropped, push.incarnation))


def push_taken(who: str, push: pushing.Push) -> PushTaken:
    """Return a push as a ledger notes it."""
    return PushTaken(who, push.partition, push.incarnation, push.clock)


def waiting(
    policy: Policy, fetches: Mapping[tuple[str, int, int], pushing.Fetch], pushes: Iterable[Key]
) -> dict[str, str]:
    """Say for each replica whose push or fetch is held why it waits."""
    slowest = f": waits for {roles.named(policy.slowest())}" if policy.slowest() else ""
    reasons = {}
    for (who, _, _), event in fetches.items():
        # where the policy would answer, only the standby can be what the fetch waits for
        verdict = policy.fetch(who, event.tick)
        reasons[who] = (
            "the standby has not confirmed the latest round"
            if verdict.action is Action.ANSWER
            else verdict.reason + slowest
        )
    return reasons | {key.who: policy.why(key) + slowest for key in pushes}


def standing(
    ledger: Iterable[PushTaken], latest: Mapping[str, tuple[int, int]], waits: Mapping[str, str]
) -> dict[str, dict[str, object]]:
    """Return what is applied of each replica, and why it waits."""
    rows: dict[str, dict[str, object]] = {push.who: {"clock": push.clock} for push in ledger}
    for role, (version, staleness) in latest.items():
        rows[role] |= {"version": version, "staleness": staleness}
    for role, reason in waits.items():
        rows.setdefault(role, {})["waits_for"] = reason
    return rows
