"""What only the TCP carrier does: whom it lets in, what it advertises, how it asks the kernel to send."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from distbelief.core.effects import Arrival
from distbelief.core.events import Lost
from distbelief.errors import UsageError
from distbelief.transport import tcp
from distbelief.transport.tcp import TcpEndpoint


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:0", "tcp:192.0.2.1:4000", "tcp:[::]:0"])
def test_tcp_beyond_loopback_needs_the_users_word(address: str) -> None:
    end = TcpEndpoint("shard 0", "job")
    with pytest.raises(UsageError, match=r"not a loopback address.*--insecure"):
        end.listen(address)
    with pytest.raises(UsageError, match=r"not a loopback address.*--insecure"):
        end.connect("shard 1", address)
    end.close()


def test_tcp_binds_one_address_and_advertises_another() -> None:
    end = TcpEndpoint("shard 0", "job", insecure=True)
    address = end.listen("tcp:0.0.0.0:0", advertise="127.0.0.1")
    peer = TcpEndpoint("replica 0", "job")
    assert address.startswith("tcp:127.0.0.1:")
    peer.connect("shard 0", address)
    peer.close()
    end.close()


@pytest.mark.parametrize(("name", "allowed"), [(b"reno", True), (b"no such", False)])
def test_tcp_congestion_control_is_chosen_where_allowed(
    name: bytes, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "CONGESTION", name)
    end = TcpEndpoint("shard 0", "job")
    end.listen()
    with socket.socket() as plain:
        default = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    chosen = end._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    assert chosen == (name if allowed else default)
    end.close()


@pytest.mark.parametrize(
    ("silences", "borne"),
    [
        ((29.5,), True),
        ((30.5,), False),
        ((3.0, 0.1, 29.5), True),
        ((3.0, 0.1, 30.5), False),
        ((9.0, 0.1, 71.0), True),
        ((9.0, 0.1, 73.0), False),
        ((9.0, 0.1, 5.0, 0.1, 71.0), True),
        ((29.0, 0.1, 119.0), True),
        ((29.0, 0.1, 121.0), False),
    ],
    ids=str,
)
def test_a_silence_of_30_s_is_a_death_or_one_8_times_as_long_as_those_that_ended_or_one_of_two_minutes(
    silences: tuple[float, ...], borne: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, silence = 0.0, 0.0
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None))
    monkeypatch.setattr(tcp, "silence_of", lambda _: silence)
    a, b = TcpEndpoint("replica 0", "job"), TcpEndpoint("shard 0", "job")
    told: list[Arrival] = []
    a.deliver = told.append
    a.connect("shard 0", b.listen())
    for silence in silences:  # noqa: B007
        assert not told
        now += 1.5
        a.poll(0)
    assert [type(arrival.event) for arrival in told] == ([] if borne else [Lost])
    a.close()
    b.close()


def test_the_kernels_of_both_ends_look_every_second_and_bear_no_more_than_two_minutes() -> None:
    a, b = TcpEndpoint("replica 0", "job"), TcpEndpoint("shard 0", "job")
    a.connect("shard 0", b.listen())
    while not b._links:
        b.poll(0.01)
    for link in (*a._links.values(), *b._links.values()):
        ask, tcp_level = link.socket.getsockopt, socket.IPPROTO_TCP
        assert ask(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert (ask(tcp_level, socket.TCP_KEEPIDLE), ask(tcp_level, socket.TCP_KEEPINTVL)) == (1, 1)
        assert ask(tcp_level, socket.TCP_USER_TIMEOUT) == 120_000
    a.close()
    b.close()
