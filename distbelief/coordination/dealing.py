"""Dealing of a job's data: which replicas want minibatches, which ones they are dealt, and how far the job is."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Protocol

from distbelief.coordination.allotments import Allotments, own_numbers
from distbelief.core import roles
from distbelief.core.conversations import dealing
from distbelief.core.effects import Effect, Send
from distbelief.core.ledger import SAMPLES_LIMIT
from distbelief.core.portions import OWN, PORTION_LIMIT, STREAM, Dealer, Portion, Position, RoundDealer, cut_numbers
from distbelief.core.settings import FEWEST_STEPS, SEQUENTIAL, Plan
from distbelief.errors import RemoteProtocolError


class DataDealer(Protocol):
    """Dealer of a job's data: the part that coordinator and checkpoints use."""

    epochs: int
    """Epochs that are done."""
    samples: int
    """Samples that are done."""
    pushes: int
    """Pushes since the last checkpoint was begun."""
    minibatches: int
    """Applied minibatches since the last checkpoint was begun."""
    units: str = "minibatches"
    """Name of the unit that is dealt."""

    @property
    def finished(self) -> bool:
        """Return whether all is done."""

    def held(self, role: str) -> int:
        """Return how many units a replica was dealt and has not done."""

    def position(self) -> Position:
        """Return the present position in the data, for a checkpoint."""

    def joins(self, role: str, samples: int) -> None:
        """Note that a replica has joined, and the size of its training set."""
        return  # all have the same data

    def lost(self, role: str) -> int:
        """Put back the units that a lost replica held, to be dealt again; return their number."""

    def give_up(self, role: str) -> int:
        """Give up a replica that will not come back, and the units that only it has; return their number.

        Return -1 if the number is unknown.
        """
        return 0  # all have the same data

    def waiting(self, members: Collection[str]) -> list[str]:
        """Return a phrase for each replica that the job waits for."""
        there = sorted(members, key=roles.index_of)
        return [f"{role} holds {held} {self.units}" for role in there if (held := self.held(role))]

    def validate(self, members: Collection[str]) -> None:
        """Assert the invariants between two events."""


