"""The partitions of one split replica, as one of them sees the others; a replica that is whole has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from distbelief.core import events, roles
from distbelief.core.conversations import dealing, grouping, initialising, membership, partitioning
from distbelief.core.effects import RECEIVE, Arrival, Batch, Connect, Send, Wake
from distbelief.core.messages import Address, Message
from distbelief.core.portions import Portion
from distbelief.core.timers import PartedOver
from distbelief.errors import JobFailed
from distbelief.replica.links import unwanted
from distbelief.replica.steps import Steps
from distbelief.sharding.layout import Layout, check_same

PARTED_SECONDS = 30.0
"""Limit for a partition's wait without its link to another: where that one has died, it is ended itself before that."""
Said = TypeVar("Said", partitioning.AtRound, partitioning.PartNorm)


class Siblings:
    """The other partitions.

    Args:
        role: whose siblings they are.
        incarnation: of the replica: all its partitions live and die together.
        partitions: of the replica.
        address: where the others reach this one.
    """

    def __init__(self, role: str, incarnation: int, partitions: int = 1, address: str = "") -> None:
        self.role, self._incarnation, self.address = role, incarnation, address
        self._all = roles.partitions_of(role, partitions)
        self.partition = roles.partition_of(role)
        self.superior = roles.COORDINATOR if self.partition == 0 else self._all[0]
        """Role that deals to this partition, and is told what it has done."""
        self.followers = self._all[1:] if self.partition == 0 else ()
        """Those that this one leads."""
        self._permitted = 0
        """The push up to which this partition may push, where it follows."""
        self._asked: list[membership.Rejoin] = []
        """Questions of followers about shards that they have lost."""
        self._places: tuple[Address, ...] = ()
        self._greeted: set[str] = set()
        self.joined: dict[str, membership.Join | grouping.Enter] = {}
        """Messages with which the followers of this one have joined it."""
        self._awaited: set[str] = set()
        """Followers that have not done yet what they were told."""
        self._lives: tuple[int, ...] = ()
        """Lives of the shards that followers are initialising."""
        self.left: set[str] = set()
        """Followers whose scripts have left the loop, and that do nothing more."""
        self.ending = False
        """True once it comes to its end, as the others do, of whom none is missed any more."""
        self._gone: dict[str, str] = {}
        """Those whose links are gone, and how."""
        self._doubted: set[str] = set()
        """Those of them about whom the clock is asked."""
        self._generation = self._exchange = 0
        self._said: dict[str, partitioning.AtRound | partitioning.PartNorm] = {}
        """Last messages of others in an exchange."""
        self._unheard: Sequence[str] = ()
        """Partitions that are still to be heard in this exchange."""

    @property
    def follows(self) -> bool:
        """True where another partition leads this one."""
        return self.superior != roles.COORDINATOR

    @property
    def busy(self) -> bool:
        """True while followers have not done what they were told."""
        return bool(self._awaited)

    def waits(self) -> str:
        """Name those of them that are waited for; "" where none is."""
        if self._gone:
            return f"to be started anew with {roles.named(sorted(self._gone))}, which is gone"
        away = self._awaited or {*self._unheard}
        return f"for {roles.named(sorted(away))} to do the same" if away else ""

    def meet(self, layout: Layout) -> Steps[None]:
        """Link to all others, each to those before it; a lead waits until those that it leads join it.

        Raises:
            JobFailed: one of them is gone.
            LayoutError: one has another model, or has it split otherwise.
        """
        if len(self._all) == 1:
            return
        yield Send(roles.COORDINATOR, partitioning.PartitionHere(Address(self.address, self._incarnation)))
        while not self._places:
            self._greet((yield RECEIVE))
            yield from self.doubts()
        for role, place in list(zip(self._all, self._places, strict=True))[: self.partition]:
            if not (yield Connect(role, place)):
                raise JobFailed(f"{self.role}: {role} cannot be reached")
            yield Send(role, partitioning.PartitionHello())
        while not self._greeted >= {*self._all[self.partition + 1 :]} or not self.joined.keys() >= {*self.followers}:
            self._greet((yield RECEIVE))
            yield from self.doubts()
        for role, theirs in self.joined.items():
            check_same(layout, theirs.layout, role)

    def _greet(self, arrival: Arrival) -> None:
        match arrival.event:
            case partitioning.Meet(places):
                self._places = places
            case partitioning.PartitionHello():
                self._greeted.add(arrival.sender)
            case membership.Join() | grouping.Enter() as joining:
                self.joined[arrival.sender] = joining
            case _ if not self.takes(arrival):
                unwanted(self.role, arrival)

    def has(self, role: str) -> bool:
        """Return whether a role is one of them."""
        return role in self._all

    def role_of(self, partition: int) -> str:
        """The partition of a number."""
        return self._all[partition]

    def begin(self, generation: int) -> None:
        """The replica begins, in a generation of the job."""
        self._generation, self._exchange, self._permitted = generation, 0, 0
        self._said.clear()
        self._unheard = ()

    def may_push(self, clock: int) -> bool:
        """Return whether a push may be made now: one that follows waits for its lead."""
        return not self.follows or clock <= self._permitted

    def takes(self, arrival: Arrival) -> bool:
        """Note what another partition tells of what all do together, and who is gone; whether it is that.

        Raises:
            JobFailed: one is gone for good, and yet this one goes on.
        """
        who = arrival.sender
        if isinstance(arrival.event, events.Woke):
            return self._is_parted(arrival.event.timer)
        if who not in self._all:
            return False
        match arrival.event:
            case partitioning.PushPart(clock=clock):
                self._permitted = clock
            case partitioning.AtRound() | partitioning.PartNorm() as told:
                self._said[who] = told
            case initialising.Ready(shards=lives) if who in self.followers:
                if lives == self._lives:
                    self.done(who)
            case membership.Leave(for_good=left) if who in self.followers:
                self.left |= {who} if left else set()
                self.done(who)
            case membership.Rejoin() as asked if who in self.followers:
                self._asked.append(asked)
            case membership.Anew() if who in self.followers:
                pass  # as this one does
            # it has ended as it was to; or it has died, and this one is about to be ended too; or the link broke
            case events.Lost(reason=reason):
                self._gone[who] = reason
            case _:
                return False
        return True

    def doubts(self) -> list[Wake]:
        """Ask the clock about those that are gone since this was last called."""
        new = sorted(self._gone.keys() - self._doubted - self.left)
        self._doubted.update(new)
        return [Wake(PARTED_SECONDS, PartedOver(role)) for role in new]

    def _is_parted(self, timer: object) -> bool:
        if not isinstance(timer, PartedOver):
            return False
        if not self.ending:
            raise JobFailed(
                f"{self.role}: its link to {timer.role} is gone ({self._gone[timer.role]}), and nobody has ended this "
                f"one since, for {PARTED_SECONDS:g} s; look for what breaks links between the two"
            )
        return True

    def relayed(self) -> list[Send | Wake]:
        """Hand on what followers ask of the coordinator; and `doubts`."""
        asked, self._asked = self._asked, []
        return [*(Send(self.superior, one) for one in asked), *self.doubts()]

    def moment(self, step: int) -> int:
        """A step of the replica since it began, as a number that grows with its lives and the job's generations too."""
        return (self._incarnation << 12 | self._generation) << 34 | step

    # exchanges: each tells the lead something of its own, and is told what that is of all

    def agree(self, tick: int, wait: Callable[[], Steps[None]]) -> Steps[tuple[int, bool]]:
        """Tell the others the round of which this partition holds the parameters.

        Args:
            tick: that round.
            wait: for the next arrival.

        Returns:
            The highest of all, and whether all have that.
        """
        if len(self._all) == 1:
            return tick, True
        now = self._next_exchange()

        def highest(said: Sequence[partitioning.AtRound]) -> partitioning.AtRound:
            ticks = {one.tick for one in said}
            return partitioning.AtRound(*now, max(ticks), len(ticks) == 1)

        told = yield from self._of_all(partitioning.AtRound(*now, tick), highest, wait)
        return told.tick, told.settled

    def whole_norm(self, norm: float, wait: Callable[[], Steps[None]]) -> Steps[float]:
        """Tell the others the norm of this partition's part of the gradient of a step.

        Args:
            norm: of that part.
            wait: for the next arrival.

        Returns:
            That of the whole gradient.
        """
        now = self._next_exchange()
        told = yield from self._of_all(
            partitioning.PartNorm(*now, norm),
            lambda said: partitioning.PartNorm(*now, math.hypot(*(one.norm for one in said))),
            wait,
        )
        return told.norm

    def _next_exchange(self) -> tuple[int, int]:
        self._exchange += 1
        return self._generation, self._exchange

    def _of_all(
        self, own: Said, summed: Callable[[Sequence[Said]], Said], wait: Callable[[], Steps[None]]
    ) -> Steps[Said]:
        """Say something of one's own in this exchange; returns what the lead makes of what all have said."""
        if self.follows:
            yield Send(self.superior, own)
            [told] = yield from self._hear(type(own), [self.superior], wait)
            return told
        said = [own]
        said += yield from self._hear(type(own), self.followers, wait)
        told = summed(said)
        yield from self.tell(told)
        return told

    def _hear(self, kind: type[Said], others: Sequence[str], wait: Callable[[], Steps[None]]) -> Steps[list[Said]]:
        """Return the others' messages of one kind in this exchange."""
        now = self._generation, self._exchange
        while away := [one for one in others if not self._has_said(one, now)]:
            self._unheard = away
            yield from wait()
        self._unheard = ()
        return [told for one in others if isinstance(told := self._said[one], kind)]

    def _has_said(self, who: str, exchange: tuple[int, int]) -> bool:
        told = self._said.get(who)
        return told is not None and (told.generation, told.exchange) == exchange

    # a lead

    def tell(self, message: Message, awaited: bool = False) -> list[Send]:
        """Tell those that this one leads; until each has said that it is `done`, where that is awaited."""
        if awaited:
            self._awaited = {*self.followers} - self.left
        return [Send(one, message) for one in self.followers]

    def welcome(self, welcome: membership.Welcome) -> list[Send]:
        """Hand on where the shards are; where these are to be initialised, until each has done so with its own."""
        self._lives = lives_of(welcome)
        return self.tell(welcome, awaited=welcome.initialise)

    def deal(self, batch: Batch) -> list[Send]:
        """Have them compute a minibatch too."""
        return self.tell(dealing.Deal(Portion(batch.epoch, batch.index, 1)))

    def push(self, clock: int) -> dict[str, Send]:
        """Have them push their parts of a push."""
        return {one.to: one for one in self.tell(partitioning.PushPart(clock))}

    def done(self, who: str) -> None:
        """One has done what it was told."""
        self._awaited.discard(who)


def lives_of(welcome: membership.Welcome) -> tuple[int, ...]:
    """Return the life of each shard that a welcome names."""
    return tuple(place.incarnation for place in welcome.shards)
