"""Rounds: one update from the gradients of all members, which is the gradient of their union batch (Chen et al. 2016).

The first shard that holds anything is the ruler: it decides which pushes are in a round, and tells the other shards,
which hold pushes until they know. A round is decided once it has the gradient of every member, of all but the backup
workers, or of a quorum. Later pushes are dropped.

Where a script has several models, each has rounds of its own, in an order that all replicas keep. A replica that joins
takes part from the first round of a minibatch on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from distbelief.core import roles
from distbelief.core.consistency import ANSWER, Action, Drop, Key, PlannedUpdate, Policy, Verdict
from distbelief.core.conversations.agreement import Ruling
from distbelief.core.settings import Settings

HELD = Verdict(Action.HOLD, "its own push is in no round yet")


def quorum_of(quorum: float, members: int) -> int:
    """Return the number of gradients that a round waits for.

    A quorum below 1 is a fraction of the members, rounded up; any other is a number of gradients.

    >>> quorum_of(0.75, 4), quorum_of(0.75, 3), quorum_of(0.1, 4), quorum_of(3, 4), quorum_of(3, 2)
    (3, 3, 1, 3, 2)
    """
    # rounded, since a product such as 0.1 * 30 is a little more than 3
    return math.ceil(round(quorum * members, 9)) if quorum < 1 else min(int(quorum), members)


class History:
    """Rulings that a restarted shard may not know.

    No shard is more than two rounds behind: a replica computes for a round once all shards have made the one before, or
    with prefetch the one before that. A dropped push may be on its way for any time, but a replica has at most two that
    are not acknowledged.

    >>> history = History()
    >>> history.add(Ruling(0, (Key("replica 0", 0, 1),), ())); history.add(Ruling(1, (), (Key("replica 1", 0, 1),)))
    >>> [ruled.round for ruled in history.since(1)]
    [1]
    """

    def __init__(self) -> None:
        self._taken: deque[Ruling] = deque(maxlen=8)
        self._dropped: dict[str, deque[Ruling]] = {}

    def add(self, ruled: Ruling) -> None:
        """Add a ruling."""
        if ruled.taken:
            self._taken.append(ruled)
        for key in ruled.dropped:
            self._dropped.setdefault(key.who, deque(maxlen=4)).append(Ruling(ruled.round, (), (key,)))

    def since(self, floor: int) -> list[Ruling]:
        """Return the rulings on dropped pushes, and those on rounds from `floor` on."""
        return [
            *(ruled for of in self._dropped.values() for ruled in of),
            *(ruled for ruled in self._taken if ruled.round >= floor),
        ]


# Why one shard rules: if each shard closed rounds by itself, two could take different pushes into one round, where a
# replica dies or is late in between, and the parameters would be of no round. So the first shard that holds anything
# decides, and the others follow its rulings.
# `_decided` counts rounds that are ruled, `floor` those that are made here. A ruling waits in `_queue` until its pushes
# have come, since one replica's push reaches two shards at two times.
# `_here` has each push that has come and is not settled. Of these, `_fresh` are in no ruling yet (at the ruler only),
# and `_dropping` are to be dropped next. Those in `_late` are dropped already, and have not come.
class Rounds(Policy):
    """Policy of a shard in a synchronous job; its floor is the number of rounds that it has made.

    A replica that dies before its round is decided is not in it, and its minibatch is dealt again. One that dies later
    is in it at those shards that its push had reached: at each shard whole or not at all.

    A round does not wait for the last `backup` gradients. With a `quorum` that is not 0, it waits only for that (see
    `quorum_of`).

    >>> from distbelief.strategies import Synchronous
    >>> policy = Rounds(Settings(batch_size=8, strategy=Synchronous(2)), rules=True)
    >>> _ = policy.attend("replica 0", 0, -1), policy.attend("replica 1", 0, -1)
    >>> key = Key("replica 0", 0, 1)
    >>> policy.push(key, 0, 8, 0).action, policy.due(), policy.why(key), policy.slowest()
    (<Action.HOLD: 'hold'>, None, 'round 0 has 1 of 2 gradients', ['replica 1'])
    >>> _ = policy.push(Key("replica 1", 0, 1), 0, 4, 0); policy.due().samples
    12
    """

    rounds = attended = gathers = True

    def __init__(self, settings: Settings, rules: bool, backup: int = 0, quorum: float = 0.0) -> None:
        super().__init__()
        self._rules = rules
        several = settings.strategy.pushing.push_steps > 1 and not settings.local
        self._weighed = settings.batch_size if several else 0
        """Batch size by which the steps of a push are weighted; 0 where a push has one step and no weight."""
        self._backup, self._quorum = backup, quorum
        self.leaves_behind = bool(backup or quorum)
        self._most = settings.replicas - self._backup
        self._decided = 0
        # a replica that has not been heard of is still starting: the first round waits for it too
        self._members = {*roles.leads(settings.mesh)}
        self._epoch = 0
        """Newest epoch that a replica has reported minibatches of."""
        self._resting: dict[str, int] = {}
        """Replicas that rest until the next epoch, each with the epoch of which it has no minibatch left."""
        self._known: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._fresh: dict[str, Key] = {}
        self._here: dict[Key, int] = {}
        self._owing: dict[str, Key] = {}
        self._late: set[Key] = set()
        self._weights: dict[Key, float] = {}
        """Weights of pushes here that do not weigh their samples."""
        self._dropping: deque[Key] = deque()
        self._queue: deque[Ruling] = deque()
        self._untold: list[Ruling] = []
        self._turns: dict[Key, tuple[int, bool]] = {}
        """Model of each push here, and whether it is the first of a minibatch."""
        self._coming: set[str] = set()
        """Replicas that become members at the start of a minibatch."""
        self._admitted: list[tuple[str, int]] = []
        self.history = History()

    def attend(self, who: str, incarnation: int, tick: int, epoch: int = 0) -> int:
        """Count a replica in, and return its first round; -1 where `admitted` returns that round later.

        The first replica of a new epoch also counts in all that rest.
        """
        if incarnation < self._known.get(who, 0):
            return self.floor
        self._epoch = max(self._epoch, epoch)
        self._wake()
        if incarnation > self._known.get(who, 0):
            self._members.discard(who)
        # minibatches of an earlier incarnation's pushes that are in no ruling are dealt again: reject those pushes, or
        # they would count twice
        if who in self._fresh and self._fresh[who].incarnation < incarnation:
            self._reject(self._fresh.pop(who))
        queued = {key for ruling in self._queue for key in ruling.taken}
        self._dropping += [
            key
            for key in self._here
            if key.who == who and key.incarnation < incarnation and key not in queued | set(self._dropping)
        ]
        self._known[who] = incarnation
        self._dead.pop(who, None)
        self._resting.pop(who, None)
        # the others may be between two models of one minibatch, and this replica has no push for the first of these: it
        # begins with the next minibatch
        if self._rules and self.models > 1 and who not in self._members:
            self._coming.add(who)
            self._decide()
            return -1
        self._members.add(who)
        self._most = max(self._most, len(self._members) - self._backup)  # others may join
        return self._decided if self._rules else self.floor

    def admitted(self) -> list[tuple[str, int]]:
        """Return the replicas admitted since the last call, each with the first round that it is in."""
        newcomers, self._admitted = self._admitted, []
        return newcomers

    def _open(self) -> None:
        """Admit replicas that wait for a minibatch to begin, if no member is within one."""
        if not self._coming:
            return
        if all(self._turns[key][1] for key in self._fresh.values()) and (self._fresh or not self._members):
            self._members |= self._coming
            self._most = max(self._most, len(self._members) - self._backup)
            self._admitted += ((who, self._decided) for who in sorted(self._coming, key=roles.index_of))
            self._coming.clear()

    def rest(self, who: str, incarnation: int, epoch: int) -> None:
        """Count a replica out for the rest of an epoch; its push stays in its round."""
        if incarnation < self._known.get(who, 0) or incarnation <= self._dead.get(who, -1):
            return
        self._members.discard(who)
        self._coming.discard(who)
        self._resting[who] = epoch
        self._wake()
        self._decide()

    def _wake(self) -> None:
        """Count in again the replicas that rested for an epoch that is over."""
        over = [who for who, epoch in self._resting.items() if epoch < self._epoch]
        self._members.update(over)
        for who in over:
            del self._resting[who]

    def leave(self, who: str, incarnation: int) -> None:
        known = self._known.get(who, 0)
        if 0 <= incarnation < known:
            return
        self._members.discard(who)
        self._coming.discard(who)
        self._resting.pop(who, None)
        self._dead[who] = max(known, incarnation)
        if who in self._fresh:
            self._reject(self._fresh.pop(who))
        self._decide()

    def turn(self, key: Key, tick: int, model: int, opens: bool) -> str:
        """Note a push's model; return why it is refused: replicas must step their models in one order."""
        self._turns[key] = model, opens
        for other in self._fresh.values():
            if tick == self._decided and self._turns[other] != (model, opens):
                orders = [
                    f"{pushed.who} steps model {at}{' first' * first} in a minibatch"
                    for pushed in (key, other)
                    for at, first in (self._turns[pushed],)
                ]
                return f"round {tick}: {', and '.join(orders)}; in rounds all step their models in one order"
        return ""

    def weigh(self, key: Key, weight: float) -> None:
        """Set the weight of a push, which otherwise is its samples."""
        self._weights[key] = weight

    def push(self, key: Key, tick: int, samples: int, staleness: int) -> Verdict:
        """Hold every push until it is in a ruling."""
        self._here[key] = samples
        self._owing[key.who] = key
        if key in self._late:
            self._late.discard(key)
            self._dropping.append(key)
        elif any(key in ruling.taken for ruling in self._queue):
            pass  # ruled before the shard that ruled it was replaced
        elif self._rules and (tick < self._decided or self._never(key)):
            self._reject(key)
        elif self._rules:
            self._fresh[key.who] = key
        self._decide()
        return HELD

    def why(self, key: Key) -> str:
        """Return why a held push waits: for its round, for the ruling, or for the round's other pushes."""
        if key in self._dropping:
            return "its round was made without it"
        if self._queue and key in self._queue[0].taken:
            return f"round {self._queue[0].round} is ruled, and not all of its gradients are here"
        if not self._rules:
            return f"round {self.floor} is not ruled yet"
        return (
            f"round {self._decided} has {len(self._fresh)} of "
            f"{self._wanted(len(self._members | self._fresh.keys()))} gradients"
        )

    def slowest(self) -> list[str]:
        """Return the replicas whose gradients are missing, as far as this shard knows."""
        if self._queue:
            return [key.who for key in self._queue[0].taken if key not in self._here]
        return sorted(self._members - self._fresh.keys(), key=roles.index_of) if self._rules else []

    def fetch(self, who: str, tick: int) -> Verdict:
        """Answer once `tick` rounds are made, but not between a push and its round."""
        # a new incarnation fetches before it takes part: a push of the last one does not delay that fetch
        if who in self._owing and who not in self._dead:
            return HELD
        if self.floor < tick:
            return Verdict(Action.HOLD, f"{tick} rounds must be made first, {self.floor} are")
        return ANSWER

    def due(self, short: bool = False) -> PlannedUpdate | Drop | None:
        """Return the next ruled round once its pushes are here, without those that a death kept away."""
        if self._dropping:
            key = self._dropping.popleft()
            self._settle(key)
            return Drop(key, "its round was made without it")
        while self._queue:
            ruled = self._queue[0]
            if not all(key in self._here or self._never(key) for key in ruled.taken):
                return None
            # if no push of a round can come, it makes no update but is counted: the ruler numbers the rounds
            self._queue.popleft()
            self.floor = ruled.round + 1
            keys = [key for key in ruled.taken if key in self._here]
            if not keys:
                continue
            union = sum(self._here[key] for key in keys)
            weights = {key: self._weighed or self._weights.get(key, self._here[key]) for key in keys}
            whole = union if self._weighed else sum(weights.values())
            # without samples, all pushes weigh the same
            parts = tuple((key, weights[key] / whole if union else 1.0 / len(keys)) for key in keys)
            model, _ = self._turns.get(keys[0], (0, True))
            for key in keys:
                self._settle(key)
            return PlannedUpdate(union, 1.0, parts, f"round {ruled.round} of {union} samples", model)
        return None

    def rule(self, ruled: Ruling) -> None:
        """Take a ruling of the ruler; it may come again, also from the ruler's next incarnation."""
        self.history.add(ruled)
        if ruled.taken and ruled.round >= self.floor + len(self._queue):
            self._queue.append(ruled)
        for key in ruled.dropped:
            if key in self._here:
                if key not in self._dropping:
                    self._dropping.append(key)
            elif not self._never(key):
                self._late.add(key)

    def resume(self, floor: int, rulings: Iterable[Ruling]) -> None:
        """Take the place of a shard that had made `floor` rounds and knew these rulings, without members as yet."""
        self.floor = self._decided = floor
        self._members.clear()
        for ruled in rulings:
            self.rule(ruled)
            self._decided = max(self._decided, ruled.round + bool(ruled.taken))

    def validate(self) -> None:
        """Assert that each push here waits in one place, and each replica is counted once."""
        fresh, ruled = {*self._fresh.values()}, {key for ruling in self._queue for key in ruling.taken}
        waiting = [*fresh, *ruled & self._here.keys(), *self._dropping]
        assert len(waiting) == len({*waiting}), f"{waiting}: a push waits for two things"
        assert {*waiting} <= self._here.keys(), f"{waiting} wait, and {[*self._here]} are here"
        assert {*self._owing.values()} <= self._here.keys(), (
            f"{self._owing} are owed a round, and {[*self._here]} are here"
        )
        assert not self._members & self._resting.keys(), f"{self._resting} rest, and are waited for"
        assert not self._rules or self.floor <= self._decided, (
            f"{self.floor} rounds are made, {self._decided} are ruled"
        )

    def untold(self) -> list[Ruling]:
        """Return the rulings since the last call, for the other shards."""
        rulings, self._untold = self._untold, []
        return rulings

    def _wanted(self, members: int) -> int:
        return quorum_of(self._quorum, members) if self._quorum else min(self._most, members)

    def _decide(self) -> None:
        """Rule the round once it has all gradients that it waits for, if this shard is the ruler."""
        self._open()
        if not self._fresh or len(self._fresh) < self._wanted(len(self._members)):
            return
        # a replica that rests or has left may have a push here, which the round takes: so it counts as a member
        if len(self._fresh) >= self._wanted(len(self._members | self._fresh.keys())):
            # by the replicas' numbers, so that the sum does not depend on which push came first
            keys = tuple(sorted(self._fresh.values(), key=lambda key: roles.index_of(key.who)))
            self._fresh.clear()
            self._tell(Ruling(self._decided, keys, ()))
            self._decided += 1
            self._open()

    def _reject(self, key: Key) -> None:
        self._tell(Ruling(self._decided, (), (key,)))

    def _tell(self, ruled: Ruling) -> None:
        self._untold.append(ruled)
        self.rule(ruled)

    def _settle(self, key: Key) -> None:
        del self._here[key]
        self._turns.pop(key, None)
        self._weights.pop(key, None)
        if self._owing.get(key.who) == key:
            del self._owing[key.who]

    def _never(self, key: Key) -> bool:
        """Return whether a push cannot arrive any more."""
        return key.incarnation < self._known.get(key.who, 0) or key.incarnation <= self._dead.get(key.who, -1)
