"""What only the shared-memory carrier does: which memory it accepts from others, and from its own role."""

from __future__ import annotations

import fcntl
import os
import socket

import pytest
import torch

from distbelief.core import roles, wire
from distbelief.core.conversations.pushing import Fetched, Push
from distbelief.core.effects import Arrival
from distbelief.core.messages import Hello, Version
from distbelief.errors import JobFailed, LocalProtocolError
from distbelief.sharding.layout import Range
from distbelief.transport.shared import SharedEndpoint

NONE = Version(0, 0)


def test_shared_memory_that_is_not_there_or_can_shrink_or_is_more_than_one_is_refused() -> None:
    shard = SharedEndpoint("shard 0", "job")
    told: list[Arrival] = []
    shard.deliver = told.append
    address = shard.listen()
    lends = wire.encode(Hello("job", "replica 0", 0, 4096, 1, 1))
    small, unsealed = os.memfd_create("small", os.MFD_ALLOW_SEALING), os.memfd_create("unsealed")
    os.ftruncate(small, 4096)
    os.ftruncate(unsealed, 8192)
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, 8192)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        for fds in ([], [small], [unsealed], [sealed, sealed]):
            with socket.socket(socket.AF_UNIX) as bad:
                bad.connect("\0" + address.removeprefix("unix:@"))
                socket.send_fds(bad, [lends], fds)
                for _ in range(2):  # the link, and then its introduction
                    shard.poll(0)
                bad.setblocking(False)
                assert bad.recv(1) == b""
        assert told == []
    finally:
        os.close(sealed)
        os.close(small)
        os.close(unsealed)
        shard.close()


def test_a_process_of_another_user_is_let_in_by_neither_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, replica, own = SharedEndpoint("shard 0", "job"), SharedEndpoint("replica 0", "job"), os.getuid()
    address = shard.listen()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(JobFailed, match=f"runs as user {own}, this one as {own + 1}; run both as one user"):
        replica.connect("shard 0", address)
    with socket.socket(socket.AF_UNIX) as bad:
        bad.connect("\0" + address.removeprefix("unix:@"))
        shard.poll(0)
        bad.setblocking(False)
        assert bad.recv(1) == b""
    replica.close()
    shard.close()


def test_a_push_from_outside_the_shared_memory_is_refused() -> None:
    a, b = SharedEndpoint("replica 0", "job"), SharedEndpoint("shard 0", "job")
    a.allocate(Range(0, 4096), 1, 1)
    a.connect("shard 0", b.listen())
    with pytest.raises(LocalProtocolError, match="lies elsewhere than in gradient slot 0"):
        a.send("shard 0", Push(0, 0, 128, 0, 0, NONE, 1, 1), torch.zeros(128, dtype=torch.uint8))
    a.close()
    b.close()


def test_who_finds_what_it_asks_for_where_it_is_is_told_and_nothing_is_written_for_it() -> None:
    shard, told = SharedEndpoint("shard 0", "job"), dict[str, list[Arrival]]()
    shard.deliver = lambda _: None
    address, asking = shard.listen(), [SharedEndpoint(role, "job") for role in ("replica 0", "evaluator")]
    shard.finds = roles.is_replica
    try:
        for one in asking:
            one.allocate(Range(0, 4096), 1, 1)
            one.deliver = told.setdefault(one.role, []).append
            one.connect("shard 0", address)
            for _ in range(2):  # the link, and then its introduction
                shard.poll(0)
            shard.send(one.role, Fetched(0, 0, 4096, NONE), torch.ones(4096, dtype=torch.uint8))
        shard.poll(0)
        for one in asking:
            one.poll(10)
        assert {role: [type(arrival.event) for arrival in arrivals] for role, arrivals in told.items()} == {
            "replica 0": [Fetched], "evaluator": [Fetched]
        }  # fmt: skip
        assert [int(one.arena.parameters[0].sum()) for one in asking] == [0, 4096]
    finally:
        for one in (*asking, shard):
            one.close()
