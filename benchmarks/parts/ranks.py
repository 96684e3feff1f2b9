"""One process of the benchmark allreduce: it adds on request, and reports the time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.parts import lines
from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble, Member
from distbelief.core.messages import Address
from distbelief.core.settings import Plan, Settings
from distbelief.fabric.base import Fabric
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.memory import SharedMemory, Window
from distbelief.fabric.role_links import ChunkedLinks, RoleLinks
from distbelief.integrations.hook import open_window
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.transport.secure import Identity
from distbelief.transport.tcp import TcpEndpoint
from distbelief.transport.tls import TlsEndpoint

SECONDS = 120.0
LEAD_SECONDS = 0.05
"""Seconds until the agreed moment at which all begin, enough for the slowest line."""
SWAPS = 10
PLAN = Plan(Settings(), lay_out([Tensor("weight", (1,), "float32")]), (), 0)
"""Settings outside of a job, which a group needs but does not use."""


def play(
    connection: Connection,
    rank: int,
    ranks: int,
    store: str,
    supervisor: int,
    memory: int,
    where: str,
    identity: Identity | None,
) -> None:
    """Serve requests `how|bytes|times` until asked to end; answer with the mean of the seconds.

    In a network namespace to enter (`where`), the answer has the seconds of each round, which all ranks begin together.
    All meet in the file `store`; `memory` is a descriptor of the process `supervisor`.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = lines.enter(where) if where else "lo"
    if where:
        lines.first()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS)
    )
    window = open_window(rank, ranks, None)
    place = os.open(f"/proc/{supervisor}/fd/{memory}", os.O_RDWR)
    groups = 0
    connection.send_bytes(b"ready")
    shared: dict[int, SharedMemory] = {}
    vectors: dict[int, torch.Tensor] = {}
    linked: dict[tuple[str, int], RoleLinks] = {}
    while True:
        how, size_, times_ = connection.recv_bytes().decode().split("|")
        if how == "end":
            break
        size, times = int(size_), int(times_)
        if size not in vectors:
            own = SharedMemory(place, rank, ranks)
            own.open(size, [Bucket(0, size, "float32")])
            shared[size], vectors[size] = own, torch.zeros(size // 4)
        dist.barrier()
        groups += 1
        if how == "place":
            shared[size].meet(groups, range(ranks))
        if how not in ("native", "copy", "place", "latency") and (how, size) not in linked:
            linked[how, size] = _linked(how, rank, ranks, size, identity)
        act = _act(how, (rank, ranks), window, linked.get((how, size), shared[size]), vectors[size])
        dist.barrier()
        taken = [_together(act) for _ in range(times)] if where else [_mean(act, times)]
        connection.send_bytes(" ".join(map(str, taken)).encode())
    dist.barrier()
    for one in linked.values():
        one.close()
    dist.destroy_process_group()
    connection.send_bytes(b"over")


def _mean(act: Callable[[], object], times: int) -> float:
    """Measure the seconds of each of several rounds."""
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times


def _together(act: Callable[[], object]) -> float:
    """Measure the seconds from a moment that all ranks agree on; they share a clock."""
    agreed = torch.tensor([time.monotonic() + LEAD_SECONDS], dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    moment = float(agreed)
    time.sleep(max(moment - time.monotonic(), 0.0))
    act()
    return time.monotonic() - moment


def _act(
    how: str, where: tuple[int, int], window: Window | None, fabric: Fabric, own: torch.Tensor
) -> Callable[[], object]:
    if how == "native":
        return lambda: dist.all_reduce(own)
    if how == "copy":
        assert window is not None, "the ranks are processes of one host"
        return partial(window.add_up, own)
    if how == "latency":
        return lambda: _swap(own.view(torch.uint8), *where)
    return partial(_add_up, fabric)


def _add_up(fabric: Fabric) -> None:
    fabric.ready(0)
    while (done := fabric.reduce()) is None:
        pass
    assert done, "a rank is gone"


def _linked(how: str, rank: int, ranks: int, size: int, identity: Identity | None) -> RoleLinks:
    """Form a group of all ranks over role links that adds one vector, by a ring over TLS or unencrypted."""
    role, algorithm = roles.replica(rank), "ring" if how == "tls" else how
    endpoint: TcpEndpoint | TlsEndpoint = (
        TlsEndpoint(role, "bench", identity=identity)
        if how == "tls" and identity
        else TcpEndpoint(role, "bench", insecure=True)
    )
    address = endpoint.listen("tcp:0.0.0.0:0", lines.address(rank) if identity else "127.0.0.1")
    per_host = 2 * (algorithm == "hierarchical")
    links = ChunkedLinks(endpoint, rank, ranks)
    fabric = RoleLinks(links, rank, torch.device("cpu"), algorithm, per_host, address)
    fabric.open(size, [Bucket(0, size, "float32")])
    stores: list[str] = [""] * ranks
    dist.all_gather_object(stores, fabric.store)
    members = tuple(Member(roles.replica(i), Address("", 0), False, store) for i, store in enumerate(stores))
    assert fabric.form(Assemble(0, PLAN, members, 0, 0, 0), lambda: False), fabric.fault
    return fabric


def _swap(tensor: torch.Tensor, rank: int, ranks: int) -> None:
    """Send to the next rank and receive from the previous one, several times."""
    there = torch.empty_like(tensor)
    for _ in range(SWAPS):
        come, go = dist.P2POp(dist.irecv, there, (rank - 1) % ranks), dist.P2POp(dist.isend, tensor, (rank + 1) % ranks)
        for work in dist.batch_isend_irecv([come, go]):
            work.wait()
