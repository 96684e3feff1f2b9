"""Limits of this machine, each measured with as little code above the hardware as possible."""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks.parts.peers import ANSWER_SECONDS, Peers
from benchmarks.parts.shards import GRADIENT, RATE, mapped
from distbelief.transport.tcp import BUFFER

DOORBELL = b"d" * 64
"""Bytes of a push's message, approximately."""


class Limit(ABC):
    """An operation to repeat."""

    @abstractmethod
    def once(self) -> None:
        """Do it."""

    def trips(self, count: int) -> float:
        """Return the seconds of each operation, over `count` of them."""
        start = time.perf_counter()
        for _ in range(count):
            self.once()
        return (time.perf_counter() - start) / count

    def check(self) -> None:
        """Check that the operation worked."""

    def close(self) -> None:
        """Release its resources."""


def _ones(size: int) -> torch.Tensor:
    return torch.full((size // 4,), GRADIENT)


class Direct(Limit):
    """Update of shared parameters by the replica itself; on request it also copies the parameters, like a fetch."""

    def __init__(self, size: int, copies: bool = False) -> None:
        self._memory = os.memfd_create("distbelief measures")
        os.ftruncate(self._memory, 2 * size)
        both = mapped(self._memory, 2 * size).view(torch.float32)
        self._parameters, self._gradient = both[: size // 4], both[size // 4 :]
        self._gradient.fill_(GRADIENT)
        self._landing = torch.zeros(size // 4) if copies else None

    def once(self) -> None:
        self._parameters.add_(self._gradient, alpha=-RATE)
        if self._landing is not None:
            self._landing.copy_(self._parameters)

    def close(self) -> None:
        os.close(self._memory)


class Doorbell(Limit):
    """Few bytes over a Unix socket to a process that waits in epoll, and back."""

    def __init__(self, peers: Peers) -> None:
        # for an empty address, Linux chooses an abstract name
        self._socket = _accepted(peers, "doorbell", answer_doorbell, socket.socket(socket.AF_UNIX), "")
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)

    def once(self) -> None:
        self._socket.send(DOORBELL)
        self._epoll.poll()
        self._socket.recv(len(DOORBELL))

    def close(self) -> None:
        self._epoll.close()
        self._socket.close()


def _accepted(peers: Peers, name: str, answer: Any, listener: socket.socket, address: Any, *args: object) -> Any:
    """Start the other side of a connection with the address of a listener, and return the accepted connection."""
    with listener:
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(ANSWER_SECONDS)
        peers.start(name, 1, answer, listener.getsockname(), *args)
        return listener.accept()[0]


def answer_doorbell(_: Connection, address: bytes) -> None:
    """Send back received bytes until the other side closes."""
    bell = socket.socket(socket.AF_UNIX)
    bell.connect(address)
    epoll = select.epoll()
    epoll.register(bell, select.EPOLLIN)
    while True:
        epoll.poll()
        word = bell.recv(len(DOORBELL))
        if not word:
            return
        bell.send(word)


class RawTcp(Limit):
    """Blocking TCP connection: the gradient to the server, the update, and the parameters back."""

    def __init__(self, peers: Peers, size: int) -> None:
        listener = _tuned(socket.socket())
        self._socket = _accepted(peers, "raw socket", answer_raw, listener, ("127.0.0.1", 0), size)
        self._gradient, self._parameters = _ones(size), torch.zeros(size // 4)
        self._out, self._in = _bytes(self._gradient), _bytes(self._parameters)

    def once(self) -> None:
        self._socket.sendall(self._out)
        _receive(self._socket, self._in)

    def close(self) -> None:
        self._socket.close()


def answer_raw(_: Connection, address: tuple[str, int], size: int) -> None:
    """Apply each received gradient and send the parameters back, until the other side closes."""
    peer = _tuned(socket.socket())
    peer.connect(address)
    gradient, parameters = _ones(size), torch.zeros(size // 4)
    landing, answer = _bytes(gradient), _bytes(parameters)
    while _receive(peer, landing):
        parameters.add_(gradient, alpha=-RATE)
        peer.sendall(answer)


def _tuned(connection: socket.socket) -> socket.socket:
    """Set the options of `transport.tcp`, so that only our own code differs."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # a container may not be allowed to choose it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    return connection


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _receive(connection: socket.socket, room: memoryview) -> bool:
    """Fill a buffer; return False if the other side has closed."""
    have = 0
    while have < len(room):
        count = connection.recv_into(room[have:])
        if not count:
            return False
        have += count
    return True


class Gloo(Limit):
    """torch.distributed's send and recv over gloo: the gradient to the server, the update, and the parameters back."""

    def __init__(self, peers: Peers, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="distbelief-bench-")
        store = str(Path(self._folder.name) / "store")
        self._peer = peers.start("gloo", 1, answer_gloo, size, store)
        self._group = _gloo(store, 0)
        self._gradient, self._parameters = [_ones(size)], [torch.zeros(size // 4)]

    def once(self) -> None:
        self._group.send(self._gradient, 1, 0).wait()
        self._group.recv(self._parameters, 1, 0).wait()

    def close(self) -> None:
        """End the other side, which waits for the next request, and the group."""
        self._peer.process.kill()
        self._peer.process.join()
        del self._group
        self._folder.cleanup()


def answer_gloo(_: Connection, size: int, store: str) -> None:
    """Apply each received gradient and send the parameters back, until asked to end."""
    group = _gloo(store, 1)
    gradient, parameters = _ones(size), torch.zeros(size // 4)
    while True:
        group.recv([gradient], 0, 0).wait()
        parameters.add_(gradient, alpha=-RATE)
        group.send([parameters], 0, 0).wait()


def _gloo(store: str, rank: int) -> Any:
    """Make a group of two without `init_process_group`, which a process can call once."""
    kind: Any = dist.ProcessGroupGloo
    return kind(FileStore(store, 2), rank, 2, datetime.timedelta(seconds=ANSWER_SECONDS))
