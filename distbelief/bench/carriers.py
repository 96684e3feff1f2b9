"""Push and fetch as a replica makes them, over a carrier of ours, to a real shard in a process of its own."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from distbelief.bench.peers import Peers
from distbelief.core import messages, roles
from distbelief.core.effects import RECEIVE, Batch, Compute, Computed, Measured, Send, Story
from distbelief.core.layout import Tensor, lay_out
from distbelief.core.messages import Version
from distbelief.core.settings import Optimizer, Plan, Settings
from distbelief.core.sharding import cut
from distbelief.errors import JobFailed, UsageError
from distbelief.runtime.clock import WallClock
from distbelief.runtime.driver import Driver
from distbelief.server.shard import Shard
from distbelief.server.slice import TorchSlice
from distbelief.transport.base import Arena, NetworkEndpoint
from distbelief.transport.shared import SharedEndpoint
from distbelief.transport.tcp import TcpEndpoint

RATE = 1e-3
"""Learning rate of every update that is measured, here and in `limits`: plain SGD."""
GRADIENT = 1e-3
"""What every gradient is filled with: the sums stay far from numbers that are slow to add."""
JOB = "bench"
REPLICA, SHARD = roles.replica(0), roles.shard(0)


def plan_of(size: int) -> Plan:
    """The plan of one shard that holds `size` bytes of float32 and steps them by plain SGD."""
    layout = lay_out([Tensor("weight", (size // 4,), "float32")])
    return Plan(Settings(replicas=1, shards=1, optimizer=Optimizer("sgd", RATE)), layout, cut(layout, 1), 1)


def mapped(descriptor: int, size: int) -> torch.Tensor:
    """Memory that processes share, as bytes."""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def serve_shard(connection: Connection, carrier: str, size: int, supervisor: int, memory: int) -> None:
    """Play a shard until it is told to stop; `memory` is the supervisor's descriptor of what is read in place, or -1."""
    moving = None
    if memory >= 0:
        descriptor = os.open(f"/proc/{supervisor}/fd/{memory}", os.O_RDWR)
        moving = mapped(descriptor, size)
        os.close(descriptor)
    shard = Shard(0, lambda plan, index: TorchSlice(plan, index, moving))
    shard.handle(roles.COORDINATOR, messages.Restore(plan_of(size), ""), None)
    endpoint = _endpoint(carrier, SHARD)
    driver = Driver(WallClock(endpoint), lambda *_: None)
    driver.add_machine(SHARD, shard, endpoint)
    connection.send_bytes(endpoint.listen().encode())
    driver.run()


def _endpoint(carrier: str, role: str) -> NetworkEndpoint:
    return SharedEndpoint(role, JOB) if carrier == "shared" else TcpEndpoint(role, JOB)


class Ours:
    """A replica with a shard at the other end of a carrier.

    Args:
        peers: who starts the shard.
        carrier: shared or tcp.
        size: bytes that are pushed, and fetched, in each round trip.
        in_place: whether the shard's own memory is read, so that there is nothing to fetch.
    """

    def __init__(self, peers: Peers, carrier: str, size: int, in_place: bool = False) -> None:
        self._in_place, self._size = in_place, size
        self._answer: Callable[[Computed], None] | None = None
        self._memory = -1
        if in_place:
            self._memory = os.memfd_create("distbelief bench")
            os.ftruncate(self._memory, size)
        address = peers.start(f"shard of {size} bytes", 1, serve_shard, carrier, size, os.getpid(), self._memory).hear()
        self.endpoint = _endpoint(carrier, REPLICA)
        arena = self.endpoint.allocate(size, 1, 1)
        self._gradient = arena.gradients[0]
        self._gradient.view(torch.float32).fill_(GRADIENT)
        self.parameters = mapped(self._memory, size) if in_place else arena.parameters[0]
        self.endpoint.connect(SHARD, address)
        self._driver = Driver(WallClock(self.endpoint), lambda *_: None)
        self._driver.add_story(REPLICA, self._story(), self.endpoint, self)
        self._driver.begin(REPLICA)
        self.pushes = 0

    def trips(self, count: int) -> float:
        """Seconds per round trip, over `count` of them."""
        start = time.perf_counter()
        answer, self._answer = self._answer, None
        assert answer is not None
        answer(Computed(None, count, 0.0))
        self._driver.run_while(lambda: self._answer is None)
        self.pushes += count
        return (time.perf_counter() - start) / count

    def check(self) -> None:
        """Refuse to report a speed of something that did not happen.

        Raises:
            JobFailed: the parameters are not what the pushes make of them.
        """
        got, due = float(self.parameters.view(torch.float32)[-1]), -RATE * GRADIENT * self.pushes
        if abs(got - due) > 1e-3 * abs(due):
            raise JobFailed(f"after {self.pushes} pushes a parameter is {got}, not {due}: the carrier or the shard lost something; this is a bug")

    def close(self) -> None:
        """End the shard and the link."""
        self.endpoint.send(SHARD, messages.Stop("measured"))
        self.endpoint.close()
        if self._memory >= 0:
            os.close(self._memory)

    def _story(self) -> Story:
        """As `replica.downpour` does without prefetch: a push, then a fetch, and a wait for both."""
        version, clock, last = Version(0, 0), 0, 1 if self._in_place else 2
        while True:
            order: Computed = yield Compute(Batch(0, 0))
            for _ in range(order.samples):
                clock += 1
                yield Send(SHARD, messages.Push(0, 0, self._size, 0, clock, version, 1, 1), self._gradient)
                if not self._in_place:
                    yield Send(SHARD, messages.Fetch(0, 0, self._size))
                missing = last
                while missing:
                    event = (yield RECEIVE).event
                    if not isinstance(event, messages.Pushed | messages.Fetched):
                        raise JobFailed(f"the shard of the benchmark answered {event}")
                    version = event.version
                    missing -= 1

    # what a driver asks of a worker

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Nothing to attach: there is no plan."""

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """Wait for the next `trips`."""
        self._answer = answer
        return None

    def measure(self) -> Measured:
        """Nothing to measure."""
        raise UsageError("the wire has no accuracy; bench train or bench accuracy measure a model")
