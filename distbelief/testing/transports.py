"""Conformance suite of transports: the promises of `distbelief.transport.base`, checked on a pair of endpoints."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from distbelief.core import wire
from distbelief.core.conversations.initialising import Initialise, Ready
from distbelief.core.conversations.pushing import Fetch, Fetched, Push, Pushed
from distbelief.core.effects import Arrival
from distbelief.core.events import Lost
from distbelief.core.messages import Message, Version
from distbelief.errors import LocalProtocolError
from distbelief.sharding.layout import Range
from distbelief.transport.base import Endpoint

PATIENCE_SECONDS = 30.0
"""Longest time until something arrives, while `pump` is called."""
IDLE_PUMPS = 20
"""Calls of `pump` after which no more messages are expected."""

A, B = "replica 0", "shard 0"
_NONE = Version(0, 0)


class Pair(NamedTuple):
    """Two linked endpoints in one process, and a function that moves their messages."""

    a: Endpoint
    """Endpoint of role "replica 0", which has made its arena and then opened the link."""
    b: Endpoint
    """Endpoint of role "shard 0", without an arena."""
    pump: Callable[[], None]
    """Function that lets both send and receive, and returns soon."""


MakePair = Callable[[Range, int, int], Pair]
"""Function that makes a fresh pair, given the range of `a`'s arena and its numbers of gradients and parameters."""


class _Bench:
    """Pair, with the arrivals at each endpoint."""

    def __init__(
        self, make_pair: MakePair, size: int = 4096, gradients: int = 2, parameters: int = 2, start: int = 0
    ) -> None:
        self.a, self.b, self.pump = make_pair(Range(start, start + size), gradients, parameters)
        self.at_a: list[Arrival] = []
        self.at_b: list[Arrival] = []
        self.a.deliver, self.b.deliver = self.at_a.append, self.at_b.append
        generator = torch.Generator().manual_seed(size)
        for vector in (*self.a.arena.gradients, *self.a.arena.parameters):
            assert (vector.dtype, tuple(vector.shape)) == (torch.uint8, (size,)), (
                f"an arena's vector is not bytes of the requested length: {vector}"
            )
            assert not vector.any(), "a new arena is not all zeros"
        for vector in self.a.arena.gradients:
            vector.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))
        self.a.send(B, Ready(()))
        self.until(lambda: self.at_b, "the first message of the link")
        self.at_b.clear()

    def until(self, reached: Callable[[], object], what: str) -> None:
        end = monotonic() + PATIENCE_SECONDS
        while not reached():
            assert monotonic() < end, (
                f"{what} did not arrive within {PATIENCE_SECONDS} s; {A} has {self.at_a}, {B} has {self.at_b}"
            )
            self.pump()

    def lost(self) -> bool:
        return any(isinstance(arrival.event, Lost) for arrival in self.at_a + self.at_b)

    def idle(self) -> None:
        for _ in range(IDLE_PUMPS):
            self.pump()

    def close(self) -> None:
        self.a.close()
        self.b.close()


def check_transport(make_pair: MakePair) -> None:
    """Check every promise of `distbelief.transport.base` that two endpoints in one process can show.

    Write a function that makes a linked pair, and call this from a test, also under delays or with small buffers. What
    needs several processes, such as kill -9, needs tests of your own. For endpoints between processes:

        def make_pair(held: Range, gradients: int, parameters: int) -> Pair:
            a, b = MyEndpoint("replica 0", "job"), MyEndpoint("shard 0", "job")
            a.allocate(held, gradients, parameters)
            a.connect("shard 0", b.listen())

            def pump() -> None:
                a.poll(0)
                b.poll(0.001)

            return Pair(a, b, pump)

    Raises:
        AssertionError: a promise is broken; the message names it.
    """
    for check in (
        _order,
        _pushes,
        _answers,
        _same_views,
        _part_of_a_vector,
        _zero_size,
        _large,
        _settle,
        _counts,
        _bounds,
        _close_is_seen,
        _drop,
        _nothing_stays,
    ):
        check(make_pair)


