"""A replica's links to its shards: where they are, which are lost, and what was asked of each and not answered yet.

A shard that comes again is asked again what it has not answered. On the direct path the first question may still be
answered then, since the memory outlives the shard's process. So each fetch has a number, and a new one when it is asked
again: an answer to a question that is no longer asked counts for nothing.
"""

from __future__ import annotations

from itertools import count
from typing import NoReturn

import msgspec

from distbelief.core import roles
from distbelief.core.conversations import membership, pushing
from distbelief.core.effects import Arrival, Connect, Payload, Send, Steps
from distbelief.core.events import Lost
from distbelief.core.messages import Address, Message
from distbelief.core.protocol import ANSWERS
from distbelief.errors import JobFailed, LayoutError, LocalProtocolError, UsageError
from distbelief.sharding.layout import Range


# A shard is linked, or lost from when its link breaks until a welcome names its next life. Lives are compared, not
# deaths counted: the same death may be heard of more than once, before or after the next life.
class ShardLinks:
    """The shards as one replica, or the evaluator, sees them.

    Args:
        role: of the replica.
        superior: role that knows where shards are.
    """

    def __init__(self, role: str, superior: str = roles.COORDINATOR) -> None:
        self.role, self._superior = role, superior
        self.lost: set[str] = set()
        self._places: dict[str, Address] = {}
        self._questions: dict[str, list[tuple[Message, Payload | None]]] = {}
        """Questions to each shard that it has not answered."""
        self.missing = 0
        """Number of answers that are still to come."""
        self._sought = False
        """True while the superior has been asked where the lost ones are, and has not answered."""
        self._numbers = count(1)

    def ask(self, shard: str, message: Message, payload: Payload | None = None) -> Send:
        """Ask something of a shard that it will answer."""
        self._questions.setdefault(shard, []).append((message, payload))
        self.missing += 1
        return Send(shard, message, payload)

    def fetch(self, shard: str, landing: int, part: Range, tick: int = 0, incarnation: int = 0) -> Send:
        """Ask a shard for a range, which lands in a parameter vector."""
        return self.ask(shard, pushing.Fetch(landing, part.start, part.stop, tick, incarnation, next(self._numbers)))

    def answered(self, shard: str, answer: Message) -> bool:
        """Note an answer; returns whether its question was still asked."""
        questions, kind = self._questions.get(shard, []), ANSWERS[type(answer)]
        number = answer.number if type(answer) is pushing.Fetched else None
        for i, (message, _) in enumerate(questions):
            if type(message) is kind and (number is None or message.number == number):  # type: ignore[attr-defined]  # a Fetch, which is what a Fetched answers
                del questions[i]
                self.missing -= 1
                return True
        return False

    def waits_for_lives(self) -> str:
        """Name the shards whose next lives are waited for; "" where there are none."""
        return f"for the next life of {roles.named(sorted(self.lost, key=roles.index_of))}" if self.lost else ""

    def waits_for_answers(self) -> str:
        """Name the shards that have not answered; "" where all have."""
        silent = sorted((shard for shard, questions in self._questions.items() if questions), key=roles.index_of)
        return f"for parameters from {roles.named(silent)}" if silent else ""

    def asks(self, shard: str, kind: type[Message]) -> bool:
        """Return whether a shard has been asked something of a kind, and has not answered."""
        return any(type(message) is kind for message, _ in self._questions.get(shard, ()))

    def lose(self, shard: str, event: Lost) -> None:
        """Note that a link is gone, unless its life has been replaced by another."""
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
        """Open the links that a welcome names and that are not there.

        Returns:
            The shards to which there is a new link.

        Raises:
            JobFailed: a link to a shard broke that lives.
        """
        # Nobody knows which messages on a broken link the shard has taken, and another link to the same life could not
        # tell. So this life of the replica ends, and the next counts its pushes from 1.
        self._sought = False
        reached = []
        partition = roles.partition_of(self.role) if roles.is_replica(self.role) else None
        for shard, place in _places_of(welcome, partition):
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

    def stale(self, arrival: Arrival) -> bool:
        """Return whether an arrival is an acknowledgement of a life of a shard that was replaced."""
        # the next life may lack that push, so it stays owed and is pushed again
        event = arrival.event
        return type(event) is pushing.Pushed and event.version.incarnation < self._places[arrival.sender].incarnation

    def forget(self, shard: str) -> None:
        """Expect no answers from a shard any more."""
        self.missing -= len(self._questions.pop(shard, ()))

    def again(self, shard: str) -> list[Send]:
        """Ask a shard again what it has not answered."""
        questions = self._questions.get(shard, [])
        for i, (message, payload) in enumerate(questions):
            if isinstance(message, pushing.Fetch):
                questions[i] = msgspec.structs.replace(message, number=next(self._numbers)), payload
        return [Send(shard, message, payload) for message, payload in questions]


def _places_of(welcome: membership.Welcome, partition: int | None) -> list[tuple[str, Address]]:
    """Return the shards of a partition, or all, and where they are."""
    places = zip(welcome.plan.assignments, welcome.shards, strict=False)  # none, where no shard holds anything
    return [
        (roles.shard(i), place)
        for i, (held, place) in enumerate(places)
        if partition is None or welcome.plan.layout.partition_of(held.moving) == partition
    ]


def refusal(event: membership.Refused) -> LayoutError | UsageError:
    """Make the error of a role that may not take part."""
    return (LayoutError if event.layout else UsageError)(event.reason)


def unwanted(role: str, arrival: Arrival) -> NoReturn:
    """End a role that was told something with which it cannot go on.

    Raises:
        UsageError, LayoutError: it may not take part.
        JobFailed: a role is gone that it needs, or the job was ended.
        LocalProtocolError: it has no use for such a message.
    """
    event = arrival.event
    if isinstance(event, membership.Refused):
        raise refusal(event)
    if isinstance(event, Lost):
        raise JobFailed(f"{role}: {arrival.sender} is gone ({event.reason})")
    if isinstance(event, membership.Stop):
        raise JobFailed(f"{role}: the job was ended: {event.reason}")
    raise LocalProtocolError(f"{role} has no use for {type(event).__name__} from {arrival.sender}")
