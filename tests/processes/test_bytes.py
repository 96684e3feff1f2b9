"""The bytes that a job tells are those that its kernel counts, and those of the same job on a virtual cluster."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import jobs
import pytest
import torch
from ends import end_of, meet
from patience import SECONDS
from test_allreduce import PLACES
from wire_tap import BEFORE, BEHIND, tap

from distbelief.core.conversations.pushing import Fetched, Push, Pushed
from distbelief.core.effects import Arrival
from distbelief.core.messages import KINDS, Version
from distbelief.core.optimizer import optim
from distbelief.places.processes.local import Local
from distbelief.places.simulated.simulated import Simulated
from distbelief.sharding.layout import Range
from distbelief.strategies import Allreduce, Downpour, Strategy
from distbelief.transport.tcp import TcpEndpoint

ACKNOWLEDGED, RECEIVED = 120, 128
"""Where a tcp_info of the kernel has bytes that were acknowledged (with one for the first packet), and received."""
NONE = Version(0, 0)


def counted(connection: socket.socket) -> tuple[int, int]:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED + 8)
    return struct.unpack_from("Q", info, ACKNOWLEDGED)[0], struct.unpack_from("Q", info, RECEIVED)[0]


@pytest.fixture(params=["tcp", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[TcpEndpoint, TcpEndpoint]]:
    secret = request.param == "tls"
    a, b = (end_of(role) if secret else TcpEndpoint(role, "job") for role in ("replica 0", "shard 0"))
    a.allocate(Range(0, 1 << 20), 1, 1)
    if secret:
        meet(a, b, b.listen())  # type: ignore[arg-type]
    else:
        a.connect("shard 0", b.listen())
    yield a, b
    a.close()
    b.close()


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_an_endpoint_counts_as_its_kernel_does(pair: tuple[TcpEndpoint, TcpEndpoint], size: int) -> None:
    """To the byte in the clear; over TLS too, of whose records and handshake the wire has more."""
    a, b = pair
    got: dict[str, list[Arrival]] = {"a": [], "b": []}
    a.deliver, b.deliver = got["a"].append, got["b"].append
    for clock in range(20):
        a.send("shard 0", Push(0, 0, size, 0, clock, NONE, 1, 1), a.arena.gradients[0][:size])
        end = monotonic() + SECONDS
        while len(got["b"]) <= clock or len(got["a"]) < 2 * clock:
            assert monotonic() < end
            a.poll(0)
            b.poll(0.001)
        b.send("replica 0", Pushed(0, clock, NONE))
        b.send("replica 0", Fetched(0, 0, size, NONE), torch.zeros(size, dtype=torch.uint8))
    while len(got["a"]) < 40:
        a.poll(0.001)
        b.poll(0.001)
    for mine, other in ((a, b), (b, a)):
        [link] = mine._links.values()
        sent, received = sum(mine.traffic.sent.values()), sum(mine.traffic.received.values())
        while (found := counted(link.socket))[0] < sent:
            mine.poll(0.001)  # its last bytes are not acknowledged yet
        assert found[0] - sent in (0, 1)
        assert found[1] == received == sum(other.traffic.sent.values())


def simulate(strategy: Strategy) -> dict[str, Any]:
    """The bytes of a job on machines of their own."""
    found: Any = Simulated().run(replace(jobs.job("", strategy, epochs=2), out=None))
    return found["bytes"]  # type: ignore[no-any-return]


STRATEGY = Downpour(replicas=2, shards=2, optimizer=optim("sgd", lr=0.05))


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    return simulate(STRATEGY)


@pytest.mark.parametrize("encrypted", [False, True], ids=["tcp", "tls"])
def test_a_job_tells_the_bytes_of_its_wire(tmp_path: Path, simulated: dict[str, Any], encrypted: bool) -> None:
    """And the simulation of it tells them too, but for what TLS adds."""
    with tap(3) as wire:
        place = Local("tcp", f"{BEHIND}:{wire.port}", BEFORE, tls=encrypted)
        result: Any = jobs.run(tmp_path / "run", STRATEGY, place, epochs=2)
    said = sum(len(talk.said) + len(talk.answered) for talk in wire.talks)
    told = result["bytes"]
    for way in ("sent", "received"):
        assert sum(told[way].values()) == pytest.approx(said, rel=0.02)
        for kind in ("push", "fetch"):
            assert told[way][kind] == pytest.approx(simulated[way][kind], rel=0.02)
    assert (told["pushed"], told["fetched"]) == (told["sent"]["push"], told["received"]["fetch"])
    assert not any(told["shared_memory"].values())
    if not encrypted:
        assert told["sent"]["control"] == pytest.approx(simulated["sent"]["control"], rel=0.25)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_an_all_reduce_tells_what_its_schedule_moves(tmp_path: Path, place: Local) -> None:
    """Two ranks send their vector once; in shared memory it is read, and nothing is sent."""
    algorithm = "ring" if place.encrypted else "auto"  # which measures there
    strategy = Allreduce(replicas=2, optimizer=optim("sgd", lr=0.05), algorithm=algorithm)
    result: Any = jobs.run(tmp_path / "run", strategy, place, epochs=2)
    vector = sum(one.numel() * one.element_size() for one in jobs.net().parameters())
    way, other = ("shared_memory", "sent") if place == PLACES["shared"] else ("sent", "shared_memory")
    assert result["bytes"][way]["all_reduce"] == pytest.approx(2 * result["updates"] * vector, rel=0.1)
    assert simulate(strategy)["sent"]["all_reduce"] == pytest.approx(2 * result["updates"] * vector, rel=0.1)
    assert not result["bytes"][other]["all_reduce"]
    assert result["bytes"]["pushed"] == result["bytes"]["fetched"] == 0
    assert not any(result["bytes"][one]["push"] for one in ("sent", "received", "shared_memory"))
    assert [*result["bytes"]["sent"]] == [*KINDS]