def _order(make_pair: MakePair) -> None:
    """Check that small messages and payloads of both directions arrive once, in order."""
    bench = _Bench(make_pair)
    answers = torch.arange(4096, dtype=torch.int32).to(torch.uint8)
    for number in range(600):
        if number % 7 == 3:
            start = number % 64 * 64
            bench.a.send(B, Push(0, start, 4096, 0, number, _NONE, 1, 1), bench.a.arena.gradients[0][start:])
            bench.b.send(A, Fetched(1, start, 4096, Version(0, number)), answers[start:])
        else:
            bench.a.send(B, Pushed(0, number, _NONE))
            bench.b.send(A, Pushed(0, number, _NONE))
        if number % 50 == 0:
            bench.pump()
    bench.until(lambda: len(bench.at_a) >= 600 and len(bench.at_b) >= 600, "all of 600 messages each way")
    bench.idle()
    for who, arrivals in ((B, bench.at_a), (A, bench.at_b)):
        assert [_number(arrival.event) for arrival in arrivals] == list(range(600)), (
            f"what {who} sent arrived out of order, or not exactly once"
        )
        assert {arrival.sender for arrival in arrivals} == {who}, "an arrival does not name its sender"
    bench.close()


def _check_same(payload: object, wanted: torch.Tensor, what: str) -> None:
    assert isinstance(payload, torch.Tensor), f"{what} came as {payload}"
    assert torch.equal(payload, wanted), f"{what} arrived as other bytes: {payload}"


def _number(event: object) -> int:
    if isinstance(event, Push | Pushed):
        return event.clock
    return event.version.updates if isinstance(event, Fetched) else -1


def _pushes(make_pair: MakePair) -> None:
    """Check that pushes of several slots and ranges arrive as they were written, each as a tensor of bytes."""
    bench = _Bench(make_pair, 1 << 16, 3, 1)
    ranges = [(0, 0, 1 << 16), (1, 128, 4096), (2, 65408, 65536), (0, 1024, 1152)]
    for clock, (slot, start, stop) in enumerate(ranges):
        message: Message = Push(slot, start, stop, 0, clock, _NONE, 1, 1) if clock else Initialise(slot, start, stop)
        bench.a.send(B, message, bench.a.arena.gradients[slot][start:stop])
        bench.until(lambda: bench.at_b, "a push")
        arrival = bench.at_b.pop()
        assert arrival.event == message, f"{message} came as {arrival.event}"
        _check_same(arrival.payload, bench.a.arena.gradients[slot][start:stop], f"the payload of {message}")
    bench.close()


