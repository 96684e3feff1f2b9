"""The coordinator's dealings with the data: who asked for minibatches, who is dealt which, and how far the job is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol

from distbelief.coordination.allotments import Allotments, own_numbers
from distbelief.coordination.rounds_dealt import RoundsDealt
from distbelief.core import roles
from distbelief.core.conversations import dealing
from distbelief.core.effects import Effect, Send
from distbelief.core.ledger import SAMPLES_LIMIT
from distbelief.core.portions import OWN, PORTION_LIMIT, STREAM, Dealer, Portion, Position, RoundDealer, cut_numbers
from distbelief.core.settings import SEQUENTIAL, Plan
from distbelief.errors import RemoteProtocolError


class DataDealer(Protocol):
    """Dealer of a job's data, as its coordinator and its checkpoints need it."""

    epochs: int
    """Number that are done."""
    samples: int
    """Number that are done."""
    pushes: int
    """Reported since somebody last set it to 0."""
    minibatches: int
    """Applied since somebody last set it to 0."""
    units: str = "minibatches"
    """Name of what is dealt."""

    @property
    def finished(self) -> bool:
        """True where all is done."""
        ...

    def held(self, role: str) -> int:
        """Return how much a replica was dealt and has not done."""
        ...

    def position(self) -> Position:
        """Return the present position in the data, for a checkpoint."""
        ...

    def joins(self, role: str, samples: int) -> None:
        """A replica is there, whose training set has so many samples; here all have the same data."""
        return

    def lost(self, role: str) -> int:
        """A replica is gone; returns how much is dealt again."""
        ...

    def give_up(self, role: str) -> int:
        """A replica will not come (again); returns how much only it could do, -1 where nobody knows: here nothing."""
        return 0

    def waiting(self, members: Collection[str]) -> list[str]:
        """For whom the job waits, in words."""
        there = sorted(members, key=roles.index_of)
        return [f"{role} holds {held} {self.units}" for role in there if (held := self.held(role))]

    def validate(self, members: Collection[str]) -> None:
        """Assert what holds between two events."""
        ...


