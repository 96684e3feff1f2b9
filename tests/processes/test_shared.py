"""What only the shared-memory carrier does: which memory it accepts from others, and from its own role."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from distbelief.core import wire
from distbelief.core.conversations.pushing import Push
from distbelief.core.effects import Arrival
from distbelief.core.messages import Hello, Version
from distbelief.errors import LocalProtocolError
from distbelief.sharding.layout import Range
from distbelief.transport.shared import SharedEndpoint

NONE = Version(0, 0)


def test_shared_memory_that_is_not_there_or_can_shrink_is_refused() -> None:
    shard = SharedEndpoint("shard 0", "job")
    told: list[Arrival] = []
    shard.deliver = told.append
    address = shard.listen()
    lends = wire.encode(Hello("job", "replica 0", 0, 4096, 1, 1))
    small, unsealed = os.memfd_create("small", os.MFD_ALLOW_SEALING), os.memfd_create("unsealed")
    os.ftruncate(small, 4096)
    os.ftruncate(unsealed, 8192)
    try:
        for fds in ([], [small], [unsealed]):
            with socket.socket(socket.AF_UNIX) as bad:
                bad.settimeout(30)
                bad.connect("\0" + address.removeprefix("unix:@"))
                socket.send_fds(bad, [lends], fds)
                for _ in range(2):  # the link, and then its introduction
                    shard.poll(0)
                assert bad.recv(1) == b""
        assert told == []
    finally:
        os.close(small)
        os.close(unsealed)
        shard.close()


def test_a_push_from_outside_the_shared_memory_is_refused() -> None:
    a, b = SharedEndpoint("replica 0", "job"), SharedEndpoint("shard 0", "job")
    a.allocate(Range(0, 4096), 1, 1)
    a.connect("shard 0", b.listen())
    with pytest.raises(LocalProtocolError, match="lies elsewhere than in gradient slot 0"):
        a.send("shard 0", Push(0, 0, 128, 0, 0, NONE, 1, 1), torch.zeros(128, dtype=torch.uint8))
    a.close()
    b.close()
