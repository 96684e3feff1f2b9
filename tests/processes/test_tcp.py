"""What only the TCP carrier does: whom it lets in, what it advertises, how it asks the kernel to send."""

from __future__ import annotations

import socket

import pytest

from distbelief.errors import UsageError
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


@pytest.mark.parametrize(("asked", "got"), [("reno", "reno"), ("no such", None), ("", None)])
def test_tcp_congestion_control_is_chosen_where_allowed(asked: str, got: str | None) -> None:
    end = TcpEndpoint("shard 0", "job", congestion=asked)
    _, _, port = end.listen().rpartition(":")
    with socket.socket() as plain:
        default = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert port
    assert end._listener is not None
    assert end._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == (got.encode() if got else default.rstrip(b"\0"))
    end.close()
