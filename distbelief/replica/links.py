"""A replica's links to its shards: where they are, which are lost, and what was asked of each and not answered yet.

A shard that comes again is asked again what it has not answered. On the direct path the first question may still be
answered then, since the memory outlives the shard's process. So each fetch has a number, and a new one when it is asked
again: an answer to a question that nobody asks any more counts for nothing.
"""

from __future__ import annotations

from itertools import count
from typing import NoReturn

import msgspec

from distbelief.core import roles
from distbelief.core.conversations import membership, pushing
from distbelief.core.effects import Arrival, Connect, Payload, Send
from distbelief.core.events import Lost
from distbelief.core.messages import Address, Message
from distbelief.core.protocol import ANSWERS
from distbelief.errors import JobFailed, LayoutError, LocalProtocolError, UsageError
from distbelief.replica.steps import Steps
from distbelief.sharding.layout import Range


class ShardLinks:
    """The shards as one replica, or the evaluator, sees them.

    Args:
        role: whose links they are.
        superior: who knows where shards are.
    """

    def __init__(self, role: str, superior: str = roles.COORDINATOR) -> None:
        self.role, self._superior = role, superior
        self.lost: set[str] = set()
        self._places: dict[str, Address] = {}
        self._asked: dict[str, list[tuple[Message, Payload | None]]] = {}
        self.missing = 0
        """Answers that are still to come."""
        self._sought = False
        self._numbers = count(1)

    def ask(self, shard: str, message: Message, payload: Payload | None = None) -> Send:
        """Ask something of a shard that it will answer."""
        self._asked.setdefault(shard, []).append((message, payload))
        self.missing += 1
        return Send(shard, message, payload)

    def fetch(self, shard: str, landing: int, part: Range, tick: int = 0, incarnation: int = 0) -> Send:
        """Ask a shard for a range, which lands in a parameter vector."""
        return self.ask(shard, pushing.Fetch(landing, part.start, part.stop, tick, incarnation, next(self._numbers)))

    def answered(self, shard: str, answer: Message) -> bool:
        """Note an answer; whether its question was still asked."""
        asked, answers = self._asked.get(shard, []), ANSWERS[type(answer)]
        number = answer.number if type(answer) is pushing.Fetched else None
        for i, (message, _) in enumerate(asked):
            if type(message) is answers and (number is None or message.number == number):  # type: ignore[attr-defined]  # a Fetch, which is what a Fetched answers
                del asked[i]
                self.missing -= 1
                return True
        return False

    def waits_for_lives(self) -> str:
        """Name the shards whose next lives are waited for; "" where there are none."""
        return f"for the next life of {roles.named(sorted(self.lost, key=roles.index_of))}" if self.lost else ""

    def waits_for_answers(self) -> str:
        """Name the shards that have not answered; "" where all have."""
        asked = sorted((shard for shard, asked in self._asked.items() if asked), key=roles.index_of)
        return f"for parameters from {roles.named(asked)}" if asked else ""

    def asks(self, shard: str, kind: type[Message]) -> bool:
        """Return whether a shard has been asked something of a kind, and has not answered."""
        return any(type(message) is kind for message, _ in self._asked.get(shard, ()))

    def lose(self, shard: str, event: Lost) -> None:
        """A link is gone; that of a life which has been replaced by another is not missed."""
        known = self._places.get(shard)
        if known is not None and not 0 <= event.incarnation < known.incarnation:
            self.lost.add(shard)

    def seek(self) -> list[Send]:
        """Ask where the lost ones are now, once."""
        if self._sought or not self.lost:
            return []
        self._sought = True
        lost = tuple((shard, self._places[shard].incarnation) for shard in sorted(self.lost, key=roles.index_of))
        return [Send(self._superior, membership.Rejoin(lost))]

    def reach(self, welcome: membership.Welcome) -> Steps[list[str]]:
        """Open the links that a welcome names and that are not there, and ask for those that cannot be opened; returns
        to whom there is one now.

        Raises:
            JobFailed: a link that broke, to a shard that lives: what it has heard of us is not known.
        """
        self._sought = False
        reached = []
        for shard, place in _named(welcome, roles.partition_of(self.role) if roles.is_replica(self.role) else None):
            before = self._places.get(shard)
            if before is not None and shard not in self.lost and place.incarnation <= before.incarnation:
                continue
            if not (yield Connect(shard, place)):
                self._places.setdefault(shard, place)
                self.lost.add(shard)
            elif before is not None and place.incarnation <= before.incarnation:
                raise JobFailed(
                    f"{self.role}: its link to {shard} broke, and {shard} is still there; a new life of {self.role} "
                    "begins without it"
                )
            else:
                self._places[shard] = place
                self.lost.discard(shard)
                reached.append(shard)
        yield from self.seek()
        return reached

    def lives(self) -> tuple[int, ...]:
        """Life of each shard to which it is linked."""
        return tuple(place.incarnation for place in self._places.values())

    def incarnation_of(self, shard: str) -> int:
        """Return the life of a shard to which it is linked."""
        return self._places[shard].incarnation

    def stale(self, arrival: Arrival) -> bool:
        """Say whether a `Pushed` is of a life of a shard that was replaced: its push goes to the next life again."""
        event = arrival.event
        return type(event) is pushing.Pushed and event.version.incarnation < self._places[arrival.sender].incarnation

    def forget(self, shard: str) -> None:
        """Expect no answers from a shard any more."""
        self.missing -= len(self._asked.pop(shard, ()))

    def again(self, shard: str) -> list[Send]:
        """Ask a shard again what it has not answered."""
        asked = self._asked.get(shard, [])
        for i, (message, payload) in enumerate(asked):
            if isinstance(message, pushing.Fetch):
                asked[i] = msgspec.structs.replace(message, number=next(self._numbers)), payload
        return [Send(shard, message, payload) for message, payload in asked]


def _named(welcome: membership.Welcome, home: int | None) -> list[tuple[str, Address]]:
    """The shards of a home, or all, and where they are."""
    own = zip(welcome.plan.assignments, welcome.shards, strict=False)  # none, where no shard holds anything
    return [
        (roles.shard(i), place)
        for i, (held, place) in enumerate(own)
        if home is None or welcome.plan.layout.home_of(held.moving) == home
    ]


def refusal(event: membership.Refused) -> LayoutError | UsageError:
    """The error for a role that may not take part."""
    return (LayoutError if event.layout else UsageError)(event.reason)


def unwanted(role: str, arrival: Arrival) -> NoReturn:
    """End a role that was told what it cannot go on with.

    Raises:
        UsageError, LayoutError: it may not take part.
        JobFailed: somebody is gone whom it needs, or the job was ended.
        LocalProtocolError: it has no use for that.
    """
    event = arrival.event
    if isinstance(event, membership.Refused):
        raise refusal(event)
    if isinstance(event, Lost):
        raise JobFailed(f"{role}: {arrival.sender} is gone ({event.reason})")
    if isinstance(event, membership.Stop):
        raise JobFailed(f"{role}: the job was ended: {event.reason}")
    raise LocalProtocolError(f"{role} has no use for {type(event).__name__} from {arrival.sender}")
