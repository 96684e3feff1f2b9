"""Consistency: what may be stale. A policy decides on each push and fetch of a shard, and gives the reason.

Each shard has a policy of its own. A policy counts ticks: a replica is at tick t once it has made t pushes; one that
joins later begins at the slowest replica's tick. A push of tick t was computed with all that the policy guarantees at
tick t.

- `Policy` (downpour): every push is applied at once, every fetch is answered at once (Dean et al. 2012).
- `SoftsyncPolicy`: every c = floor(members / n) pushes make one update, each weighted by 1/c and by its staleness
  (Zhang et al. 2016). No replica waits: a fast one may be in an update twice, a slow one in none.
- `BoundedPolicy`: pushes are applied at once; a fetch for tick t is answered once every member's pushes of ticks below
  t - s are applied (Ho et al. 2013).
- `RoundRobin` (locking): members' pushes are applied in turn, by the members' numbers.
- `Rounds` (synchronous): see `core/rounds.py`.

Members are the replicas that take part. Replicas that rest, have left or have died are not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from distbelief.core import roles


class Key(NamedTuple):
    """Identity of a push."""

    who: str
    incarnation: int
    clock: int


class Action(StrEnum):
    """Decision on a push or a fetch."""

    APPLY = "apply"
    GATHER = "gather"
    HOLD = "hold"
    ANSWER = "answer"


class Verdict(NamedTuple):
    """Decision on a push (apply, gather, hold) or a fetch (answer, hold), its reason, and a factor on the rate."""

    action: Action
    reason: str
    scale: float = 1.0


class PlannedUpdate(NamedTuple):
    """One step of the optimizer, with the gathered pushes and with held ones."""

    samples: int
    weight: float
    """Factor on the sum of the gathered pushes."""
    parts: tuple[tuple[Key, float], ...]
    reason: str
    model: int = 0
    """Number of the model that is stepped."""


class Drop(NamedTuple):
    """Held push that is not applied, with the reason for its replica."""

    key: Key
    reason: str


class PolicyState(NamedTuple):
    """State of a policy: its floor, each member's tick, and each member's newest known incarnation."""

    floor: int
    members: Mapping[str, int]
    lives: Mapping[str, int]


APPLY = Verdict(Action.APPLY, "nobody is waited for")
ANSWER = Verdict(Action.ANSWER, "nobody is waited for")

SCALINGS: Mapping[str, Callable[[int], float]] = {
    "none": lambda _: 1.0,
    "inverse": lambda staleness: 1.0 / max(staleness, 1),
    "exponential": lambda staleness: math.exp(1.0 - max(staleness, 1)),
}
"""Factor on the learning rate of a push, by its staleness; 1 where that is 0 or 1."""


class Policy:
    """Asynchronous policy: no replica waits. `scaling` is one of `SCALINGS`.

    >>> Policy("inverse").push(Key("replica 0", 0, 1), tick=0, samples=8, staleness=4)
    Verdict(action=<Action.APPLY: 'apply'>, reason='it is 4 updates old', scale=0.25)
    """

    rounds = False
    """True where an update has one push of every member."""
    attended = False
    """True where the policy must know which replicas take part."""
    gathers = False
    """True where an update has several pushes."""
    leaves_behind = False
    """True where an update does not wait for late replicas."""
    turns = False
    """True where a push waits for its replica's turn."""
    bound = math.inf
    """Ticks that a step may begin ahead of the slowest replica."""
    models = 1
    """Number of models that a job trains, each with an optimizer of its own."""

    def __init__(self, scaling: str = "none") -> None:
        self._scaling = None if scaling == "none" else SCALINGS[scaling]
        self.floor = 0
        """Tick that all members have reached: pushes of lower ticks are applied here. It only grows."""

    def begin(self, members: Sequence[tuple[str, int]]) -> None:
        """Begin with the members and lives of a job that goes on, in the place of a shard; with none at its start."""
        for who, incarnation in members:
            self.attend(who, incarnation, 0)

    def resume(self, floor: int, rulings: Iterable[Any]) -> None:
        """Take the place of a shard that had this floor and, in rounds, these rulings."""
        self.floor = floor

    def state(self) -> PolicyState:
        """Return the state, while no update is under way."""
        return PolicyState(self.floor, {}, {})

    def restore(self, state: PolicyState) -> None:
        """Take over the state of another."""
        self.floor = state.floor

    def applied(self, who: str, tick: int) -> None:
        """Note a repeated push that was already applied, here or at the shard before this one."""

    @property
    def taking_part(self) -> int:
        """Number of replicas that take part, at least 1; 0 where the policy does not know it."""
        return 0

    @property
    def decides(self) -> bool:
        """True where the policy must be asked: else all its answers are the same."""
        return type(self) is not Policy or self._scaling is not None

    def attend(self, who: str, incarnation: int, tick: int, epoch: int = 0) -> int:
        """Let a replica take part in an epoch, from a tick on; return that tick.

        A tick of -1 leaves the choice to the policy.
        """
        return 0

    def rest(self, who: str, incarnation: int, epoch: int) -> None:
        """Note that a replica has no more minibatches of an epoch."""
        self.leave(who, incarnation)

    def leave(self, who: str, incarnation: int) -> None:
        """Note that an incarnation of a replica (-1: the known one) has left or died; older ones do not count."""

    def turn(self, key: Key, tick: int, model: int, opens: bool) -> str:
        """Note which of several models a push steps, and whether it is the first push of a minibatch.

        Return why that is refused; "" where it is not.
        """
        return ""

    def may_push(self, who: str) -> bool:
        """Return whether a replica's push may be decided on; called again after each change."""
        return True

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Decide on a push that the ledger accepts."""
        if self._scaling is None:
            return APPLY
        return Verdict(Action.APPLY, f"it is {staleness} updates old", self._scaling(staleness))

    def fetch(self, who: str, tick: int) -> Verdict:
        """Decide on a fetch for a step at `tick`; called again after each change."""
        return ANSWER

    def due(self, short: bool = False) -> PlannedUpdate | Drop | None:
        """Return what to do next with gathered or held pushes; None while they wait.

        With `short`, an update takes fewer pushes than it wants.
        """
        return None

    def validate(self) -> None:
        """Assert the invariants between two events."""

    def why(self, key: Key) -> str:
        """Return why a held push waits."""
        return ""

    def slowest(self) -> list[str]:
        """Return the replicas that the others wait for here."""
        return []


# The floor never falls, since a fetch that was answered cannot be taken back. So a replica that joins begins at the
# floor at least, whatever tick it names, and one that leaves can only let the floor rise.
class Members(Policy):
    """Policy that knows its members and their ticks, and waits for none of them.

    `replicas` is the number of replicas with which the job begins.
    """

    attended = True

    def __init__(self, scaling: str, replicas: int = 0) -> None:
        super().__init__(scaling)
        self.members: dict[str, int] = {}
        self._known: dict[str, int] = {}
        # a replica not heard from is still starting; one that rests takes part again in the next epoch
        self._taking_part = {*range(replicas)}

    @property
    def taking_part(self) -> int:
        return max(1, len(self._taking_part))

    def begin(self, members: Sequence[tuple[str, int]]) -> None:
        if members:  # others may have left for good
            self._taking_part.clear()
        super().begin(members)

    def state(self) -> PolicyState:
        return PolicyState(self.floor, self.members, self._known)

    def restore(self, state: PolicyState) -> None:
        self.floor, self.members, self._known = state.floor, dict(state.members), dict(state.lives)

    def attend(self, who: str, incarnation: int, tick: int, epoch: int = 0) -> int:
        if incarnation < self._known.get(who, 0):
            return self.floor
        self._known[who] = incarnation
        self._taking_part.add(roles.index_of(who))
        # the replica counts as a member from now on, so that the floor does not pass its tick before it begins
        self.members[who] = max(tick, self.floor)
        self._rise()
        return self.members[who]

    def rest(self, who: str, incarnation: int, epoch: int) -> None:
        """Wait no more for a replica that has no more minibatches of an epoch."""
        if not 0 <= incarnation < self._known.get(who, 0):
            self.members.pop(who, None)
            self._rise()

    def leave(self, who: str, incarnation: int) -> None:
        if not 0 <= incarnation < self._known.get(who, 0):
            self._taking_part.discard(roles.index_of(who))
        self.rest(who, incarnation, 0)

    def _rise(self) -> None:
        """Raise the floor to the slowest member's tick."""


