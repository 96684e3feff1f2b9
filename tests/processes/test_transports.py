"""The carriers over sockets keep the promises of transports, whatever the peer does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import monotonic

import pytest
from ends import CARRIERS, closed, meet, raw
from patience import SECONDS

from distbelief.core import wire
from distbelief.core.conversations.initialising import Ready
from distbelief.core.conversations.membership import Stop
from distbelief.core.conversations.pushing import Fetch, Fetched, Push, Pushed
from distbelief.core.effects import Arrival
from distbelief.core.events import Lost
from distbelief.core.messages import Hello, Version
from distbelief.errors import JobFailed, LocalProtocolError, UsageError
from distbelief.sharding.layout import Range
from distbelief.testing import Pair, check_transport
from distbelief.transport import sockets
from distbelief.transport.shared import SharedEndpoint
from distbelief.transport.sockets import SocketEndpoint
from distbelief.transport.tcp import TcpEndpoint

NONE = Version(0, 0)
Carrier = type[SharedEndpoint] | type[TcpEndpoint]


class End:
    """An endpoint and what was delivered to it."""

    def __init__(self, endpoint: SocketEndpoint) -> None:
        self.endpoint = endpoint
        self.got: list[Arrival] = []
        endpoint.deliver = self.got.append

    def until(self, reached: Callable[[], object], *others: SocketEndpoint) -> None:
        end = monotonic() + SECONDS
        while not reached():
            assert monotonic() < end, self.got
            for other in others:
                other.poll(0)
            self.endpoint.poll(0.005)

    @property
    def lost(self) -> list[Lost]:
        return [arrival.event for arrival in self.got if isinstance(arrival.event, Lost)]


@pytest.fixture(params=[SharedEndpoint, TcpEndpoint])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    return request.param


@pytest.fixture
def make(carrier: Carrier) -> Iterator[Callable[..., End]]:
    ends: list[End] = []

    def one(role: str, incarnation: int = 0, job: str = "job") -> End:
        ends.append(End(carrier(role, job, incarnation)))
        return ends[-1]

    yield one
    for end in ends:
        end.endpoint.close()


def hello(**changes: object) -> bytes:
    fields: dict[str, object] = {"job": "job", "role": "replica 0", "incarnation": 0, **changes}
    return wire.encode(Hello(**fields))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_conformance(carrier: str) -> None:
    def make_pair(held: Range, gradients: int, parameters: int) -> Pair:
        a, b = (CARRIERS[carrier](role, "job") for role in ("replica 0", "shard 0"))
        a.allocate(held, gradients, parameters)
        meet(a, b, b.listen())

        def pump() -> None:
            a.poll(0)
            b.poll(0.001)

        return Pair(a, b, pump)

    check_transport(make_pair)


def test_the_same_range_is_the_same_tensor(make: Callable[..., End]) -> None:
    a, b = make("replica 0"), make("shard 0")
    arena = a.endpoint.allocate(Range(0, 4096), 2, 1)
    a.endpoint.connect("shard 0", b.endpoint.listen())
    for clock in range(3):
        for slot in (0, 1):
            a.endpoint.send("shard 0", Push(slot, 128, 256, 0, clock, NONE, 1, 1), arena.gradients[slot][128:256])
    b.until(lambda: len(b.got) == 6, a.endpoint)
    assert len({id(arrival.payload) for arrival in b.got}) == 2


def test_messages_sent_between_two_polls_leave_in_one_piece(make: Callable[..., End]) -> None:
    a, b = make("replica 0"), make("shard 0")
    a.endpoint.connect("shard 0", b.endpoint.listen())
    for clock in range(20):
        a.endpoint.send("shard 0", Pushed(0, clock, NONE))
    b.endpoint.poll(0)
    b.endpoint.poll(0)
    assert b.got == []
    a.endpoint.poll(0)
    b.until(lambda: b.got)
    assert [arrival.event.clock for arrival in b.got] == list(range(20))


def frame(body: bytes, version: int = wire.VERSION, length: int | None = None) -> bytes:
    return wire.PREFIX.pack(version, len(body) if length is None else length) + body


GARBAGE = {
    "another version": frame(b"\x90", version=wire.VERSION + 1),
    "too long": frame(b"", length=wire.MESSAGE_LIMIT + 1),
    "no message": frame(b"\xc1" * 10),
    "unknown message": frame(b"\x91\xa4Nope"),
    "lost from a wire": frame(b"\x92\xa4Lost\xa3why"),
    "second hello": hello(),
    "slot out of bounds": wire.encode(Push(1, 0, 64, 0, 0, NONE, 1, 1)),
    "negative slot": wire.encode(Push(-1, 0, 64, 0, 0, NONE, 1, 1)),
    "range out of bounds": wire.encode(Push(0, 0, 64 + 4096, 0, 0, NONE, 1, 1)),
    "backward range": wire.encode(Push(0, 64, 0, 0, 0, NONE, 1, 1)),
    "huge numbers": wire.encode(Push(0, 0, 1 << 62, 0, 0, NONE, 1, 1)),
    "answer to nobody": wire.encode(Fetched(0, 0, 64, NONE)),
    "fetch out of bounds": wire.encode(Fetch(0, 0, 1 << 40)),
}


def test_garbage_costs_the_link_it_came_on_and_no_other(make: Callable[..., End]) -> None:
    good, shard = make("replica 1"), make("shard 0")
    address = shard.endpoint.listen()
    good.endpoint.connect("shard 0", address)
    for name, garbage in GARBAGE.items():
        shard.got.clear()
        with raw(address) as bad:
            bad.sendall(hello() + wire.encode(Ready(())) + garbage + wire.encode(Ready(())))
            shard.until(lambda: shard.lost)
            assert [type(arrival.event) for arrival in shard.got] == [Ready, Lost], name
            assert shard.got[1].sender == "replica 0"
            assert closed(bad)
        good.endpoint.send("shard 0", Ready(()))
        shard.until(lambda: len(shard.got) == 3, good.endpoint)
        assert (shard.got[2].sender, shard.got[2].event) == ("replica 1", Ready(()))


BEYOND = {
    "a push that begins after its end": wire.encode(Push(0, 64, 0, 0, 0, NONE, 1, 1)),
    "a push past the end": wire.encode(Push(0, 64, 4096 + 64, 0, 0, NONE, 1, 1)),
    "a push from a second slot": wire.encode(Push(1, 0, 64, 0, 0, NONE, 1, 1)),
    "a push from before the first": wire.encode(Push(-1, 0, 64, 0, 0, NONE, 1, 1)),
    "a fetch past the end": wire.encode(Fetch(0, 64, 4096 + 64)),
    "a fetch into a third slot": wire.encode(Fetch(2, 0, 64)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_range_beyond_the_vectors_that_a_peer_lends_costs_its_link(name: str) -> None:
    shard = End(TcpEndpoint("shard 0", "job"))
    with raw(shard.endpoint.listen()) as bad:
        bad.sendall(
            hello(size=4096, gradients=1, parameters=2)
            + wire.encode(Fetch(1, 64, 4096))
            + BEYOND[name]
            + bytes(64)
            + wire.encode(Ready(()))
        )
        shard.until(lambda: shard.lost or len(shard.got) > 1)
        assert [type(arrival.event) for arrival in shard.got] == [Fetch, Lost]
    shard.endpoint.close()


STRANGE = {
    "no hello": wire.encode(Ready(())),
    "another job": hello(job="other"),
    "our own name": hello(role="shard 0"),
    "no name": hello(role=""),
    "negative incarnation": hello(incarnation=-1),
    "long hello": hello(role="x" * 5000),
    "vectors too long": hello(size=1 << 60, gradients=1),
    "too many vectors": hello(size=64, gradients=1 << 30),
    "negative size": hello(size=-4096, gradients=1, parameters=1),
}


def test_a_stranger_is_dropped_and_nobody_is_told(make: Callable[..., End]) -> None:
    shard = make("shard 0")
    address = shard.endpoint.listen()
    for name, first in STRANGE.items():
        with raw(address) as bad:
            bad.sendall(first)
            shard.until(lambda: closed(bad))
        assert shard.got == [], name


def test_a_link_that_ends_inside_a_message_is_lost(make: Callable[..., End]) -> None:
    shard = make("shard 0")
    address = shard.endpoint.listen()
    for cut in (1, 7, 8, 20, 40, 70):
        shard.got.clear()
        with raw(address) as peer:
            stream = hello(size=64, gradients=0) + wire.encode(Pushed(0, 1, NONE)) * 4
            peer.sendall(stream[: len(hello(size=64, gradients=0)) + cut])
        shard.until(lambda: shard.lost)
        assert len(shard.got) == cut // len(wire.encode(Pushed(0, 1, NONE))) + 1


def test_silent_strangers_are_dropped_after_5_s_and_when_there_are_more_than_64(
    make: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = make("shard 0")
    address = shard.endpoint.listen()
    waiting = []
    for _ in range(66):
        waiting.append(raw(address))
        shard.endpoint.poll(0)
    shard.until(lambda: closed(waiting[0]) and closed(waiting[1]))
    assert not any(closed(connection) for connection in waiting[2:])
    now = monotonic()
    for passed, gone in ((4.0, False), (5.1, True)):  # the first of them have been there for a while
        monkeypatch.setattr(sockets, "monotonic", lambda passed=passed: now + passed)
        shard.endpoint.poll(0)
        assert {closed(connection) for connection in waiting[2:]} == {gone}
    assert shard.got == []
    for connection in waiting:
        connection.close()


def test_who_spoke_in_time_to_somebody_busy_is_heard(make: Callable[..., End], monkeypatch: pytest.MonkeyPatch) -> None:
    shard = make("shard 0")
    with raw(shard.endpoint.listen()) as peer:
        shard.until(lambda: shard.endpoint._strangers)
        peer.sendall(hello() + wire.encode(Ready(())))
        late = monotonic() + 6
        monkeypatch.setattr(sockets, "monotonic", lambda: late)
        shard.endpoint.poll(0)
        assert [arrival.event for arrival in shard.got] == [Ready(())]


def test_many_who_come_at_once_and_have_spoken_are_all_heard(make: Callable[..., End]) -> None:
    """More than 64, of whom those who wait are not heard before others come: as the partitions of one replica do."""
    shard = make("shard 0")
    address, peers = shard.endpoint.listen(), []
    for number in range(200):
        peers.append(raw(address))
        peers[-1].sendall(hello(role=f"replica {number}") + wire.encode(Ready(())))
        if number % 40 == 39:
            shard.endpoint.poll(0)
    shard.until(lambda: len(shard.got) == 200)
    assert {arrival.event for arrival in shard.got} == {Ready(())}
    for peer in peers:
        peer.close()


def test_a_slow_hello_in_pieces_is_heard(make: Callable[..., End]) -> None:
    shard = make("shard 0")
    with raw(shard.endpoint.listen()) as peer:
        for byte in hello() + wire.encode(Ready(())):
            peer.sendall(bytes([byte]))
            shard.endpoint.poll(0.0001)
        shard.until(lambda: shard.got)
        assert shard.got[0].event == Ready(())


def test_only_a_higher_incarnation_replaces_a_link(make: Callable[..., End]) -> None:
    shard = make("shard 0")
    address = shard.endpoint.listen()
    first, again, second = make("replica 0", 1), make("replica 0", 1), make("replica 0", 2)
    for end in (first, again, second):
        end.endpoint.connect("shard 0", address)
        end.endpoint.send("shard 0", Pushed(end.endpoint.incarnation, 0, NONE))
        end.endpoint.poll(0)
        due, refused = (3 if end is second else 1), end is again
        shard.until(lambda: len(shard.got) == due and (again.lost or not refused), again.endpoint)  # noqa: B023
    assert [type(arrival.event) for arrival in shard.got] == [Pushed, Lost, Pushed]
    assert "incarnation 2" in shard.got[1].event.reason
    assert shard.got[2].event.slot == 2
    first.until(lambda: first.lost)
    shard.endpoint.send("replica 0", Ready(()))
    second.until(lambda: second.got, shard.endpoint)
    assert second.got[0].event == Ready(())


def test_a_peer_that_does_not_read_is_lost_when_the_queue_is_full(make: Callable[..., End]) -> None:
    shard, good = make("shard 0"), make("replica 1")
    address = shard.endpoint.listen()
    good.endpoint.connect("shard 0", address)
    with raw(address) as deaf:
        deaf.sendall(hello() + wire.encode(Ready(())))
        shard.until(lambda: shard.got)
        long = Stop("x" * (8 << 20))
        for _ in range(40):
            shard.endpoint.send("replica 0", long)
        shard.until(lambda: shard.lost, good.endpoint)
        assert "does not read" in shard.lost[0].reason
    good.endpoint.send("shard 0", Ready(()))
    shard.until(lambda: len(shard.got) == 3, good.endpoint)
    assert len(shard.lost) == 1


def test_what_was_sent_before_close_arrives_even_past_unread_messages(make: Callable[..., End]) -> None:
    a, b = make("replica 0"), make("shard 0")
    a.endpoint.connect("shard 0", b.endpoint.listen())
    a.endpoint.send("shard 0", Ready(()))
    b.until(lambda: b.got, a.endpoint)
    b.endpoint.send("replica 0", Ready(()))
    b.endpoint.poll(0)
    for clock in range(1000):
        a.endpoint.send("shard 0", Pushed(0, clock, NONE))
    a.endpoint.close()
    b.until(lambda: b.lost)
    assert [type(arrival.event) for arrival in b.got] == [Ready] + [Pushed] * 1000 + [Lost]


def test_an_address_in_use_is_named_with_the_remedy(make: Callable[..., End]) -> None:
    address = make("shard 0").endpoint.listen()
    with pytest.raises(UsageError, match=f"cannot listen at {address}.*in use.*choose another"):
        make("shard 1").endpoint.listen(address)


def test_nobody_at_an_address_fails_the_job_with_its_name(make: Callable[..., End]) -> None:
    there = make("shard 0")
    address = there.endpoint.listen()
    there.endpoint.close()
    with pytest.raises(JobFailed, match=f"replica 0 cannot reach shard 0 at {address}"):
        make("replica 0").endpoint.connect("shard 0", address)


def test_a_role_is_connected_to_once(make: Callable[..., End]) -> None:
    a, b = make("replica 0"), make("shard 0")
    address = b.endpoint.listen()
    a.endpoint.connect("shard 0", address)
    with pytest.raises(LocalProtocolError, match="wait for its Lost"):
        a.endpoint.connect("shard 0", address)


def test_an_address_of_another_kind_is_refused(make: Callable[..., End]) -> None:
    replica = make("replica 0").endpoint
    for address in (
        "", "nonsense", "tcp:", "tcp:host", "tcp:127.0.0.1:x", "tcp:127.0.0.1:99999", "unix:@", "unix:/tmp/x"
    ):  # fmt: skip
        with pytest.raises(UsageError, match="is no address of this carrier"):
            replica.connect("shard 0", address)


def test_a_watched_descriptor_is_served_by_poll(make: Callable[..., End]) -> None:
    end = make("shard 0").endpoint
    read, write = os.pipe()
    seen: list[bytes] = []
    end.watch(read, lambda: seen.append(os.read(read, 10)))
    os.write(write, b"stop")
    end.poll(SECONDS)
    assert seen == [b"stop"]
    os.close(write)
    end.close()
    os.close(read)


def test_a_payload_must_be_what_its_message_names(make: Callable[..., End]) -> None:
    a, b = make("replica 0"), make("shard 0")
    arena = a.endpoint.allocate(Range(0, 4096), 1, 1)
    a.endpoint.connect("shard 0", b.endpoint.listen())
    message = Push(0, 0, 128, 0, 0, NONE, 1, 1)
    for wrong in (None, arena.gradients[0][:64], arena.gradients[0][:256:2]):
        with pytest.raises(LocalProtocolError, match="a Push of 128 bytes"):
            a.endpoint.send("shard 0", message, wrong)


def test_an_endpoint_may_be_closed_by_what_it_is_told(make: Callable[..., End]) -> None:
    shard, first, second = make("shard 0"), make("replica 0", 0), make("replica 0", 1)
    address = shard.endpoint.listen()
    seen: list[Arrival] = []

    def deliver(arrival: Arrival) -> None:
        seen.append(arrival)
        if isinstance(arrival.event, Lost):
            shard.endpoint.close()

    shard.endpoint.deliver = deliver
    for end in (first, second):
        end.endpoint.connect("shard 0", address)
        end.endpoint.send("shard 0", Ready(()))
        shard.until(lambda: seen, end.endpoint)
    shard.until(lambda: len(seen) == 2, second.endpoint)
    assert [type(arrival.event) for arrival in seen] == [Ready, Lost]
    shard.endpoint.poll(None)
