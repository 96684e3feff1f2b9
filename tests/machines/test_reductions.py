"""The players of schedules give the sum on every rank, with the same bits: as messages in any order, and in one
memory.
"""

from __future__ import annotations

import os
import platform
import random
import threading
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distbelief as db
from distbelief.core.conversations import grouping
from distbelief.core.effects import Send
from distbelief.errors import UsageError
from distbelief.fabric.base import schedule_of
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.memory import SharedMemory, Window
from distbelief.fabric.messages import Messages
from distbelief.schedules.allreduce import FLAT
from distbelief.strategies.grouped.whole import Whole

SECONDS = 10.0
"""Most that a moment may take on a machine that does something else."""
NAMES = [*FLAT, "hierarchical", *(f"hierarchical:{inner}" for inner in FLAT)]


class Vector(Whole):
    """A vector of float32."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        return self.values[start // 4 : stop // 4].numpy().tobytes()

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        here = self.values[start // 4 : start // 4 + len(data) // 4]
        there = torch.frombuffer(bytearray(data), dtype=torch.float32)
        here.add_(there) if adds else here.copy_(there)


@given(st.sampled_from(NAMES), st.integers(1, 17), st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**31))
@pytest.mark.long
def test_pieces_that_arrive_in_any_order_are_summed(
    name: str, ranks: int, length: int, per_host: int, seed: int
) -> None:
    """Two buckets of two rounds; between two ranks messages keep their order, and nothing else is ordered."""
    chance = random.Random(seed)
    first = [torch.randn(length + 7, generator=torch.Generator().manual_seed(seed + rank)) for rank in range(ranks)]
    vectors = [Vector(values.clone()) for values in first]
    found = [Bucket(28, 4 * (length + 7), "float32"), Bucket(0, 28, "float32")]
    members = [f"replica {rank}" for rank in range(ranks)]
    schedules = [schedule_of(bucket, name, ranks, per_host) for bucket in found]
    players = [Messages(0, members, rank, found, schedules, vectors[rank]) for rank in range(ranks)]
    for number in range(2):
        links: dict[tuple[str, str], deque[grouping.ReducedPiece]] = {}

        def take(
            rank: int, sends: list[Send], links: dict[tuple[str, str], deque[grouping.ReducedPiece]] = links
        ) -> None:
            for send in sends:
                assert isinstance(send.message, grouping.ReducedPiece)
                links.setdefault((members[rank], send.to), deque()).append(send.message)

        for player in players:
            player.begin_round(number)
        begins = [(rank, bucket) for rank in range(ranks) for bucket in range(2)]
        chance.shuffle(begins)
        while begins or any(links.values()):
            if begins and (chance.random() < 0.3 or not any(links.values())):
                rank, bucket = begins.pop()
                players[rank].ready(bucket)
                take(rank, players[rank].outgoing())
            else:
                (sender, to), waiting = chance.choice([item for item in links.items() if item[1]])
                rank = members.index(to)
                players[rank].receive(sender, waiting.popleft())
                take(rank, players[rank].outgoing())
        assert all(player.reduce() for player in players)
        expected = torch.stack(first).double().sum(0) * ranks**number
        assert all(torch.equal(one.values, vectors[0].values) for one in vectors)
        torch.testing.assert_close(vectors[0].values.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_in_one_memory_all_find_the_sum(ranks: int) -> None:
    """Of integers in float64, exactly; three rounds, as each rank comes to them, and one of a smaller group after
    that.
    """
    memory, length = os.memfd_create("test"), 1003
    values = [
        torch.randint(-1000, 1000, (length,), generator=torch.Generator().manual_seed(rank)).double()
        for rank in range(ranks)
    ]
    found = [
        Bucket(8, 8 * length, "float64"),
        Bucket(0, 8, "float64"),
        Bucket(8 * length, 8 * length + 3, "uint8", False),
    ]
    sums: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(ranks)}
    errors: list[BaseException] = []

    def play(rank: int) -> None:
        try:
            part = SharedMemory(memory, rank, ranks)
            slot, total = part.open(8 * length + 3, found)
            for group, count in ((0, ranks), (1, max(1, ranks - 1))):
                gate.wait()
                if rank >= count:
                    continue
                part.meet(group, range(count))
                for number in range(3):
                    slot[: 8 * length].view(torch.float64).copy_(values[rank] * (number + 1))
                    slot[8 * length :].fill_(10 * rank + number)
                    for bucket in range(3):
                        part.ready(bucket)
                    while (done := part.reduce()) is None:
                        assert not errors
                    assert done
                    assert total[8 * length :].tolist() == [number] * 3  # of the first rank
                    sums[rank].append(total[: 8 * length].view(torch.float64).clone())
        except BaseException as error:
            errors.append(error)
            gate.abort()
            raise

    gate = threading.Barrier(ranks)
    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(memory)
    assert not errors
    smaller = max(1, ranks - 1)
    for rank in range(ranks):
        for number, got in enumerate(sums[rank]):
            count = ranks if number < 3 else smaller
            assert torch.equal(got, torch.stack(values[:count]).sum(0) * (number % 3 + 1))


def test_who_waits_for_another_is_not_kept() -> None:
    memory = os.memfd_create("test")
    part = SharedMemory(memory, 0, 2)
    part.open(64, [Bucket(0, 64, "float32")])
    part.meet(0, [0, 1])
    part.ready(0)
    for _ in range(9):
        assert part.reduce() is None
    os.close(memory)


def test_a_machine_that_shows_writes_in_another_order_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is any memory: at the door of a job, and where a window or a split replica would use some."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    named = "needs a processor that makes writes visible in their order, such as x86-64, and this is aarch64; "
    with pytest.raises(UsageError, match=f"--transport shared: .* {named}use --transport tcp"):
        db.Local().settings(db.Job("digits", db.Allreduce()))
    with pytest.raises(UsageError, match=named):
        Window(0, 2, -1, [os.getpid()] * 2)
    with pytest.raises(UsageError, match=f"'shared'.*: .* {named}use auto"):
        db.Reduce("shared")
    with pytest.raises(UsageError, match=f"--partitions 2: .* {named}leave it off"):
        db.predict("run", "digits", "out.safetensors", partitions=2)
    db.Local(transport="tcp").settings(db.Job("digits", db.Allreduce()))