class SoftsyncPolicy(Members):
    """Policy that makes an update of every c = floor(members / n) pushes, of any replicas.

    >>> policy = SoftsyncPolicy(n=1, scaling="none")
    >>> _ = policy.attend("replica 0", 0, 0), policy.attend("replica 1", 0, 0)
    >>> policy.push(Key("replica 1", 0, 1), 0, 8, 0), policy.due()
    (Verdict(action=<Action.GATHER: 'gather'>, reason='it is 1 of 2 that make an update', scale=1.0), None)
    >>> _ = policy.push(Key("replica 1", 0, 2), 0, 8, 0); policy.due()
    PlannedUpdate(samples=16, weight=0.5, parts=(), reason='2 pushes make an update', model=0)
    """

    gathers = True

    def __init__(self, n: int, scaling: str) -> None:
        super().__init__(scaling)
        self._n = n
        self._gathered = self._samples = 0

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Gather every push; its staleness is final, since the next update takes it."""
        self._gathered += 1
        self._samples += samples
        scale = self._scaling(staleness) if self._scaling else 1.0
        return Verdict(Action.GATHER, f"it is {self._gathered} of {self._wanted} that make an update", scale)

    @property
    def _wanted(self) -> int:
        return max(1, len(self.members) // self._n)

    def due(self, short: bool = False) -> PlannedUpdate | None:
        """Return the update with all gathered pushes, once they are enough."""
        # gathered pushes are acknowledged, so a checkpoint, an account or a standby must have them, even if there are
        # fewer than an update wants (`short`)
        count, samples = self._gathered, self._samples
        if not count or (count < self._wanted and not short):
            return None
        self._gathered = self._samples = 0
        return PlannedUpdate(samples, 1.0 / count, (), f"{count} pushes make an update")


class BoundedPolicy(Members):
    """Policy that lets no step begin more than `bound` ticks ahead of the slowest member's applied pushes.

    >>> policy = BoundedPolicy(bound=1, scaling="none")
    >>> _ = policy.attend("replica 0", 0, 0), policy.attend("replica 1", 0, 0)
    >>> _ = policy.push(Key("replica 0", 0, 1), 0, 8, 0), policy.push(Key("replica 0", 0, 2), 1, 8, 0)
    >>> policy.fetch("replica 0", 1).action, policy.fetch("replica 0", 2).reason
    (<Action.ANSWER: 'answer'>, 'tick 2 may begin when all are at tick 1 or later (--staleness 1); the slowest is at 0')
    """

    def __init__(self, bound: int, scaling: str, replicas: int = 0) -> None:
        super().__init__(scaling, replicas)
        self.bound = bound

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Apply every push at once, and note its replica's tick."""
        self.applied(key.who, tick)
        return super().push(key, tick, samples, staleness)

    def applied(self, who: str, tick: int) -> None:
        before = self.members.get(who)
        if before is not None:
            self.members[who] = max(before, tick + 1)
            if before == self.floor:
                self._rise()

    def fetch(self, who: str, tick: int) -> Verdict:
        """Hold the fetch of a member's step that is too far ahead."""
        needed = tick - self.bound
        if self.floor >= needed or who not in self.members:
            return ANSWER
        reason = f"tick {tick} may begin when all are at tick {needed} or later (--staleness {self.bound})"
        return Verdict(Action.HOLD, f"{reason}; the slowest is at {self.floor}")

    def validate(self) -> None:
        slowest = min(self.members.values(), default=self.floor)
        assert self.floor == slowest, f"the floor is at {self.floor}, and the slowest at {slowest}"

    def slowest(self) -> list[str]:
        return [who for who, tick in self.members.items() if tick <= self.floor]

    def _rise(self) -> None:
        if self.members:
            self.floor = max(self.floor, min(self.members.values()))


class RoundRobin(Members):
    """Policy that applies members' pushes in turn, by the members' numbers; `floor` counts turns.

    All numbers are below `replicas`.

    >>> policy = RoundRobin(3)
    >>> _ = policy.attend("replica 0", 0, 0), policy.attend("replica 2", 0, 0)
    >>> policy.may_push("replica 2"), policy.push(Key("replica 0", 0, 1), 0, 8, 0).action, policy.may_push("replica 2")
    (False, <Action.APPLY: 'apply'>, True)
    """

    turns = True

    def __init__(self, replicas: int) -> None:
        super().__init__("none")
        self._replicas = replicas

    def may_push(self, who: str) -> bool:
        """Return whether it is a replica's turn; one that is no member need not wait for a turn."""
        return who not in self.members or self.slowest() == [who]

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Apply the push, and pass the turn on."""
        self.floor += self._passed(key.who) + 1
        return super().push(key, tick, samples, staleness)

    def slowest(self) -> list[str]:
        return sorted(self.members, key=self._passed)[:1]

    def _passed(self, who: str) -> int:
        """Return the number of turns before a replica's."""
        return (roles.index_of(who) - self.floor) % self._replicas
