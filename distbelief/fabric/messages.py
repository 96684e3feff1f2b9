"""Reductions whose pieces are messages, on any transport.

Each bucket has its own schedule and progress. A piece for a later step is kept until then. Nothing is sent here: the
replica's story sends what `outgoing` returns.
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
    """Flat vector of a rank; ranges are in bytes."""

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        """Return a copy of a range."""
        ...

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        """Add bytes to a range, or replace it."""


class Messages:
    """One rank's part in the reductions of a group."""

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
        """Return the ranks with which this one exchanges pieces."""
        steps = [step for steps in self._steps for step in steps]
        sends = {move.target for step in steps for move in step.sends}
        return sends | {move.source for step in steps for move in step.receives}

    def begin_round(self, number: int) -> None:
        """Begin a round, and drop what remains of an earlier one."""
        self.round, self._missing = number, len(self._buckets)
        self._players = {}

    def ready(self, bucket: int) -> None:
        player = self._players[bucket] = SchedulePlayer(self, bucket, self._steps[bucket])
        self._missing -= player.begin()

    def receive(self, sender: str, piece: ReducedPiece) -> None:
        """Handle a piece that has arrived."""
        self._kept.setdefault((piece.round, piece.bucket, piece.step), {})[sender, piece.start] = piece.data
        player = self._players.get(piece.bucket) if piece.round == self.round else None
        if player is not None and player.step is not None:
            self._missing -= player.advance()

    def reduce(self) -> bool | None:
        return True if not self._missing else None

    def outgoing(self) -> list[Send]:
        """Return the messages to send since the last call."""
        sends, self._outgoing = self._outgoing, []
        return sends

    def waits_for(self) -> list[str]:
        """Return the members whose pieces are missing."""
        missing = set()
        for bucket, player in self._players.items():
            if (step := player.step) is not None:
                here = self._kept.get((self.round, bucket, step.number), {})
                missing |= {move.source for move in step.receives if self._key(bucket, move) not in here}
        return [self._members[rank] for rank in sorted(missing)]

    # called by the player

    def post(self, vector: int, step: RankStep) -> None:
        """Copy the leaving pieces, so that arrivals may be added in their places at once."""
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
