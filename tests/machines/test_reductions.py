"""The players of schedules give the sum on every rank, with the same bits, as messages in any order."""

from __future__ import annotations

import os
import platform
import random
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Vector

import distbelief as db
from distbelief.core.conversations import grouping
from distbelief.core.effects import Send
from distbelief.errors import UsageError
from distbelief.fabric.base import schedule_of
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.memory import Window
from distbelief.fabric.messages import Messages
from distbelief.schedules.allreduce import FLAT

NAMES = [*FLAT, "hierarchical", *(f"hierarchical:{inner}" for inner in FLAT)]


@given(st.sampled_from(NAMES), st.integers(1, 17), st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**31))
@pytest.mark.long
def test_pieces_that_arrive_in_any_order_are_summed(
    name: str, ranks: int, length: int, per_host: int, seed: int
) -> None:
    """Two buckets of two rounds; between two ranks messages keep their order, and nothing else is ordered."""
    chance = random.Random(seed)
    first = [torch.randn(length + 7, generator=torch.Generator().manual_seed(seed + rank)) for rank in range(ranks)]
    vectors = [Vector(values.clone().view(torch.uint8)) for values in first]
    found = [Bucket(28, 4 * (length + 7), "float32"), Bucket(0, 28, "float32")]
    members = [f"replica {rank}" for rank in range(ranks)]
    schedules = [schedule_of(bucket, name, ranks, per_host) for bucket in found]
    players = [Messages(0, members, rank, found, schedules, vectors[rank]) for rank in range(ranks)]
    for number in range(2):
        links: dict[tuple[str, str], deque[grouping.ReducedPiece]] = {}

        def take(rank: int, sends: list[Send], links: Any = links) -> None:
            for send in sends:
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
        torch.testing.assert_close(vectors[0].values.view(torch.float32).double(), expected, rtol=1e-4, atol=1e-4)


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
