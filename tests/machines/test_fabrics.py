"""Fabrics that need no process keep their promises; and the suite that says so refuses one that breaks any."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from ranks import Vector, in_threads

from distbelief.core.conversations.grouping import ReducedPiece
from distbelief.fabric.base import schedule_of
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.memory import SharedMemory
from distbelief.fabric.messages import Messages
from distbelief.schedules.allreduce import ALGORITHMS
from distbelief.testing import Side, check_fabric, fabrics


class Posted:
    """Messages whose role is played here: pieces go through queues."""

    def __init__(
        self,
        queues: Sequence[SimpleQueue[tuple[str, ReducedPiece]]],
        rank: int,
        algorithm: str,
        size: int,
        found: Sequence[Bucket],
    ) -> None:
        self.slot = torch.zeros(size, dtype=torch.uint8)
        self._names, self._queues, self._rank = [f"replica {i}" for i in range(len(queues))], queues, rank
        schedules = [schedule_of(bucket, algorithm, len(queues), 2) for bucket in found]
        self._messages = Messages(0, self._names, rank, found, schedules, Vector(self.slot))
        self._round, self._begun = 0, False

    def ready(self, bucket: int) -> None:
        if not self._begun:
            self._begun = True
            self._messages.begin_round(self._round)
        self._messages.ready(bucket)
        self._send()

    def reduce(self) -> bool | None:
        try:
            while True:
                self._messages.receive(*self._queues[self._rank].get_nowait())
        except Empty:
            self._send()
        if self._messages.reduce():
            self._round, self._begun = self._round + 1, False
            return True
        return None

    def _send(self) -> None:
        for send in self._messages.outgoing():
            self._queues[self._names.index(send.to)].put((self._names[self._rank], send.message))


@pytest.mark.parametrize("ranks", some([3, 1, 2, 4], SEEDS // 16))
@pytest.mark.long
def test_messages_are_a_fabric(ranks: int) -> None:
    made: dict[str, list[SimpleQueue[tuple[str, ReducedPiece]]]] = {
        name: [SimpleQueue() for _ in range(ranks)] for name in ALGORITHMS
    }

    def rank(own: int, meet: Callable[[], object]) -> None:
        def side(algorithm: str, size: int, found: Sequence[Bucket]) -> Side:
            posted = Posted(made[algorithm], own, algorithm, size, found)
            return Side(posted, posted.slot, posted.slot)

        check_fabric(side, own, ranks, meet, ALGORITHMS)

    in_threads(ranks, rank)


@pytest.fixture
def segment() -> Iterator[int]:
    made = os.memfd_create("test")
    yield made
    os.close(made)


@pytest.mark.parametrize("ranks", some([3, 1, 2, 4], SEEDS // 16))
@pytest.mark.long
def test_shared_memory_is_a_fabric(segment: int, ranks: int) -> None:
    def rank(own: int, meet: Callable[[], object]) -> None:
        def side(_: str, size: int, found: Sequence[Bucket]) -> Side:
            memory = SharedMemory(segment, own, ranks)
            slot, total = memory.open(size, found)
            memory.meet(0, range(ranks))
            return Side(memory, slot, total)

        check_fabric(side, own, ranks, meet, ["direct"])

    in_threads(ranks, rank)


class Plain:
    """A fabric among threads: what is ready is copied, and who is asked looks whether all is there."""

    def __init__(self, group: Group, rank: int, size: int, found: Sequence[Bucket]) -> None:
        self.group, self.rank, self.found = group, rank, found
        self.slot, self.total = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        self.round = 0
        group.sides.append(self)

    def ready(self, bucket: int) -> None:
        with self.group.lock:
            self.group.brought[self.round, bucket, self.rank] = self.brings(bucket)

    def brings(self, bucket: int) -> torch.Tensor:
        return self.view(self.slot, bucket).clone()

    def view(self, vector: torch.Tensor, bucket: int) -> torch.Tensor:
        one = self.found[bucket]
        return vector[one.start : one.stop].view(getattr(torch, one.dtype))

    def reduce(self) -> bool | None:
        with self.group.lock:
            if self.group.left:
                return False
            if not self.all_there():
                return None
            for bucket in range(len(self.found)):
                self.view(self.total, bucket).copy_(
                    self.make(bucket, [self.group.brought[self.round, bucket, one] for one in self.order()])
                )
            self.round += 1
            return True

    def all_there(self) -> bool:
        wanted = [(self.round, bucket, rank) for bucket in range(len(self.found)) for rank in range(self.group.ranks)]
        return all(key in self.group.brought for key in wanted)

    def order(self) -> list[int]:
        return [*range(self.group.ranks)]

    def make(self, bucket: int, parts: list[torch.Tensor]) -> torch.Tensor:
        if not self.found[bucket].adds:
            return parts[0]
        whole = parts[0].clone()
        for part in parts[1:]:
            whole += part
        return whole

    def leave(self) -> None:
        with self.group.lock:
            self.group.left = True


class Group:
    """What the threads have in common."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.left, self.lock = ranks, False, threading.RLock()
        self.brought: dict[tuple[int, int, int], torch.Tensor] = {}
        self.sides: list[Plain] = []


