"""Push and fetch by a replica, over one of our carriers to a real shard in another process."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Literal

import torch

from benchmarks.parts.peers import Peers
from distbelief.core import roles
from distbelief.core.conversations import initialising, membership, pushing
from distbelief.core.effects import RECEIVE, Batch, Compute, Computed, Send, Story
from distbelief.core.messages import Version
from distbelief.core.optimizer import optim
from distbelief.core.settings import Plan, Settings
from distbelief.errors import JobFailed
from distbelief.places.join.authority import Authority
from distbelief.runtime.clock import WallClock
from distbelief.runtime.driver import Driver
from distbelief.runtime.player import Answer, Worker
from distbelief.server.shard import Shard
from distbelief.server.slice import TorchSlice
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Range, Tensor, lay_out
from distbelief.strategies import Downpour
from distbelief.transport.base import NetworkEndpoint
from distbelief.transport.secure import Identity
from distbelief.transport.shared import SharedEndpoint
from distbelief.transport.tcp import TcpEndpoint
from distbelief.transport.tls import TlsEndpoint

RATE = 1e-3
"""Learning rate of every measured update, here and in `limits`."""
GRADIENT = 1e-3
"""Value of every gradient, which keeps sums away from slow denormal numbers."""
JOB = "bench"
Does = Literal["both", "push", "fetch", "in place"]
REPLICA = roles.replica(0)


def plan_of(size: int, shards: int) -> Plan:
    """Return the plan of shards with `size` bytes of float32."""
    layout = lay_out([Tensor("weight", (size // 4,), "float32")])
    settings = Settings(strategy=Downpour(1, shards, optimizer=optim("sgd", RATE)))
    return Plan(settings, layout, cut(layout, settings.partitions, shards), 1)


def mapped(descriptor: int, size: int) -> torch.Tensor:
    """Return memory that processes share, as bytes."""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def serve_shard(
    connection: Connection,
    carrier: str,
    plan: Plan,
    supervisor: int,
    memory: int,
    index: int,
    identity: Identity | None,
) -> None:
    """Play a shard until asked to stop; `memory` is the supervisor's descriptor of memory for reads in place, or -1."""
    role, own, moving = roles.shard(index), plan.assignments[index].moving, None
    if memory >= 0:
        descriptor = os.open(f"/proc/{supervisor}/fd/{memory}", os.O_RDWR)
        moving = mapped(descriptor, plan.layout.total)[own.start : own.stop]
        os.close(descriptor)
    shard = Shard(index, lambda plan, index: TorchSlice(plan, index, moving))
    shard.handle(roles.COORDINATOR, initialising.Restore(plan, ""), None)
    endpoint = _endpoint(carrier, role, identity)
    driver = Driver(WallClock(endpoint), lambda *_: None)
    driver.add_machine(role, shard, endpoint)
    connection.send_bytes(endpoint.listen().encode())
    driver.run()


def _endpoint(carrier: str, role: str, identity: Identity | None) -> NetworkEndpoint:
    if identity is not None:
        return TlsEndpoint(role, JOB, identity=identity)
    return SharedEndpoint(role, JOB) if carrier == "shared" else TcpEndpoint(role, JOB)


class Ours:
    """Replica that makes round trips to shards at the other end of a carrier.

    `does` names a push and a fetch, one of them, or a push to shards whose own memory is read ("in place").
    """

    def __init__(self, peers: Peers, carrier: str, size: int, shards: int = 1, does: Does = "both") -> None:
        plan = plan_of(size, shards)
        issue = Authority(JOB).issue if carrier == "tls" else lambda _: None
        self.endpoint, self._does = _endpoint(carrier, REPLICA, issue(REPLICA)), does
        self._shards = [(roles.shard(i), a.moving) for i, a in enumerate(plan.assignments) if a.moving.size]
        self._answer: Callable[[Computed], None] | None = None
        arena = self.endpoint.allocate(Range(0, plan.layout.total), 1, 1)
        self.gradient = arena.gradients[0].view(torch.float32).fill_(GRADIENT)
        self.parameters, self.pushes, self._memory = arena.parameters[0], 0, -1
        if does == "in place":
            self._memory = os.memfd_create("distbelief bench")
            os.ftruncate(self._memory, size)
            self.parameters = mapped(self._memory, size)
        what = carrier, plan, os.getpid(), self._memory
        served = [
            peers.start(f"{role} of {size} bytes", 1, serve_shard, *what, index, issue(role))
            for index, (role, _) in enumerate(self._shards)
        ]
        for (role, _), peer in zip(self._shards, served, strict=True):
            self.endpoint.connect(role, peer.hear())
        self._driver = Driver(WallClock(self.endpoint), lambda *_: None)
        self._driver.add_story(REPLICA, self._story(), self.endpoint, Worker(compute=self._compute))
        self._driver.begin(REPLICA)

    def trips(self, count: int) -> float:
        """Return the seconds per round trip, over `count` of them."""
        start = time.perf_counter()
        answer, self._answer = self._answer, None
        assert answer is not None
        answer(Computed(None, count, 0.0))
        self._driver.run_while(lambda: self._answer is None)
        self.pushes += count
        return (time.perf_counter() - start) / count

    def _story(self) -> Story:
        """Push, fetch, and wait for both, as `replica.downpour` does without prefetch."""
        versions, clock = {role: Version(0, 0) for role, _ in self._shards}, 0
        pushed = self.gradient.view(torch.uint8)
        outgoing = {role: pushed[part.start : part.stop] for role, part in self._shards}
        while True:
            order: Computed = yield Compute(Batch(0, 0))
            for _ in range(order.samples):
                missing = 0
                if self._does != "fetch":
                    clock += 1
                    for role, part in self._shards:
                        missing += 1
                        yield Send(
                            role,
                            pushing.Push(0, part.start, part.stop, 0, clock, versions[role], 1, 1, ranges=(part,)),
                            outgoing[role],
                        )
                if self._does in ("both", "fetch"):
                    for role, part in self._shards:
                        missing += 1
                        yield Send(role, pushing.Fetch(0, part.start, part.stop))
                while missing:
                    arrival = yield RECEIVE
                    if not isinstance(arrival.event, pushing.Pushed | pushing.Fetched):
                        raise JobFailed(f"{arrival.sender} of the benchmark answered {arrival.event}")
                    versions[arrival.sender] = arrival.event.version
                    missing -= 1

    def _compute(self, _: Batch, answer: Answer) -> Computed | None:
        self._answer = answer
        return None

    def check(self) -> None:
        """Check that the pushes arrived, so that the reported speed is real."""
        due = -RATE * GRADIENT * self.pushes
        for _, part in self._shards if self._does in ("both", "in place") else ():
            got = float(self.parameters.view(torch.float32)[part.start // 4])
            if abs(got - due) > 1e-3 * abs(due):
                raise JobFailed(
                    f"after {self.pushes} pushes a parameter is {got}, not {due}: the carrier or the shard lost "
                    "something; this is a bug"
                )

    def close(self) -> None:
        for role, _ in self._shards:
            self.endpoint.send(role, membership.Stop("measured"))
        self.endpoint.close()
        if self._memory >= 0:
            os.close(self._memory)
