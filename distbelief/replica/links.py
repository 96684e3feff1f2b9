"""A replica's links to its shards: the addresses of shards, which links are lost, and the open requests.

A new incarnation of a shard gets the open requests again. On the direct path the old request may still be answered
then, since the memory outlives the shard's process. So each fetch has a number, and another when it is repeated: an
answer to an earlier number counts for nothing.
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


# A shard is linked, or lost after its link breaks and until a welcome names its next incarnation. Incarnations are
# compared, and deaths not counted: news of one death may come more than once, before or after the next incarnation.
class ShardLinks:
    """Links of one replica, or of the evaluator, to the shards."""

    def __init__(self, role: str, superior: str = roles.COORDINATOR) -> None:
        self.role, self._superior = role, superior
        self.lost: set[str] = set()
        self._places: dict[str, Address] = {}
        self._questions: dict[str, list[tuple[Message, Payload | None]]] = {}
        """Open requests to each shard."""
        self.missing = 0
        """Number of open requests."""
        self._sought = False
        """True while a `Rejoin` is not answered."""
        self._numbers = count(1)

    def ask(self, shard: str, message: Message, payload: Payload | None = None) -> Send:
        """Make a request to a shard, which it will answer."""
        self._questions.setdefault(shard, []).append((message, payload))
        self.missing += 1
        return Send(shard, message, payload)

    def fetch(self, shard: str, landing: int, part: Range, tick: int = 0, incarnation: int = 0) -> Send:
        """Fetch a range from a shard into a parameter vector."""
        return self.ask(shard, pushing.Fetch(landing, part.start, part.stop, tick, incarnation, next(self._numbers)))

    def answered(self, shard: str, answer: Message) -> bool:
        """Note an answer; returns whether its request was open."""
        questions, kind = self._questions.get(shard, []), ANSWERS[type(answer)]
        number = answer.number if type(answer) is pushing.Fetched else None
        for i, (message, _) in enumerate(questions):
            if type(message) is kind and (number is None or message.number == number):  # type: ignore[attr-defined]  # a Fetch
                del questions[i]
                self.missing -= 1
                return True
        return False

    def waits_for_lives(self) -> str:
        """Name the lost shards that the role waits for; "" for none."""
        return f"for the next life of {roles.named(sorted(self.lost, key=roles.index_of))}" if self.lost else ""

    def waits_for_answers(self) -> str:
        """Name the shards with open requests; "" for none."""
        silent = sorted((shard for shard, questions in self._questions.items() if questions), key=roles.index_of)
        return f"for parameters from {roles.named(silent)}" if silent else ""

    def asks(self, shard: str, kind: type[Message]) -> bool:
        """Return whether a request of a kind to a shard is open."""
        return any(type(message) is kind for message, _ in self._questions.get(shard, ()))

    def lose(self, shard: str, event: Lost) -> None:
        """Note a lost link, unless it was to an earlier incarnation."""
        known = self._places.get(shard)
        if known is not None and not 0 <= event.incarnation < known.incarnation:
            self.lost.add(shard)

    def seek(self) -> list[Send]:
        """Ask for the addresses of lost shards, once."""
        if self._sought or not self.lost:
            return []
        self._sought = True
        lost = tuple((shard, self._places[shard].incarnation) for shard in sorted(self.lost, key=roles.index_of))
        return [Send(self._superior, membership.Rejoin(lost))]

    def reach(self, welcome: membership.Welcome) -> Steps[list[str]]:
        """Open the missing links that a welcome names; return the shards with new links.

        A broken link to a live shard raises a `JobFailed`: the replica must start again.
        """
        # It is unknown which messages on a broken link the shard has taken, and another link to the same incarnation
        # could not tell. So this incarnation of the replica ends, and the next counts its pushes from 1.
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
                    f"{self.role}: its link to {shard} broke, and {shard} is still there; {self.role} starts again "
                    "with another link"
                )
            else:
                self._places[shard] = place
                self.lost.discard(shard)
                reached.append(shard)
        yield from self.seek()
        return reached

    def stale(self, arrival: Arrival) -> bool:
        """Return whether an arrival is an acknowledgement by an earlier incarnation of a shard."""
        # the new incarnation may lack that push, which stays owed and is pushed again
        event = arrival.event
        return type(event) is pushing.Pushed and event.version.incarnation < self._places[arrival.sender].incarnation

    def forget(self, shard: str) -> None:
        """Drop the open requests to a shard."""
        self.missing -= len(self._questions.pop(shard, ()))

    def again(self, shard: str) -> list[Send]:
        """Repeat the open requests to a shard."""
        questions = self._questions.get(shard, [])
        for i, (message, payload) in enumerate(questions):
            if isinstance(message, pushing.Fetch):
                questions[i] = msgspec.structs.replace(message, number=next(self._numbers)), payload
        return [Send(shard, message, payload) for message, payload in questions]


def _places_of(welcome: membership.Welcome, partition: int | None) -> list[tuple[str, Address]]:
    """Return the shards of a partition, or all, with their addresses."""
    places = zip(welcome.plan.assignments, welcome.shards, strict=False)  # there are none where the shards hold nothing
    return [
        (roles.shard(i), place)
        for i, (held, place) in enumerate(places)
        if partition is None or welcome.plan.layout.partition_of(held.moving) == partition
    ]


def unwanted(role: str, arrival: Arrival) -> NoReturn:
    """Raise the error of an arrival with which a role cannot continue: a refusal, a loss, the end of the job."""
    event = arrival.event
    if isinstance(event, membership.Refused):
        raise (LayoutError if event.layout else UsageError)(event.reason)
    if isinstance(event, Lost):
        raise JobFailed(f"{role}: {arrival.sender} is gone ({event.reason})")
    if isinstance(event, membership.Stop):
        raise JobFailed(f"{role}: the job was ended: {event.reason}")
    raise LocalProtocolError(f"{role} cannot take {type(event).__name__} from {arrival.sender}")
