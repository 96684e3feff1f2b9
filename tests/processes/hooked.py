"""A script of somebody's own: it trains with DistributedDataParallel, once for each algorithm it is told, by our hook
where that is not `plain`.

`play` writes for each algorithm what its rank ends with; `pairs:native` trains in pairs of ranks that know nothing of
each other, `apart:auto` as if they were on hosts of their own, `half:auto` as if the first rank had no memory to share;
`refused` asks for what cannot be. With an algorithm and `forever` it trains on; when that fails it says why, and stays
until it is told to end.
"""

import gc
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distbelief as db
from distbelief.integrations import hook

BATCH, STEPS = 6, 8
SPECIAL = ("pairs", "apart", "half")
here, memfd_create = hook._here, os.memfd_create


def none_left(_: str) -> int:
    raise OSError("no descriptor left")


def refuse() -> None:
    """Ask twice for shared memory where there is none, and for what the other rank does not ask for."""
    hook._here = dist.get_rank
    for algorithm, why in (
        ("shared", "not processes of one host"),
        (("auto", "native")[dist.get_rank()], "the ranks have different algorithms"),
    ):
        state, told = db.Reduce(algorithm), list[str]()
        for _ in range(2):
            try:
                state.start(torch.ones(3))
            except db.UsageError as error:
                told.append(str(error))
        assert [why in one for one in told] == [True, True]


def models() -> tuple[nn.Module, nn.Module]:
    """Two, whose gradients go over the same lines; the first has several buckets."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 120), nn.BatchNorm1d(120), nn.Linear(120, 3)
    ), nn.Linear(3, 2).double()


def train(folder: Path, told: str, forever: Callable[[], object] | None = None) -> None:
    """Train in one way; `forever`, which is called when some steps are made."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    special, _, algorithm = told.rpartition(":") if told.startswith(SPECIAL) else ("", "", told)
    hook._here = dist.get_rank if special == "apart" else here
    os.memfd_create = none_left if special == "half" else memfd_create
    theirs = ours = None
    if special == "pairs":
        (theirs, ours), _ = sorted(
            ([dist.new_group([first, first + 1]) for _ in range(2)] for first in range(0, ranks, 2)),
            key=lambda pair: dist.get_rank(pair[0]) < 0,
        )
    # a rank that fails in DDP's own broadcast of buffers tells nobody
    options = {"forward_sync_buffers": False} if forever else {}
    wrapped = [DistributedDataParallel(one, bucket_cap_mb=0.01, process_group=theirs, **options) for one in models()]
    state = None
    if algorithm != "plain":
        state = db.Reduce(algorithm, group=ours)
        for one in wrapped:
            one.register_comm_hook(state, db.comm_hook)
    optimizer = torch.optim.SGD([p for one in wrapped for p in one.parameters()], lr=0.1, momentum=0.9)
    samples = torch.Generator().manual_seed(5)
    step = 0
    while step < STEPS or forever:
        x, y = torch.randn(BATCH * ranks, 20, generator=samples), torch.randn(BATCH * ranks, 2, generator=samples)
        own = slice(rank * BATCH, (rank + 1) * BATCH)
        optimizer.zero_grad()
        (wrapped[1](wrapped[0](x[own]).double()) - y[own]).square().mean().backward()
        optimizer.step()
        step += 1
        if forever and step == STEPS:
            forever()
    weights = [p.detach() for one in wrapped for p in one.parameters()]
    torch.save((weights, state and state.chosen), folder / f"{told} {rank}")


def play(connection: Connection, folder: str, rank: int, ranks: int, *ways: str) -> None:
    """One rank of so many."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    if ways[1:] == ("forever",):
        try:
            train(Path(folder), ways[0], lambda: connection.send_bytes(b"it trains"))
        except RuntimeError as error:
            connection.send_bytes(str(error).encode())
        connection.recv_bytes()
        sys.exit(1)
    for one in ways:
        refuse() if one == "refused" else train(Path(folder), one)
    gc.collect()
    for left in [thread for thread in threading.enumerate() if thread.name == "all-reduce"]:
        left.join(10)  # one that collected its own garbage ends a moment later
        assert not left.is_alive()
    dist.destroy_process_group()
    connection.send_bytes(b"done")
