"""Siblings of a partition: the other partitions of its replica. A whole replica has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from distbelief.core import events, roles
from distbelief.core.conversations import checkpointing, dealing, grouping, initialising, membership, partitioning
from distbelief.core.conversations.agreement import Squares
from distbelief.core.effects import RECEIVE, Arrival, Batch, Connect, Send, Steps, Wake
from distbelief.core.events import PartedOver
from distbelief.core.messages import Address, Message
from distbelief.core.norms import added
from distbelief.core.portions import Portion
from distbelief.errors import JobFailed
from distbelief.replica.links import unwanted
from distbelief.sharding.layout import Layout, check_same

PARTED_SECONDS = 30.0
"""Limit for a partition's wait after a link to another broke; where that one died, this one is ended earlier."""
Part = TypeVar("Part", partitioning.AtRound, partitioning.PartNorm, grouping.PartSquares)
"""Message of an exchange, of one partition or of the lead for all."""


# The first partition leads. It passes on the coordinator's messages (welcomes, minibatches, the end), and orders the
# pushes. `_awaited` has the followers that must carry out an order before it continues.
#
# Followers push only on order, because a push counts once all its parts are there: if each pushed by itself, a
# checkpoint could find push n at some shards and not at others, though no role has died.
#
# All partitions live and die together, so a broken link mostly means that this one is about to be ended too. It waits
# for that, but with a limit (`doubts`): where only the link broke, nothing would continue.
class Siblings:
    """The other partitions of a replica."""

    def __init__(self, role: str, incarnation: int, partitions: int = 1, address: str = "") -> None:
        self.role, self._incarnation, self.address = role, incarnation, address
        self._all = roles.partitions_of(role, partitions)
        self.partition = roles.partition_of(role)
        self.superior = roles.COORDINATOR if self.partition == 0 else self._all[0]
        """Role that deals work to this partition, and takes its reports."""
        self.followers = self._all[1:] if self.partition == 0 else ()
        """Partitions that this one leads."""
        self._permitted = 0
        """Clock up to which this partition may push, where it follows."""
        self._rejoins: list[membership.Rejoin] = []
        """Requests of followers for the addresses of lost shards."""
        self._places: tuple[Address, ...] = ()
        self._greeted: set[str] = set()
        self.joined: dict[str, membership.Join] = {}
        """Joining messages of the followers."""
        self._awaited: set[str] = set()
        """Followers that have not carried out the last order."""
        self._answer: type[Message] | None = None
        """Kind of message by which a follower confirms it."""
        self._lives: tuple[int, ...] = ()
        """Incarnations of the shards that followers are initialising."""
        self.left: set[str] = set()
        """Followers whose scripts have left the loop."""
        self.ending = False
        """True once this partition ends; broken links do not matter then."""
        self._gone: dict[str, str] = {}
        """Partitions with broken links, and the reasons."""
        self._doubted: set[str] = set()
        """Partitions with broken links for which a timer runs."""
        self._generation = self._exchange = 0
        self._parts: dict[str, partitioning.AtRound | partitioning.PartNorm | grouping.PartSquares] = {}
        """Last message of each partition in an exchange."""
        self._unheard: Sequence[str] = ()
        """Partitions whose messages of this exchange are missing."""

    @property
    def follows(self) -> bool:
        """True where another partition leads this one."""
        return self.superior != roles.COORDINATOR

    @property
    def busy(self) -> bool:
        """True while followers have not carried out the last order."""
        return bool(self._awaited)

    def waits(self) -> str:
        """Name the partitions that this one waits for; "" for none."""
        if self._gone:
            return f"to be started anew with {roles.named(sorted(self._gone))}, which is gone"
        away = self._awaited or {*self._unheard}
        return f"for {roles.named(sorted(away))} to do the same" if away else ""

    def meet(self, layout: Layout) -> Steps[None]:
        """Link to all others, each to those before it; a lead waits until its followers join."""
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
            case membership.Join() as joining:
                self.joined[arrival.sender] = joining
            case _ if not self.takes(arrival):
                unwanted(self.role, arrival)

    def role_of(self, partition: int) -> str:
        """Return the role of a partition."""
        return self._all[partition]

    def begin(self, generation: int) -> None:
        """Begin a generation of the job: pushes and exchanges are counted from 0."""
        self._generation, self._exchange, self._permitted = generation, 0, 0
        self._parts.clear()
        self._unheard = ()

    def may_push(self, clock: int) -> bool:
        """Return whether a push may be made now: a follower waits for its lead's order."""
        return not self.follows or clock <= self._permitted

    def takes(self, arrival: Arrival) -> bool:
        """Take a message or the loss of another partition; returns whether the arrival was one."""
        who = arrival.sender
        if isinstance(arrival.event, events.Woke):
            return self._is_parted(arrival.event.timer)
        if who not in self._all:
            return False
        match arrival.event:
            case partitioning.PushPart(clock=clock):
                self._permitted = clock
            case partitioning.AtRound() | partitioning.PartNorm() | grouping.PartSquares() as part:
                self._parts[who] = part
            case initialising.Ready(shards=lives) if who in self.followers:
                if lives == self._lives:  # otherwise some of these shards have died since
                    self.done(who)
            case membership.Leave(for_good=left) if who in self.followers:
                self.left |= {who} if left else set()
                self.done(who)
            case membership.Rejoin() as question if who in self.followers:
                self._rejoins.append(question)
            case (
                grouping.Halted() | initialising.Restored() | checkpointing.SnapshotDone() | membership.Anew() as answer
            ) if who in self.followers:
                if type(answer) is self._answer:  # otherwise the answer is of an earlier group, or was not ordered
                    self.done(who)
            # the other partition ended by order, or died (then this one will be ended too), or only the link broke
            case events.Lost(reason=reason):
                self._gone[who] = reason
            case _:
                return False
        return True

    def doubts(self) -> list[Wake]:
        """Set a timer for each link that broke since the last call."""
        new = sorted(self._gone.keys() - self._doubted - self.left)
        self._doubted.update(new)
        return [Wake(PARTED_SECONDS, PartedOver(role)) for role in new]

    def _is_parted(self, timer: object) -> bool:
        if not isinstance(timer, PartedOver):
            return False
        if not self.ending:
            raise JobFailed(
                f"{self.role}: its link to {timer.role} broke ({self._gone[timer.role]}), and this role was not ended "
                f"within {PARTED_SECONDS:g} s; look for what breaks links between the two"
            )
        return True

    def relayed(self) -> list[Send | Wake]:
        """Pass on the followers' requests to the coordinator, and set timers as `doubts` does."""
        questions, self._rejoins = self._rejoins, []
        return [*(Send(self.superior, question) for question in questions), *self.doubts()]

    def moment(self, step: int) -> int:
        """Number a step so that later incarnations and generations have higher numbers."""
        # stamps that an earlier incarnation or generation left in shared memory must not count for this step
        return (self._incarnation << 12 | self._generation) << 34 | step

    # Exchanges: each partition sends the lead a value, and gets the combined value of all. They are numbered within a
    # generation, so that an old message does not count for a new exchange.

    def agree(self, tick: int, wait: Callable[[], Steps[None]]) -> Steps[tuple[int, bool]]:
        """Exchange the rounds of the partitions' parameters; returns the highest, and whether all have it."""
        now = self._next_exchange()

        def highest(parts: Sequence[partitioning.AtRound]) -> partitioning.AtRound:
            ticks = {part.tick for part in parts}
            return partitioning.AtRound(*now, max(ticks), len(ticks) == 1)

        whole = yield from self._of_all(partitioning.AtRound(*now, tick), highest, wait)
        return whole.tick, whole.settled

    def whole_norm(self, norm: float, wait: Callable[[], Steps[None]]) -> Steps[float]:
        """Exchange the norms of the partitions' gradients; returns the norm of the whole gradient."""
        now = self._next_exchange()
        whole = yield from self._of_all(
            partitioning.PartNorm(*now, norm),
            lambda parts: partitioning.PartNorm(*now, math.hypot(*(part.norm for part in parts))),
            wait,
        )
        return whole.norm

    def whole_squares(self, squares: Squares, wait: Callable[[], Steps[None]]) -> Steps[Squares]:
        """Exchange the squared norms of parts of cut layers; returns those of whole layers."""
        now = self._next_exchange()
        whole = yield from self._of_all(
            grouping.PartSquares(*now, squares),
            lambda parts: grouping.PartSquares(*now, added(part.of for part in parts)),
            wait,
        )
        return whole.of

    def _next_exchange(self) -> tuple[int, int]:
        self._exchange += 1
        return self._generation, self._exchange

    def _of_all(
        self, part: Part, summed: Callable[[Sequence[Part]], Part], wait: Callable[[], Steps[None]]
    ) -> Steps[Part]:
        """Send a value to the lead; returns the combined value of all."""
        if self.follows:
            yield Send(self.superior, part)
            [whole] = yield from self._parts_of(type(part), [self.superior], wait)
            return whole
        parts = [part]
        parts += yield from self._parts_of(type(part), self.followers, wait)
        whole = summed(parts)
        yield from self.tell(whole)
        return whole

    def _parts_of(self, kind: type[Part], others: Sequence[str], wait: Callable[[], Steps[None]]) -> Steps[list[Part]]:
        """Wait for the others' messages of this exchange, and return them."""
        while away := [role for role in others if not self._is_heard(role)]:
            self._unheard = away
            yield from wait()
        self._unheard = ()
        return [part for role in others if isinstance(part := self._parts[role], kind)]

    def _is_heard(self, role: str) -> bool:
        part = self._parts.get(role)
        return part is not None and (part.generation, part.exchange) == (self._generation, self._exchange)

    # the lead

    def tell(self, message: Message, awaited: bool = False) -> list[Send]:
        """Send the followers a message; where it is `awaited`, each is busy until it is `done`."""
        if awaited:
            self._awaited = {*self.followers} - self.left
        return [Send(role, message) for role in self.followers]

    def ask(self, message: Message, answer: type[Message]) -> list[Send]:
        """Send the followers an order; each is busy until it answers."""
        self._answer = answer
        return self.tell(message, awaited=True)

    def welcome(self, welcome: membership.Welcome) -> list[Send]:
        """Pass on the shards' addresses; each follower that initialises its shards is busy until then."""
        self._lives = lives_of(welcome)
        return self.tell(welcome, awaited=welcome.initialise)

    def deal(self, batch: Batch) -> list[Send]:
        return self.tell(dealing.Deal(Portion(batch.epoch, batch.index, 1)))

    def push(self, clock: int) -> dict[str, Send]:
        """Have the followers push their parts of a push."""
        return {order.to: order for order in self.tell(partitioning.PushPart(clock))}

    def done(self, who: str) -> None:
        """Note that a follower has carried out the order."""
        self._awaited.discard(who)


def lives_of(welcome: membership.Welcome) -> tuple[int, ...]:
    """Return the incarnation of each shard in a welcome."""
    return tuple(place.incarnation for place in welcome.shards)
