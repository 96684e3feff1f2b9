"""Torch's process group as the carrier of a sum: NCCL's all-reduce on GPUs, and gloo's elsewhere."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its stubs name none
from torch.distributed.distributed_c10d import _set_pg_timeout

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.messages import ALL_REDUCE
from distbelief.fabric.base import LOOK_SECONDS, MEET_SECONDS, InOrder, Told

STEP_SECONDS = 3600.0
"""Limit for the wait for a live member, at the store or for its gradient; a death is noticed at once."""
LEAVE_SECONDS = 2.0
"""Limit for the end of a group."""


class ProcessGroup(InOrder):
    """One replica's part in the groups of a job.

    `host` is the address at which the others reach this process. `interface` is the network interface towards them; ""
    lets the libraries choose.
    """

    def __init__(self, index: int, device: torch.device, host: str, interface: str = "") -> None:
        super().__init__(device)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        self._meeting = TCPStore(host, 0, is_master=True, wait_for_workers=False, use_libuv=True)
        self.store = f"{host}|{self._meeting.port}"
        self._index, self._rank, self._ranks = index, 0, 1

    def form(self, group: Assemble, interrupted: Told) -> bool:
        """Meet the others at the store of the first rank, as `Carrier.form`."""
        self.close()
        self.fault = ""
        ranks, rank = len(group.members), [roles.index_of(member.role) for member in group.members].index(self._index)
        host, _, port = group.members[0].store.partition("|")
        try:
            # torch's store would keep trying to reach a dead rank: find out first
            socket.create_connection((host, int(port)), MEET_SECONDS).close()
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=MEET_SECONDS), use_libuv=True)
            named = PrefixStore(f"group {group.group}", store)
            if not self._gather(named, rank, ranks, interrupted):
                return False
            self._check_devices(named, rank, ranks)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            patience = timedelta(seconds=MEET_SECONDS)
            dist.init_process_group(backend, store=named, rank=rank, world_size=ranks, timeout=patience)
            _set_pg_timeout(timedelta(seconds=STEP_SECONDS))
        except (OSError, RuntimeError, ValueError) as error:
            why = str(error) or type(error).__name__
            self.fault = f"it could not join the group: {why.splitlines()[0]}"
            return False
        self._rank, self._ranks = rank, ranks
        self._begin_round()
        return True

    @staticmethod
    def _gather(store: Store, rank: int, ranks: int, interrupted: Told) -> bool:
        """Wait until all are at the store."""
        # `init_process_group` could not be interrupted while it waits for a rank that died on its way here
        store.set(f"here {rank}", "")
        there, give_up = [f"here {rank}" for rank in range(ranks)], time.monotonic() + STEP_SECONDS
        while not store.check(there):
            if interrupted() or time.monotonic() > give_up:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _check_devices(self, store: Store, own_rank: int, ranks: int) -> None:
        """Refuse a GPU that two ranks share: NCCL would fail without naming the cause."""
        if self.device.type != "cuda":
            return
        store.set(f"device {own_rank}", str(torch.cuda.get_device_properties(self.device).uuid))
        devices = [store.get(f"device {rank}") for rank in range(ranks)]
        for rank, device in enumerate(devices):
            if (first := devices.index(device)) < rank:
                raise RuntimeError(
                    f"ranks {first} and {rank} share a GPU, but NCCL needs one for each: add --tls, or name an "
                    "--algorithm, as role links may share one, or take fewer replicas"
                )

    def _begin(self, bucket: int) -> torch.futures.Future[Any]:
        view, moved = self._views[bucket], self.traffic
        if self._buckets[bucket].adds:
            work = dist.all_reduce(view, async_op=True)
            # gloo and NCCL send the same number of bytes as a ring
            sent = received = 2 * (self._ranks - 1) * view.nbytes // self._ranks
        else:
            work = dist.broadcast(view, 0, async_op=True)
            # gloo broadcasts along a tree: all its sends are counted at the first rank
            sent, received = (0, view.nbytes) if self._rank else ((self._ranks - 1) * view.nbytes, 0)
        moved.sent[ALL_REDUCE] += sent
        moved.received[ALL_REDUCE] += received
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def close(self) -> None:
        self._begun = []
        if dist.is_initialized():
            leave(None)


def leave(group: dist.ProcessGroup | None) -> None:
    """Leave a group, or the default group for None, within `LEAVE_SECONDS`; members that wait for this rank notice."""
    # gloo waits for transfers under way, perhaps from a silent host
    thread = threading.Thread(target=dist.destroy_process_group, args=(group,), daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)