# An epoch is dealt once the one before is done, so no round mixes two epochs. A replica that was dealt n minibatches is
# at round n, and has one minibatch of each round, by its place among the replicas, as in `allreduce`. It is dealt more
# only if enough is left for the others to get as far. So only an epoch's last round is smaller, apart from rounds that
# a replica missed because it died or joined. A replica with nothing left says so, and no round waits for it until the
# next epoch (`core/rounds`). Minibatches of a dead replica are dealt again once no round can contain its push. If
# rounds do not wait for slow replicas, a replica is at the round of the minibatch it holds, and is dealt the earliest
# free one.
class RoundsDealt:
    """Number of an epoch's rounds for which each replica was dealt minibatches.

    >>> rounds = RoundsDealt()
    >>> rounds.add("replica 0", 0), rounds.add("replica 1", 0)
    (None, None)
    >>> rounds.share("replica 0", 7, most=32), rounds.add("replica 0", 3)
    (3, None)
    >>> rounds.share("replica 0", 4, most=32), rounds.add("replica 0", 1), rounds.share("replica 0", 3, most=32)
    (1, None, 0)
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.of: dict[str, int] = {}
        self._at: dict[int, int] = {}
        """Number of replicas at each round."""

    def begin(self, epoch: int) -> None:
        """Begin an epoch, with nothing dealt yet."""
        self.epoch = epoch
        self.of.clear()
        self._at.clear()

    def add(self, who: str, count: int) -> None:
        """Count minibatches dealt to a replica; a new replica enters at that round."""
        at = self.of.get(who, 0) + count
        self.remove(who)
        self.of[who] = at
        self._at[at] = self._at.get(at, 0) + 1

    def remove(self, who: str) -> None:
        """Forget a replica that is gone."""
        if who in self.of:
            at = self.of.pop(who)
            self._at[at] -= 1
            if not self._at[at]:
                del self._at[at]

    def place(self, who: str) -> tuple[int, int]:
        """Return the number of a replica's minibatch in its next round, and the distance to the one after.

        >>> rounds = RoundsDealt()
        >>> rounds.add("replica 0", 0), rounds.add("replica 1", 3), rounds.place("replica 1")
        (None, None, (7, 2))
        """
        before = sum(roles.index_of(other) < roles.index_of(who) for other in self.of)
        return self.of[who] * len(self.of) + before, len(self.of)

    def share(self, who: str, left: float, most: int) -> int:
        """Return how many of the minibatches left a replica may be dealt so that the others can still get as far.

        If not all can, it may be dealt one more, as long as no replica behind it goes short.
        """
        # `needed(count)` minibatches bring the others as far as this replica would be with `count` more. It grows with
        # `count`, so a bisection finds the largest `count` for which enough minibatches are left.
        at_round = self.of[who]

        def needed(count: int) -> int:
            return sum(replicas * max(0, at_round + count - at) for at, replicas in self._at.items())

        return max(bisect_right(range(1, most + 1), left, key=needed), int(left > needed(0)))


class Dealing(DataDealer):
    """Dealer of a training set.

    Args:
        position, samples: where in the data it begins, and the samples done by then.
        brought: size of each replica's training set.
        over: replicas that will not come back.
    """

    def __init__(
        self, plan: Plan, position: Position, samples: int, brought: Mapping[str, int], over: Collection[str]
    ) -> None:
        settings = plan.settings
        self.settings, self.samples, self._batches = settings, samples, plan.batches
        policy = settings.policy
        self._rounds = RoundsDealt() if policy.rounds else None
        self._leaves_behind = policy.leaves_behind
        self._absent = {role for role in roles.leads(settings.mesh) if role not in over}
        """Replicas that have yet to join."""
        self.dealer: Dealer | Allotments
        epochs = settings.epochs
        if plan.allotted:
            in_order = settings.order == SEQUENTIAL
            self.dealer = Allotments(epochs, self._absent, in_order, position.places, shrinks=not policy.rounds)
        elif policy.rounds:
            self.dealer = RoundDealer(plan.batches, epochs, position)
        else:
            self.dealer = Dealer(plan.batches, epochs, settings.replicas, position)
        for role in sorted(brought.keys() - over):
            self.joins(role, brought[role])
        self.epochs = self.dealer.completed
        self.pushes = self.minibatches = 0
        self._wanting: dict[str, bool] = {}
        self._recalled: set[str] = set()
        self._starts: dict[int, tuple[str, int]] = {}
        """First replica to report how its stream begins in an epoch, and the digest of those samples."""
        self._warming, self._warmed = settings.strategy.pushing.warm_start_steps, samples // settings.batch_size
        self._warmer = ""
        self._paced = settings.strategy.pushing.push_steps if settings.strategy.pushing.paced else 0
        """Steps of the fastest replica's push, where the steps of a push follow the speed; else 0."""
        self._step_seconds: dict[str, float] = {}

    def report(self, sender: str, event: dealing.Progress) -> int:
        """Count a replica's report; return how many epochs it completes."""
        if not 0 <= event.samples <= SAMPLES_LIMIT:
            raise RemoteProtocolError(f"{sender} reports {event.samples} samples")
        if event.returned:
            self.dealer.give_back(sender, event.returned)
        held = self.held(sender)
        self.dealer.report(sender, event.steps, event.dropped)
        if self._rounds is not None and sender in self._rounds.of:
            returned = sum(portion.count for portion in event.returned)
            self._rounds.add(sender, -returned - (held - self.held(sender)) * self._leaves_behind)
        self.samples += event.samples
        self.pushes += event.pushes
        self.minibatches += event.steps - len(event.dropped)
        if event.step_seconds > 0:
            self._step_seconds[sender] = event.step_seconds
        if self._warming:
            self._warmed += event.steps
        if event.wants:
            self._wanting[sender] = False
        return self.dealer.completed - self.epochs

    def end(self, sender: str, event: dealing.StreamEnded) -> int:
        """Note the end of a replica's stream; return how many epochs that completes."""
        if not isinstance(self.dealer, Allotments):
            raise RemoteProtocolError(f"{sender} says that its data have ended, but it has no data of its own")
        self.dealer.end(sender, event.epoch, event.number)
        return self.dealer.completed - self.epochs

    def differs(self, sender: str, start: dealing.StreamStart) -> str:
        """Return the refusal of a replica whose stream differs from the others'; "" if the streams are alike."""
        first, digest = self._starts.setdefault(start.epoch, (sender, start.digest))
        if start.digest == digest:
            return ""
        return (
            f"the stream of {sender} begins with other samples than that of {first}: replica r of n takes the samples "
            "r, r + n, ... of one that is the same in all; where the script cuts it by itself, launch with --data own; "
            "what it draws is the same in all from torch, random and numpy.random, or from a generator of a fixed seed"
        )

    def joins(self, role: str, samples: int) -> None:
        self._absent.discard(role)
        if isinstance(self.dealer, Allotments):
            self.dealer.add(role, self._numbers(roles.index_of(role), samples))

    def _numbers(self, index: int, samples: int) -> range:
        if self._batches:  # all have the same data
            return cut_numbers(index, self.settings.replicas, self._batches)
        size = self.settings.batch_size
        count = OWN if samples == STREAM else samples // size if self.settings.drop_last else -(-samples // size)
        return own_numbers(index, count)

    def deal(self, members: Collection[str], withheld: bool = False, before: float = math.inf) -> list[Effect]:
        """Deal a portion to each member that wants one; tell others once to drain if they can have none now.

        Where work is `withheld`, deal nothing, and take back minibatches dealt ahead. An evaluation or a checkpoint is
        due after `before` minibatches.
        """
        # A replica for which there is nothing is sent one `Drain` (`_wanting` is True from then on). It pushes its
        # accrued gradients, and waits for its next portion without asking again.
        if not withheld:
            self._recalled.clear()
            self._count_in(members)
        effects = self._recall(members) if withheld else []
        for role in list(self._wanting):
            allowed = 0 if withheld else self._allowed(role, members, before)
            portion = self._deal(role, allowed) if allowed else None
            if portion is not None:
                del self._wanting[role]
                if self._rounds is not None:
                    self._rounds.add(role, portion.count)
                effects.append(Send(role, dealing.Deal(portion, self._steps(role))))
            elif not self._wanting[role]:
                self._wanting[role] = True
                effects.append(Send(role, dealing.Drain(self._rounds.epoch if self._rounds else 0)))
        return effects

    def _steps(self, role: str) -> int:
        """Return the steps of a replica's next pushes, by its speed; 0 for those of --push-every."""
        mine = self._step_seconds.get(role)
        if not self._paced or mine is None:
            return 0
        return min(self._paced, max(FEWEST_STEPS, int(self._paced * min(self._step_seconds.values()) / mine)))

    def _deal(self, role: str, at_most: int) -> Portion | None:
        """Return a replica's next portion; in rounds that wait for all, the minibatches of its place in each round."""
        if not isinstance(self.dealer, RoundDealer) or self._rounds is None or self._leaves_behind:
            return self.dealer.deal(role, at_most)
        return self.dealer.deal(role, at_most, *self._rounds.place(role))

    def _recall(self, members: Collection[str]) -> list[Effect]:
        """Ask once for minibatches dealt ahead in rounds, so that the job waits at most one step for each replica."""
        if self._rounds is None or self._leaves_behind:
            return []
        busy = [role for role in sorted(members, key=roles.index_of) if role not in self._recalled and self.held(role)]
        self._recalled.update(busy)
        return [Send(role, dealing.Recall()) for role in busy]

    def _allowed(self, role: str, members: Collection[str], before: float) -> int:
        # warm start (Dean et al. 2012, section 4.1): one replica trains alone at first, since many at once may diverge
        # from random parameters
        if self._warmed >= self._warming:
            self._warming = 0
            return PORTION_LIMIT if self._rounds is None else self._in_rounds(self._rounds, role, members, before)
        if self._warmer not in members:
            self._warmer = min(members, key=roles.index_of)
        if role != self._warmer:
            return 0
        return max(0, min(PORTION_LIMIT, self._warming - self._warmed - self.dealer.held(role)))

    def _count_in(self, members: Collection[str]) -> None:
        """Enter new and awaited replicas into the rounds, at the round of the furthest replica.

        At the start of an epoch all begin at its first round, and draining replicas are told again.
        """
        rounds = self._rounds
        if rounds is None:
            return
        if rounds.epoch != self.dealer.epoch:
            rounds.begin(self.dealer.epoch)
            self._wanting = dict.fromkeys(self._wanting, False)
        if new := self._absent.union(members) - rounds.of.keys():
            furthest = max((dealt - self.held(role) for role, dealt in rounds.of.items()), default=0)
            for role in new:
                rounds.add(role, furthest)

    def _in_rounds(self, rounds: RoundsDealt, role: str, members: Collection[str], before: float) -> int:
        # if rounds do not wait for slow replicas, each is dealt one minibatch at a time: a slow one would hold up more
        undealt = self.dealer.undealt(role)
        most = min(undealt, 1 if self._leaves_behind else PORTION_LIMIT)
        if isinstance(self.dealer, RoundDealer):
            most = rounds.share(role, undealt, most)
        left = before - sum(map(self.held, members)) if before < math.inf else before
        return min(most, max(1, rounds.share(role, left, most)))

    @property
    def finished(self) -> bool:
        return self.dealer.finished

    def held(self, role: str) -> int:
        return self.dealer.held(role)

    def position(self) -> Position:
        return self.dealer.position()

    def lost(self, role: str) -> int:
        self._wanting.pop(role, None)
        self._step_seconds.pop(role, None)
        self._recalled.discard(role)
        if self._rounds is not None:
            self._rounds.remove(role)
        return self.dealer.lost(role)

    def give_up(self, role: str) -> int:
        self._absent.discard(role)
        if self._rounds is not None:
            self._rounds.remove(role)  # the rounds were dealt to a group that includes it
        return self.dealer.give_up(role) if isinstance(self.dealer, Allotments) else 0

    def validate(self, members: Collection[str]) -> None:
        self.dealer.validate()
        assert self._wanting.keys() <= {*members}, f"{[*self._wanting]} want minibatches, and {[*members]} take part"
        assert self.dealer.completed == self.epochs, f"{self.dealer.completed} epochs are done, and {self.epochs} known"

    def waiting(self, members: Collection[str]) -> list[str]:
        who = super().waiting(members)
        if isinstance(self.dealer, Allotments):
            gone = self.dealer.undone.difference(members)
            who += [f"{role} has not joined" for role in sorted(self.dealer.absent, key=roles.index_of)]
            who += [f"{role} has not come back" for role in sorted(gone, key=roles.index_of)]
        return who + [f"{role} waits for work" for role, drained in self._wanting.items() if drained]