def _answers(make_pair: MakePair) -> None:
    """Check that delivered answers land in the slot and range that they name, and nowhere else."""
    bench = _Bench(make_pair, 1 << 16, 1, 3)
    expected = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(3)]
    for value, (slot, start, stop) in enumerate(
        [(0, 0, 1 << 16), (1, 128, 4096), (2, 65408, 65536), (1, 256, 384)], start=1
    ):
        bench.a.send(B, Fetch(slot, start, stop))
        bench.until(lambda: bench.at_b, "a fetch")
        assert bench.at_b.pop().event == Fetch(slot, start, stop)
        answer = torch.full(((stop - start) // 4,), float(value))
        expected[slot][start:stop] = answer.view(torch.uint8)
        bench.b.send(A, Fetched(slot, start, stop, Version(0, value)), answer.view(torch.uint8))
        bench.until(lambda: bench.at_a, "an answer")
        assert bench.at_a.pop().event == Fetched(slot, start, stop, Version(0, value))
        for index, vector in enumerate(expected):
            assert torch.equal(bench.a.arena.parameters[index], vector), (
                f"after the answer into slot {slot}, slot {index} holds other bytes"
            )
    bench.close()


def _same_views(make_pair: MakePair) -> None:
    """Check that every push of a range has the current values of the slot."""
    bench = _Bench(make_pair)
    for clock in range(5):
        bench.a.arena.gradients[1][256:512] = clock
        bench.a.send(B, Push(1, 256, 512, 0, clock, _NONE, 1, 1), bench.a.arena.gradients[1][256:512])
        bench.until(lambda: bench.at_b, "a push")
        _check_same(bench.at_b.pop().payload, torch.full((256,), clock, dtype=torch.uint8), f"push {clock} of a slot")
    bench.close()


def _part_of_a_vector(make_pair: MakePair) -> None:
    """Check an arena that begins at 1 MiB: messages name bytes of the whole vector, and only those in the arena."""
    begins, size = 1 << 20, 4096
    bench = _Bench(make_pair, size, start=begins)
    answer = torch.full((256,), 7, dtype=torch.uint8)
    for first in (0, 128, size - 256):
        start = begins + first
        bench.a.send(B, Push(1, start, start + 256, 0, 0, _NONE, 1, 1), bench.a.arena.gradients[1][first : first + 256])
        bench.a.send(B, Fetch(1, start, start + 256))
        bench.until(lambda: len(bench.at_b) == 2, "a push and a fetch of a part of the vector")
        _check_same(bench.at_b[0].payload, bench.a.arena.gradients[1][first : first + 256], "a push of a part")
        bench.at_b.clear()
        bench.b.send(A, Fetched(1, start, start + 256, _NONE), answer)
        bench.until(lambda: bench.at_a, "an answer into a part of the vector")
        _check_same(bench.at_a.pop().payload, answer, "an answer into a part")
        _check_same(bench.a.arena.parameters[1][first : first + 256], answer, "the requested slot")
        bench.a.arena.parameters[1].zero_()
    bench.close()
    for start in (0, begins - 128, begins + size):
        bench = _Bench(make_pair, size, start=begins)
        try:
            bench.b.send(A, Fetched(0, start, start + 128, _NONE), answer[:128])
        except LocalProtocolError:
            pass
        else:
            bench.until(bench.lost, f"the end of a link on which somebody named bytes from {start} on")
        assert not any(vector.any() for vector in bench.a.arena.parameters), f"bytes from {start} on were written"
        bench.close()


def _zero_size(make_pair: MakePair) -> None:
    """Check that messages with empty payloads arrive."""
    bench = _Bench(make_pair)
    none = torch.empty(0, dtype=torch.uint8)
    for place in (0, 128, 4096):
        bench.a.send(B, Push(0, place, place, 0, place, _NONE, 1, 1), bench.a.arena.gradients[0][place:place])
        bench.b.send(A, Fetched(0, place, place, Version(0, place)), none)
    bench.until(lambda: len(bench.at_a) == len(bench.at_b) == 3, "three empty payloads each way")
    assert [_number(arrival.event) for arrival in bench.at_a + bench.at_b] == [0, 128, 4096] * 2
    bench.close()


def _large(make_pair: MakePair) -> None:
    """Check that payloads far larger than any buffer pass each other, with messages between them."""
    size = 24 << 20
    bench = _Bench(make_pair, size, 1, 1)
    answer = bench.a.arena.gradients[0].flip(0)
    bench.a.send(B, Push(0, 0, size, 0, 0, _NONE, 1, 1), bench.a.arena.gradients[0])
    bench.b.send(A, Fetched(0, 0, size, Version(0, 0)), answer)
    bench.a.send(B, Pushed(0, 1, _NONE))
    bench.b.send(A, Pushed(0, 1, _NONE))
    bench.until(lambda: len(bench.at_a) == len(bench.at_b) == 2, f"{size} bytes each way")
    assert [_number(arrival.event) for arrival in bench.at_a + bench.at_b] == [0, 1, 0, 1]
    _check_same(bench.at_b[0].payload, bench.a.arena.gradients[0], "a large push")
    _check_same(bench.a.arena.parameters[0], answer, "a large answer")
    bench.close()


def _settle(make_pair: MakePair) -> None:
    """Check that after `settle` a sender may write to its answer, and the receiver gets the values from before."""
    size = 24 << 20
    bench = _Bench(make_pair, size, 1, 2)
    parameters = torch.zeros(size, dtype=torch.uint8)
    for value in (1, 2, 3):
        parameters.fill_(value)
        bench.b.send(A, Fetched(0, 0, size, Version(0, value)), parameters)
        bench.b.send(A, Fetched(1, 128, size, Version(0, value)), parameters[128:])
        bench.b.settle()
        parameters.fill_(99)
        bench.b.settle()
        bench.until(lambda: len(bench.at_a) == 2, "two answers")
        bench.at_a.clear()
        for vector in (bench.a.arena.parameters[0], bench.a.arena.parameters[1][128:]):
            assert bool((vector == value).all()), "an answer contains what its owner wrote after `settle`"
    bench.close()


def _counts(make_pair: MakePair) -> None:
    """Check that both ends count the same bytes of each kind, whether a payload is sent or found in shared memory."""
    bench = _Bench(make_pair)
    a, b = bench.a.traffic, bench.b.traffic
    before = {id(end): (dict(end.sent), dict(end.received), dict(end.shared_memory)) for end in (a, b)}
    push, answer, pushed = Push(1, 128, 4096, 0, 1, _NONE, 1, 1), Fetched(0, 0, 256, _NONE), Pushed(1, 1, _NONE)
    bench.a.send(B, push, bench.a.arena.gradients[1][128:])
    bench.b.send(A, pushed)
    bench.b.send(A, answer, torch.zeros(256, dtype=torch.uint8))
    bench.until(lambda: bench.at_b and len(bench.at_a) == 2, "a push, its acknowledgement and an answer")
    for sender, receiver, message, size in ((a, b, push, 3968), (b, a, answer, 256), (b, a, pushed, 0)):
        kind = message.traffic
        sent, received = sender.sent[kind] - before[id(sender)][0][kind], receiver.received[kind]
        received -= before[id(receiver)][1][kind]
        mapped = receiver.shared_memory[kind] - before[id(receiver)][2][kind]
        assert sent == received, f"{sent} bytes of {message} were counted by the sender, {received} by the receiver"
        assert mapped in (0, size), f"{mapped} bytes behind {message} were found in memory"
        whole = len(wire.encode(message)) + size - mapped
        beside = sent - whole  # bytes that the carrier adds to the message
        assert beside == 0 if size else beside >= 0, f"{message} was counted as {sent} bytes: it has {whole}"
    bench.close()


def _bounds(make_pair: MakePair) -> None:
    """Check that a message with wrong bounds is refused or ends its link, and that nothing is written."""
    for slot, start, stop in ((2, 0, 128), (-1, 0, 128), (0, 4096, 4224), (0, -128, 128), (0, 256, 128)):
        for sender in "ab":
            bench = _Bench(make_pair)
            payload = torch.full((max(0, stop - start),), 255, dtype=torch.uint8)
            refused = False
            try:
                if sender == "a":
                    bench.a.send(B, Push(slot, start, stop, 0, 0, _NONE, 1, 1), payload)
                else:
                    bench.b.send(A, Fetched(slot, start, stop, _NONE), payload)
            except LocalProtocolError:
                refused = True
            if not refused:
                bench.until(
                    bench.lost, f"the end of a link on which somebody named bytes {start} to {stop} of slot {slot}"
                )
            assert not any(vector.any() for vector in bench.a.arena.parameters), (
                f"slot {slot}, bytes {start} to {stop}, were written somewhere"
            )
            bench.close()


def _close_is_seen(make_pair: MakePair) -> None:
    """Check that a closed peer is reported `Lost` once, after its messages, and that messages to it are dropped."""
    size = 8 << 20
    bench = _Bench(make_pair, size, 1, 1)
    vector = bench.a.arena.gradients[0]
    bench.a.send(B, Pushed(0, 0, _NONE))
    bench.a.send(B, Pushed(0, 1, _NONE))
    bench.pump()
    bench.b.send(A, Pushed(0, 7, _NONE))
    bench.a.close()
    bench.a.close()
    bench.until(bench.lost, "the loss of a peer that closed")
    bench.b.send(A, Fetched(0, 0, size, _NONE), vector)
    bench.idle()
    assert [type(arrival.event) for arrival in bench.at_b] == [Pushed, Pushed, Lost], (
        f"a peer's messages and its end arrived as {bench.at_b}"
    )
    assert bench.at_b[-1].sender == A
    bench.close()


def _drop(make_pair: MakePair) -> None:
    """Check that both sides report a dropped link once, and that the side that dropped it gets the reason."""
    bench = _Bench(make_pair)
    bench.b.drop(A, "it spoke nonsense")
    bench.b.drop(A, "again")
    bench.b.drop("shard 9", "never met")
    bench.b.send(A, Ready(()))
    bench.until(lambda: bench.at_a and bench.at_b, "the loss of a dropped link, on both sides")
    bench.idle()
    [lost] = [arrival.event for arrival in bench.at_b]
    assert isinstance(lost, Lost), f"the side that dropped the link received {lost}"
    assert lost.reason == "it spoke nonsense", f"the side that dropped the link received {lost.reason!r}"
    assert [type(arrival.event) for arrival in bench.at_a] == [Lost], (
        f"the side whose link was dropped received {bench.at_a}"
    )
    bench.close()


def _nothing_stays(make_pair: MakePair) -> None:
    """Check that a closed transport whose tensors are freed leaves nothing open, mapped or named."""
    gc.collect()
    before = _possessions()
    _pushes(make_pair)
    _answers(make_pair)
    gc.collect()
    assert _possessions() == before, f"left behind: {sorted(set(_possessions()) - set(before)) or 'more of the same'}"


def _possessions() -> list[str]:
    """List the process's descriptors by kind, its shared mappings, and its files in /dev/shm."""
    held = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            held.append(os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0])
        except OSError:
            continue  # the descriptor of the listing itself
    maps = Path("/proc/self/maps").read_text().splitlines()
    held += [line.split(maxsplit=5)[5] for line in maps if "memfd:" in line or "/dev/shm/" in line]
    held += [name for name in os.listdir("/dev/shm") if "distbelief" in name or f"_{os.getpid()}_" in name]
    return sorted(held)
