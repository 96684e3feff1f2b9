"""The player of schedules whose pieces are messages: what one rank of a group sends and waits for, on any transport.

Every bucket has a schedule of its own, and goes through it at its own pace. What comes for a step that this rank is not at yet is kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from distbelief.core.buckets import Bucket
from distbelief.core.conversations.grouping import Piece
from distbelief.core.effects import Phantom, Send
from distbelief.replica.whole import Whole
from distbelief.schedules.allreduce import broadcast, by_host, schedule
from distbelief.schedules.schedule import Move, RankStep, Schedule


def schedule_of(bucket: Bucket, algorithm: str, ranks: int, per_host: int) -> Schedule:
    """The schedule of a bucket; one that is not added up goes from the first rank to all."""
    if not bucket.adds:
        return broadcast(ranks, bucket.length)
    return schedule(algorithm, ranks, bucket.length, by_host(ranks, per_host) if algorithm.startswith("hierarchical") else ())


class Pieces:
    """One rank's part in the reductions of a group.

    Args:
        group: its number.
        members: its roles, by rank.
        rank: of this replica.
        buckets: of the flat vector.
        schedules: one for each bucket.
        whole: holds the vector.
    """

    def __init__(self, group: int, members: Sequence[str], rank: int, buckets: Sequence[Bucket], schedules: Sequence[Schedule], whole: Whole) -> None:
        self.group, self.members, self.rank, self.buckets = group, members, rank, buckets
        self.round = 0
        self.sent = self.received = 0
        """Bytes since somebody last set them to 0."""
        self._whole = whole
        self._turns = [one.steps_of(rank) for one in schedules]
        self._at = [len(turns) for turns in self._turns]
        self._begun = [False] * len(buckets)
        self._kept: dict[tuple[int, int, int], dict[tuple[str, int], bytes]] = {}

    @property
    def partners(self) -> set[int]:
        """The ranks with which this one exchanges anything."""
        turns = [turn for turns in self._turns for turn in turns]
        return {t.target for turn in turns for t in turn.sends} | {t.source for turn in turns for t in turn.receives}

    @property
    def done(self) -> bool:
        """Whether every bucket of the round is done."""
        return all(at == len(turns) for at, turns in zip(self._at, self._turns, strict=True))

    def next_round(self, number: int) -> None:
        """A round begins."""
        self.round = number
        self._at, self._begun = [0] * len(self.buckets), [False] * len(self.buckets)

    def begin(self, bucket: int) -> list[Send]:
        """The gradient of a bucket is in the vector."""
        self._begun[bucket] = True
        return self._send(bucket) + self._advance(bucket)

    def take(self, sender: str, piece: Piece) -> list[Send]:
        """A piece has come."""
        self._kept.setdefault((piece.round, piece.bucket, piece.step), {})[sender, piece.start] = piece.data
        return self._advance(piece.bucket) if piece.round == self.round and self._begun[piece.bucket] else []

    def waits_for(self) -> list[str]:
        """Those whose pieces are missing."""
        missing = set()
        for number, (at, turns) in enumerate(zip(self._at, self._turns, strict=True)):
            if at < len(turns) and self._begun[number]:
                here = self._kept.get((self.round, number, turns[at].number), {})
                missing |= {t.source for t in turns[at].receives if (self.members[t.source], self._byte(number, t)) not in here}
        return [self.members[rank] for rank in sorted(missing)]

    def _byte(self, bucket: int, transfer: Move) -> int:
        return self.buckets[bucket].start + transfer.start * self.buckets[bucket].item

    def _send(self, number: int) -> list[Send]:
        """What leaves at the turn at which a bucket is; it is copied here, so that what comes may be added at once."""
        if self._at[number] == len(self._turns[number]):
            return []
        bucket, turn = self.buckets[number], self._turns[number][self._at[number]]
        sends = []
        for transfer in turn.sends:
            start, size = self._byte(number, transfer), transfer.length * bucket.item
            data = self._whole.read(bucket, start, start + size)
            self.sent += size
            piece = Piece(self.group, self.round, number, turn.number, start, transfer.adds, data)
            sends.append(Send(self.members[transfer.target], piece, Phantom(size)))
        return sends

    def _advance(self, number: int) -> list[Send]:
        """Take turns as long as all is here that they need."""
        sends: list[Send] = []
        while self._at[number] < len(self._turns[number]):
            turn = self._turns[number][self._at[number]]
            here = self._kept.get((self.round, number, turn.number), {})
            if len(here) < len(turn.receives):
                break
            self._add(number, turn, here)
            self._kept.pop((self.round, number, turn.number), None)
            self._at[number] += 1
            sends += self._send(number)
        return sends

    def _add(self, number: int, turn: RankStep, here: dict[tuple[str, int], bytes]) -> None:
        for transfer in turn.receives:
            start = self._byte(number, transfer)
            self._whole.write(self.buckets[number], start, here[self.members[transfer.source], start], transfer.adds)
            self.received += transfer.length * self.buckets[number].item
