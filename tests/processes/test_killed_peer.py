"""A peer whose process is killed is lost after all it had sent, and leaves nothing on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from time import monotonic

import pytest
import torch
from patience import SECONDS

from distbelief.core.conversations.initialising import Ready
from distbelief.core.conversations.pushing import Push
from distbelief.core.effects import Arrival
from distbelief.core.events import Lost
from distbelief.transport.base import NetworkEndpoint
from distbelief.transport.shared import SharedEndpoint
from distbelief.transport.tcp import TcpEndpoint

CHILD = """
import sys
from distbelief.core.conversations.pushing import Fetch, Push
from distbelief.core.messages import Version
from distbelief.sharding.layout import Range
from distbelief.transport.{module} import {name} as Endpoint
end = Endpoint("replica 0", "job")
end.deliver = lambda arrival: None
arena = end.allocate(Range(0, 1 << 20), 2, 2)
print(end.listen(), flush=True)
arena.gradients[1].fill_(7)
end.connect("shard 0", sys.argv[1])
end.send("shard 0", Push(1, 0, 1 << 20, 0, 1, Version(0, 0), 1, 1), arena.gradients[1])
while True:
    end.poll(None)
"""


@pytest.mark.parametrize("carrier", [SharedEndpoint, TcpEndpoint])
def test_kill_9_of_a_peer_is_seen_and_leaves_nothing(carrier: type[SharedEndpoint] | type[TcpEndpoint]) -> None:
    shard = carrier("shard 0", "job")
    got: list[Arrival] = []
    shard.deliver = got.append
    before = set(os.listdir("/dev/shm"))
    source = CHILD.format(module=carrier.__module__.rpartition(".")[2], name=carrier.__name__)
    with subprocess.Popen([sys.executable, "-c", source, shard.listen()], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            address = child.stdout.readline().strip()
            _until(shard, lambda: got)
        finally:
            child.send_signal(signal.SIGKILL)
        child.wait(SECONDS)
        _until(shard, lambda: len(got) > 1)
    assert [type(arrival.event) for arrival in got] == [Push, Lost]
    payload = got[0].payload
    assert isinstance(payload, torch.Tensor)
    assert bool((payload == 7).all())
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "distbelief" in name or str(child.pid) in name}
    with open("/proc/net/unix") as listing:
        assert address.removeprefix("unix:") not in listing.read()
    shard.send("replica 0", Ready(()))
    shard.poll(0)
    assert len(got) == 2
    shard.close()


def _until(endpoint: NetworkEndpoint, reached: Callable[[], object]) -> None:
    end = monotonic() + SECONDS
    while not reached():
        assert monotonic() < end
        endpoint.poll(1)
