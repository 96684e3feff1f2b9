"""Consistency: what may be stale. From what a shard knows, and a push, a fetch or a death, to a verdict and the
sentence that says why.

Each shard asks a policy of its own. A policy counts ticks: a replica is at tick t when it has made t pushes since it
could have begun, and one that comes later begins at the tick of the slowest. A push of tick t was computed with all
that the policy guarantees at tick t.

- `Policy` (downpour): every push is applied at once, every fetch is answered at once (Dean et al. 2012).
- `SoftsyncPolicy`: a push is added to the next update at once, and every c = floor(members / n) of them make one, each
  weighted 1/c and by its staleness (Zhang et al. 2016). Nobody waits: the fast may be in an update twice, the slow not
  at all.
- `BoundedPolicy`: pushes are applied at once; a fetch for tick t is answered when every member's pushes of ticks below
  t - s
  are applied (Ho et al. 2013).
- `RoundRobin` (locking): pushes are applied one member's after another's, by their numbers, round and round.
- `Rounds` (synchronous): in `core/rounds.py`.

Members are the replicas that take part: those who sit out, have left or have died are waited for by nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from distbelief.core import roles


class Key(NamedTuple):
    """The name of a push."""

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
    """Decision on a push (apply, gather for the next update, hold) or a fetch (answer, hold), with its reason. `scale`
    multiplies the learning rate.
    """

    action: Action
    reason: str
    scale: float = 1.0


class PlannedUpdate(NamedTuple):
    """One optimizer step: with what was gathered, and with held pushes, whose buffers are averaged; each has its
    weight, and the sum has one.
    """

    samples: int
    weight: float
    parts: tuple[tuple[Key, float], ...]
    reason: str
    model: int = 0
    """Number of the model that is stepped."""


class Drop(NamedTuple):
    """A held push is not applied, and its replica is told."""

    key: Key
    reason: str


class PolicyState(NamedTuple):
    """State of a policy: its floor, the tick of each member, and the newest known life of each."""

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
"""The factor on the learning rate of a push of some staleness; 1 where that is 0 or 1."""


class Policy:
    """Asynchronous: nobody waits for anybody.

    Args:
        scaling: one of `SCALINGS`.

    >>> Policy("inverse").push(Key("replica 0", 0, 1), tick=0, samples=8, staleness=4)
    Verdict(action=<Action.APPLY: 'apply'>, reason='it is 4 updates old', scale=0.25)
    """

    rounds = False
    """True where one update is made from one push of every replica that takes part."""
    attended = False
    """True where it must know which replicas take part."""
    gathers = False
    """True where one update is made from several pushes."""
    leaves_behind = False
    """True where an update does not wait for late replicas."""
    turns = False
    """True where a push waits for its replica's turn."""
    bound = math.inf
    """Ticks that a step may begin ahead of the slowest replica's."""
    models = 1
    """Number of models that a job trains, each with an optimizer of its own."""

    def __init__(self, scaling: str = "none") -> None:
        self._scaling = None if scaling == "none" else SCALINGS[scaling]
        self.floor = 0
        """Tick that all members have reached: all pushes of lower ticks are applied here. It only grows, and fetches
        tell it.
        """

    def resume(self, floor: int, rulings: Iterable[Any]) -> None:
        """Go on in the place of a shard whose floor it was; in rounds, with what was ruled."""
        self.floor = floor

    def state(self) -> PolicyState:
        """Return the state, between two updates of which none has begun."""
        return PolicyState(self.floor, {}, {})

    def restore(self, state: PolicyState) -> None:
        """Be as far as another was."""
        self.floor = state.floor

    def taken(self, who: str, tick: int) -> None:
        """A push that comes again was applied already, by this shard or the one whose place it has taken."""

    @property
    def decides(self) -> bool:
        """True where the policy must be asked: without a scaling its answers never differ."""
        return type(self) is not Policy or self._scaling is not None

    def attend(self, who: str, incarnation: int, tick: int, epoch: int = 0) -> int:
        """A replica takes part from `tick` on, or asks from where on (-1), with minibatches of an epoch; returns that
        tick.
        """
        return 0

    def rest(self, who: str, incarnation: int, epoch: int) -> None:
        """A replica has no more minibatches of an epoch."""
        self.leave(who, incarnation)

    def leave(self, who: str, incarnation: int) -> None:
        """A replica leaves or has died; an incarnation older than the known one does so no more, -1 is the known
        one.
        """

    def turn(self, key: Key, tick: int, model: int, opens: bool) -> str:
        """Note which of several models the next push steps, and whether it opens a minibatch. Return why that cannot
        be, or "".
        """
        return ""

    def may_push(self, who: str) -> bool:
        """Return whether a replica's push may be decided on; asked again whenever something has changed."""
        return True

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Decide on a push that the ledger takes."""
        if self._scaling is None:
            return APPLY
        return Verdict(Action.APPLY, f"it is {staleness} updates old", self._scaling(staleness))

    def fetch(self, who: str, tick: int) -> Verdict:
        """Decide on a fetch for a step at `tick`; asked again whenever something has changed."""
        return ANSWER

    def due(self, short: bool = False) -> PlannedUpdate | Drop | None:
        """The next thing to do with what was gathered or held; None where it waits on. `short` is content with fewer
        pushes than an update wants.
        """
        return None

    def validate(self) -> None:
        """Assert what holds between two events."""

    def why(self, key: Key) -> str:
        """Why a held push waits."""
        return ""

    def slowest(self) -> list[str]:
        """The replicas for which everybody waits here."""
        return []


# A floor never falls: a fetch that was answered cannot be taken back. So a replica that comes is at the floor at least,
# whatever tick it names, and one that leaves can only let it rise.
class _Members(Policy):
    """A policy that knows who takes part, and at which tick."""

    attended = True

    def __init__(self, scaling: str) -> None:
        super().__init__(scaling)
        self.members: dict[str, int] = {}
        self._known: dict[str, int] = {}

    def state(self) -> PolicyState:
        return PolicyState(self.floor, self.members, self._known)

    def restore(self, state: PolicyState) -> None:
        self.floor, self.members, self._known = state.floor, dict(state.members), dict(state.lives)

    def attend(self, who: str, incarnation: int, tick: int, epoch: int = 0) -> int:
        """Count a replica in."""
        if incarnation < self._known.get(who, 0):
            return self.floor
        self._known[who] = incarnation
        # while it asks it holds the floor where it is, so that the tick which it is told is not passed before it begins
        self.members[who] = max(tick, self.floor)
        self._rise()
        return self.members[who]

    def leave(self, who: str, incarnation: int) -> None:
        """Count a replica out."""
        if not 0 <= incarnation < self._known.get(who, 0):
            self.members.pop(who, None)
            self._rise()

    def _rise(self) -> None:
        """The floor follows the slowest member; nobody's leaving lowers it."""