class Dealing(DataDealer):
    """Deals the training set of a plan, from a position at which `samples` are done.

    Args:
        plan: of the job.
        position, samples: where it stands.
        brought: by replica, the samples that it has said to have.
        over: the replicas that will not come (again).
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
        """Replicas that have not come yet, and will."""
        self.dealer: Dealer | Allotments
        if plan.allotted:
            in_order = settings.order == SEQUENTIAL
            self.dealer = Allotments(
                settings.epochs, self._absent, in_order, position.places, shrinks=not policy.rounds
            )
        else:
            epochs = settings.epochs
            self.dealer = (
                RoundDealer(plan.batches, epochs, position)
                if policy.rounds
                else Dealer(plan.batches, epochs, settings.replicas, position)
            )
        for role in sorted(brought.keys() - over):
            self.joins(role, brought[role])
        self.epochs = self.dealer.completed
        self.pushes = self.minibatches = 0
        """Reported since somebody last set them to 0."""
        self._wanting: dict[str, bool] = {}
        self._recalled: set[str] = set()
        self._starts: dict[int, tuple[str, int]] = {}
        """First replica that has told the beginning of its stream in an epoch, and the digest of that."""
        self._warming, self._warmed = settings.strategy.pushing.warm_start_steps, samples // settings.batch_size
        self._warmer = ""

    def report(self, sender: str, event: dealing.Progress) -> int:
        """Take a replica's report; returns how many epochs it completes.

        Raises:
            RemoteProtocolError: of more than the replica was dealt, or could be.
        """
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
        if self._warming:
            self._warmed += event.steps
        if event.wants:
            self._wanting[sender] = False
        return self.dealer.completed - self.epochs

    def end(self, sender: str, event: dealing.StreamEnded) -> int:
        """A replica's stream has ended; returns how many epochs that completes.

        Raises:
            RemoteProtocolError: it was dealt no such minibatch, or what all have.
        """
        if not isinstance(self.dealer, Allotments):
            raise RemoteProtocolError(f"{sender} says that its data have ended, and they are not its own")
        self.dealer.end(sender, event.epoch, event.number)
        return self.dealer.completed - self.epochs

    def differs(self, sender: str, start: dealing.StreamStart) -> str:
        """Why a replica's stream is none of which each replica may take a part; "" where it is."""
        first, digest = self._starts.setdefault(start.epoch, (sender, start.digest))
        if start.digest == digest:
            return ""
        return (
            f"the stream of {sender} begins with other samples than that of {first}: replica r of n takes the samples "
            "r, r + n, ... of one that is the same in all; where the script cuts it by itself, launch with --data own; "
            "what it draws is the same in all from torch, random and numpy.random, or from a generator of a fixed seed"
        )

    def joins(self, role: str, samples: int) -> None:
        """A replica is there, whose training set has so many samples.

        Raises:
            UsageError: it had others before.
        """
        self._absent.discard(role)
        if isinstance(self.dealer, Allotments):
            self.dealer.add(role, self._numbers(roles.index_of(role), samples))

    def _numbers(self, index: int, samples: int) -> range:
        """The minibatches that are a replica's own, by number."""
        if self._batches:  # of data that all have
            return cut_numbers(index, self.settings.replicas, self._batches)
        size = self.settings.batch_size
        count = OWN if samples == STREAM else samples // size if self.settings.drop_last else -(-samples // size)
        return own_numbers(index, count)

    def deal(self, members: Collection[str], withheld: bool = False, before: float = math.inf) -> list[Effect]:
        """Serve the replicas that want a portion; those that cannot have one now are told to drain, once.

        Args:
            members: who takes part.
            withheld: whether nobody is to be dealt any, nor to go on with what he was.
            before: how many minibatches may be done before something else is due by them.
        """
        # A replica that can have nothing is told to drain once (`_wanting` is True from then on): what it has accrued
        # is pushed and counts, and it waits for its next portion without asking again.
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
                effects.append(Send(role, dealing.Deal(portion)))
            elif not self._wanting[role]:
                self._wanting[role] = True
                effects.append(Send(role, dealing.Drain(self._rounds.epoch if self._rounds else 0)))
        return effects

    def _deal(self, role: str, at_most: int) -> Portion | None:
        """The next portion of a replica: in rounds that wait for all, of each round the minibatch of its place."""
        if not isinstance(self.dealer, RoundDealer) or self._rounds is None or self._leaves_behind:
            return self.dealer.deal(role, at_most)
        return self.dealer.deal(role, at_most, *self._rounds.place(role))

    def _recall(self, members: Collection[str]) -> list[Effect]:
        """Have what was dealt ahead in rounds given back, once, so that nobody is waited for longer than a step."""
        if self._rounds is None or self._leaves_behind:
            return []
        busy = [role for role in sorted(members, key=roles.index_of) if role not in self._recalled and self.held(role)]
        self._recalled.update(busy)
        return [Send(role, dealing.Recall()) for role in busy]

    def _allowed(self, role: str, members: Collection[str], before: float) -> int:
        """Return how many minibatches a replica may be dealt: in a warm start one has the first steps to itself."""
        # a warm start (Dean et al. 2012): one replica trains alone at first, since many at once may diverge from random
        # parameters
        if self._warmed >= self._warming:
            self._warming = 0
            return PORTION_LIMIT if self._rounds is None else self._in_rounds(self._rounds, role, members, before)
        if self._warmer not in members:
            self._warmer = min(members, key=roles.index_of)
        if role != self._warmer:
            return 0
        return max(0, min(PORTION_LIMIT, self._warming - self._warmed - self.dealer.held(role)))

    def _count_in(self, members: Collection[str]) -> None:
        """Count in for the rounds that are dealt who is there and who will come, from where the others are; where an
        epoch begins, from its start, and who was told that there is nothing is told so again, of this one.
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
        """Return how many a replica may be dealt in rounds."""
        # where rounds do not wait for the late, a replica is dealt one minibatch at a time, or the late would keep
        # several
        undealt = self.dealer.undealt(role)
        most = min(undealt, 1 if self._leaves_behind else PORTION_LIMIT)
        if isinstance(self.dealer, RoundDealer):
            most = rounds.share(role, undealt, most)
        left = before - sum(map(self.held, members)) if before < math.inf else before
        return min(most, max(1, rounds.share(role, left, most)))

    @property
    def finished(self) -> bool:
        """True where every minibatch of every epoch is done."""
        return self.dealer.finished

    def held(self, role: str) -> int:
        """Return how many minibatches a replica was dealt and has not done."""
        return self.dealer.held(role)

    def position(self) -> Position:
        """Return the present position in the data, for a checkpoint."""
        return self.dealer.position()

    def lost(self, role: str) -> int:
        """A replica is gone: what it held is dealt again; returns how many minibatches that is."""
        self._wanting.pop(role, None)
        self._recalled.discard(role)
        if self._rounds is not None:
            self._rounds.remove(role)
        return self.dealer.lost(role)

    def give_up(self, role: str) -> int:
        """Give up a replica, and what is left of its own; return how many minibatches, -1 where nobody knows."""
        self._absent.discard(role)
        if self._rounds is not None:
            self._rounds.remove(role)  # for whom rounds were counted that it will not come to
        return self.dealer.give_up(role) if isinstance(self.dealer, Allotments) else 0

    def validate(self, members: Collection[str]) -> None:
        """Assert that no minibatch is lost or counted twice, and that nobody is dealt any who does not take part."""
        self.dealer.validate()
        assert self._wanting.keys() <= {*members}, f"{[*self._wanting]} want minibatches, and {[*members]} take part"
        assert self.dealer.completed == self.epochs, f"{self.dealer.completed} epochs are done, and {self.epochs} known"

    def waiting(self, members: Collection[str]) -> list[str]:
        """For whom the job waits, in words."""
        who = super().waiting(members)
        if isinstance(self.dealer, Allotments):
            gone = self.dealer.undone.difference(members)
            who += [f"{role} has not joined" for role in sorted(self.dealer.absent, key=roles.index_of)]
            who += [f"{role} has not come again" for role in sorted(gone, key=roles.index_of)]
        return who + [f"{role} waits for work" for role, drained in self._wanting.items() if drained]