class LosesTheLast(Plain):
    def make(self, bucket: int, parts: list[torch.Tensor]) -> torch.Tensor:
        return super().make(bucket, parts[:-1] if self.found[bucket].adds else parts)


class TakesTheLast(Plain):
    def make(self, bucket: int, parts: list[torch.Tensor]) -> torch.Tensor:
        return super().make(bucket, parts if self.found[bucket].adds else parts[::-1])


class AddsItsOwnFirst(Plain):
    def make(self, bucket: int, parts: list[torch.Tensor]) -> torch.Tensor:
        if not self.found[bucket].adds:
            return parts[0]
        return super().make(bucket, [parts[self.rank], *parts[: self.rank], *parts[self.rank + 1 :]])


class ReduceWaits(Plain):
    def reduce(self) -> bool | None:
        for _ in range(40):
            if (done := super().reduce()) is not None:
                return done
            stop.wait(0.05)
        return None


class ReadyWaits(Plain):
    def ready(self, bucket: int) -> None:
        super().ready(bucket)
        for _ in range(40):
            if self.all_there():
                return
            stop.wait(0.05)


class GoesByTheOrder(Plain):
    """What a rank makes ready first is taken for its first vector."""

    number = -1

    def ready(self, bucket: int) -> None:
        self.number = (self.number + 1) % len(self.found)
        held, place = self.brings(bucket), torch.zeros_like(self.view(self.slot, self.number))
        count = min(len(held), len(place))
        place[:count] = held[:count]
        with self.group.lock:
            self.group.brought[self.round, self.number, self.rank] = place


class IsDoneBeforeAllAreReady(Plain):
    def all_there(self) -> bool:
        return True

    def reduce(self) -> bool | None:
        with self.group.lock:
            for bucket in range(len(self.found)):
                for rank in range(self.group.ranks):
                    self.group.brought.setdefault(
                        (self.round, bucket, rank), torch.zeros_like(self.view(self.slot, bucket))
                    )
            return super().reduce()


class ReadsWhatIsGivenBack(Plain):
    """The first rank reads what others bring in their slots when these hold something else again."""

    brought = torch.empty(0)

    def brings(self, bucket: int) -> torch.Tensor:
        if bucket == 0:
            self.brought = self.view(self.slot, 0).clone()
        return self.view(self.slot, bucket)

    def reduce(self) -> bool | None:
        others = [side for side in self.group.sides if side is not self and isinstance(side, ReadsWhatIsGivenBack)]
        if self.rank == 0 and any(torch.equal(side.view(side.slot, 0), side.brought) for side in others):
            return None
        return super().reduce()


class WritesToOthers(Plain):
    """Who is first to have something new puts it where all others find it."""

    def ready(self, bucket: int) -> None:
        super().ready(bucket)
        for side in self.group.sides:
            if side is not self and self.round:
                self.view(side.total, bucket).zero_()


class WritesBeyond(Plain):
    def reduce(self) -> bool | None:
        done = super().reduce()
        if done:
            self.total[self.found[-1].stop] = 1
        return done


class SaysThatOneIsGone(Plain):
    def reduce(self) -> bool | None:
        return super().reduce() and self.round < 3


class TellsNobody(Plain):
    def leave(self) -> None:
        pass


stop = threading.Event()
BROKEN = {
    LosesTheLast: "is not the sum",
    TakesTheLast: "is not the first of all",
    AddsItsOwnFirst: "different bits",
    ReduceWaits: "reduce waited for another rank",
    ReadyWaits: "ready waited for another rank",
    GoesByTheOrder: "is not the",
    IsDoneBeforeAllAreReady: "before every rank has contributed",
    ReadsWhatIsGivenBack: "is not the sum|Tensor-likes are not close|other bits",
    WritesToOthers: "before its rank wrote anything new",
    WritesBeyond: "which belong to no vector",
    SaysThatOneIsGone: "says that a rank is gone, but none is",
    TellsNobody: "nobody learns that a rank has left",
}


def hold(kind: type[Plain], ranks: int) -> None:
    group = Group(ranks)

    def rank(own: int, meet: Callable[[], Any]) -> None:
        def side(_: str, size: int, found: Sequence[Bucket]) -> Side:
            plain = kind(group, own, size, found)
            return Side(plain, plain.slot, plain.total, plain.leave)

        check_fabric(side, own, ranks, meet, ["plain"])

    in_threads(ranks, rank)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.long
def test_the_suite_lets_a_plain_fabric_be(ranks: int) -> None:
    hold(Plain, ranks)


@pytest.mark.parametrize("kind", BROKEN, ids=[kind.__name__ for kind in BROKEN])
@pytest.mark.long
def test_the_suite_refuses_a_fabric_that_breaks_a_promise(monkeypatch: pytest.MonkeyPatch, kind: type[Plain]) -> None:
    monkeypatch.setattr(fabrics, "MOMENT_SECONDS", 0.5)
    monkeypatch.setattr(fabrics, "PATIENCE_SECONDS", 3.0)
    with pytest.raises(AssertionError, match=BROKEN[kind]):
        hold(kind, 3)
