"""Reductions whose pieces are messages: what one rank of a group sends and waits for, on any transport.

Every bucket has a schedule of its own, and goes through it at its own pace. What comes for a step that this rank is not
at yet is kept for it. Nothing here sends: whoever plays the role does, from `outgoing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distbelief.core.conversations.grouping import ReducedPiece
from distbelief.core.effects import Phantom, Send
from distbelief.fabric.base import SchedulePlayer
from distbelief.fabric.buckets import Bucket
from distbelief.schedules.schedule import Move, RankStep, Schedule


class Vector(Protocol):
    """The flat vector of a rank; ranges are in bytes."""

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        """A copy of a range."""
        ...

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        """Add to a range, or put there."""


class Messages:
    """One rank's part in the reductions of a group.

    Args:
        group: its number.
        members: its roles, by rank.
        rank: of this replica.
        buckets: of the flat vector.
        schedules: one for each bucket.
        vector: what is reduced.
    """

    def __init__(
        self,
        group: int,
        members: Sequence[str],
        rank: int,
        buckets: Sequence[Bucket],
        schedules: Sequence[Schedule],
        vector: Vector,
    ) -> None:
        self.round = 0
        self._group, self._members, self._buckets, self._vector = group, members, buckets, vector
        self._steps = [schedule.steps_of(rank) for schedule in schedules]
        self._players: dict[int, SchedulePlayer[int]] = {}
        self._missing = 0
        self._kept: dict[tuple[int, int, int], dict[tuple[str, int], bytes]] = {}
        self._outgoing: list[Send] = []

    @property
    def partners(self) -> set[int]:
        """The ranks with which this one exchanges anything."""
        steps = [step for steps in self._steps for step in steps]
        sends = {move.target for step in steps for move in step.sends}
        return sends | {move.source for step in steps for move in step.receives}

    def begin_round(self, number: int) -> None:
        """A round begins; whatever is left of another is dropped."""
        self.round, self._missing = number, len(self._buckets)
        self._players = {}

    def ready(self, bucket: int) -> None:
        player = self._players[bucket] = SchedulePlayer(self, bucket, self._steps[bucket])
        self._missing -= player.begin()

    def receive(self, sender: str, piece: ReducedPiece) -> None:
        """A piece has come."""
        self._kept.setdefault((piece.round, piece.bucket, piece.step), {})[sender, piece.start] = piece.data
        player = self._players.get(piece.bucket) if piece.round == self.round else None
        if player is not None and player.step is not None:
            self._missing -= player.advance()

    def reduce(self) -> bool | None:
        return True if not self._missing else None

    def outgoing(self) -> list[Send]:
        """Take what is to be sent since the last call."""
        sends, self._outgoing = self._outgoing, []
        return sends

    def waits_for(self) -> list[str]:
        """Those whose pieces are missing."""
        missing = set()
        for bucket, player in self._players.items():
            if (step := player.step) is not None:
                here = self._kept.get((self.round, bucket, step.number), {})
                missing |= {move.source for move in step.receives if self._key(bucket, move) not in here}
        return [self._members[rank] for rank in sorted(missing)]

    # what the player asks for

    def post(self, vector: int, step: RankStep) -> None:
        """Send what leaves; it is copied here, so that what comes may be added at once."""
        bucket = self._buckets[vector]
        for move in step.sends:
            start, size = self._byte(vector, move), move.length * bucket.item
            data = self._vector.read(bucket, start, start + size)
            piece = ReducedPiece(self._group, self.round, vector, step.number, start, move.adds, data)
            self._outgoing.append(Send(self._members[move.target], piece, Phantom(size)))

    def take(self, vector: int, step: RankStep) -> bool:
        bucket, at = self._buckets[vector], (self.round, vector, step.number)
        here = self._kept.get(at, {})
        if len(here) < len(step.receives):
            return False
        for move in step.receives:
            key = self._key(vector, move)
            self._vector.write(bucket, key[1], here[key], move.adds)
        self._kept.pop(at, None)
        return True

    def _byte(self, vector: int, move: Move) -> int:
        return self._buckets[vector].start + move.start * self._buckets[vector].item

    def _key(self, vector: int, move: Move) -> tuple[str, int]:
        return self._members[move.source], self._byte(vector, move)