class SoftsyncPolicy(_Members):
    """One update for every c = floor(members / n) pushes, whoever's they are.

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
        """Gather every push: its staleness is final, as the next update takes it."""
        self._gathered += 1
        self._samples += samples
        return Verdict(
            Action.GATHER,
            f"it is {self._gathered} of {self._wanted} that make an update",
            self._scaling(staleness) if self._scaling else 1.0,
        )

    @property
    def _wanted(self) -> int:
        return max(1, len(self.members) // self._n)

    def due(self, short: bool = False) -> PlannedUpdate | None:
        """The update with all that was gathered, once it is enough; less is when members leave."""
        # what was gathered is acknowledged: a checkpoint, an account or a standby must have it, even where there are
        # fewer pushes than an update wants (`short`)
        count, samples = self._gathered, self._samples
        if not count or (count < self._wanted and not short):
            return None
        self._gathered = self._samples = 0
        return PlannedUpdate(samples, 1.0 / count, (), f"{count} pushes make an update")


class BoundedPolicy(_Members):
    """No step begins more than `bound` ticks ahead of the slowest member's applied pushes.

    >>> policy = BoundedPolicy(bound=1, scaling="none")
    >>> _ = policy.attend("replica 0", 0, 0), policy.attend("replica 1", 0, 0)
    >>> _ = policy.push(Key("replica 0", 0, 1), 0, 8, 0), policy.push(Key("replica 0", 0, 2), 1, 8, 0)
    >>> policy.fetch("replica 0", 1).action, policy.fetch("replica 0", 2).reason
    (<Action.ANSWER: 'answer'>, 'tick 2 may begin when all are at tick 1 or later (--staleness 1); the slowest is at 0')
    """

    def __init__(self, bound: int, scaling: str) -> None:
        super().__init__(scaling)
        self.bound = bound

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Apply every push at once, and note how far its replica is."""
        self.taken(key.who, tick)
        return super().push(key, tick, samples, staleness)

    def taken(self, who: str, tick: int) -> None:
        """Note how far a replica is."""
        before = self.members.get(who)
        if before is not None:
            self.members[who] = max(before, tick + 1)
            if before == self.floor:
                self._rise()

    def fetch(self, who: str, tick: int) -> Verdict:
        """Hold the fetch of a step that is too far ahead; one who is no member waits for nobody."""
        needed = tick - self.bound
        if self.floor >= needed or who not in self.members:
            return ANSWER
        where = f"the slowest is at {self.floor}"
        return Verdict(
            Action.HOLD,
            f"tick {tick} may begin when all are at tick {needed} or later (--staleness {self.bound}); {where}",
        )

    def validate(self) -> None:
        """Assert that the floor is where the slowest is."""
        slowest = min(self.members.values(), default=self.floor)
        assert self.floor == slowest, f"the floor is at {self.floor}, and the slowest at {slowest}"

    def slowest(self) -> list[str]:
        """Those that are no further than all."""
        return [who for who, tick in self.members.items() if tick <= self.floor]

    def _rise(self) -> None:
        if self.members:
            self.floor = max(self.floor, min(self.members.values()))


class RoundRobin(_Members):
    """Pushes are applied one member's after another's, by their numbers, round and round: `floor` counts turns.

    Args:
        replicas: how many there may be.

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
        """Return whether it is a replica's turn; one who is no member waits for nobody."""
        return who not in self.members or self.slowest() == [who]

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Apply it, and pass the turn on."""
        self.floor += self._passed(key.who) + 1
        return super().push(key, tick, samples, staleness)

    def slowest(self) -> list[str]:
        """The one whose turn it is."""
        return sorted(self.members, key=self._passed)[:1]

    def _passed(self, who: str) -> int:
        """Return how many turns are passed over before a replica's."""
        return (roles.index_of(who) - self.floor) % self._replicas
